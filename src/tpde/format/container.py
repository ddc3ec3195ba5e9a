"""What the header of a safetensors container says (docs/format.md 1): tensors, their places, metadata."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple, cast

from tpde.errors import InvalidArgument, UnsupportedDtype
from tpde.format.constants import (
    DTYPES,
    MAX_BYTES,
    MAX_DIMS,
)

METADATA = "__metadata__"


@dataclass(frozen=True)
class TensorSpec:
    """Dtype and shape of a tensor.

    Parameters
    ----------
    dtype : str
        Its name in safetensors, such as `BF16`.
    shape : tuple of int
        Its dimensions; empty for a scalar. A list is taken, too, and so are integers of other libraries.

    Raises
    ------
    UnsupportedDtype
        If the dtype is not one of docs/format.md 2.1.
    InvalidArgument
        If the shape cannot be, or has what is no integer: a `ValueError`, too.
    """

    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise UnsupportedDtype(
                f"dtype `{self.dtype}` is not known to this version; known are {', '.join(DTYPES)}",
                hint="upgrade tpde",
                found=self.dtype,
                needed=tuple(DTYPES),
            )
        if type(self.shape) is not tuple or any(type(n) is not int for n in self.shape):
            object.__setattr__(self, "shape", _dimensions(self.shape))
        if len(self.shape) > MAX_DIMS or any(n < 0 for n in self.shape):
            raise InvalidArgument(
                f"a tensor cannot have the shape {str(self.shape)[:200]}",
                hint=f"give up to {MAX_DIMS} dimensions, none of them negative",
                where="shape",
                found=self.shape,
            )
        # Also of a tensor without elements: no library holds one whose other dimensions overflow.
        if math.prod(filter(None, self.shape)) * DTYPES[self.dtype].bits >= 8 * MAX_BYTES or self.bits % 8:
            raise InvalidArgument(
                f"a {self.dtype} tensor cannot have the shape {str(self.shape)[:200]}",
                hint="whole bytes below 2^60 are needed, with any dimension of 0 taken as 1",
                where="shape",
                found=self.shape,
            )

    @cached_property
    def bits(self) -> int:
        """Size in bits."""
        return math.prod(self.shape) * DTYPES[self.dtype].bits

    @cached_property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.bits // 8

    @cached_property
    def json(self) -> str:
        """What an entry of a header says of it."""
        return f'"dtype":"{self.dtype}","shape":[{",".join(map(str, self.shape))}]'


def _dimensions(shape: object) -> tuple[int, ...]:
    """A shape as integers.

    Raises
    ------
    InvalidArgument
        If it is none, or has what is no integer.
    """
    try:
        if not isinstance(shape, (list, tuple)) or any(isinstance(n, bool) for n in shape):
            raise TypeError
        return tuple(map(operator.index, shape))
    except TypeError:
        raise InvalidArgument(
            f"a tensor cannot have the shape {str(shape)[:200]}",
            hint="give a tuple of integers; `//` divides them",
            where="shape",
            found=shape,
        ) from None


@lru_cache(1 << 12)
def tensor_spec(dtype: str, shape: tuple[int, ...]) -> TensorSpec:
    """A `TensorSpec`, the same one for the same arguments: models have few, and they are quickly compared."""
    return TensorSpec(dtype, shape)


class Entry(NamedTuple):
    """A tensor of a container: what it is, and where its bytes lie in the data section."""

    spec: TensorSpec
    begin: int
    end: int


@dataclass(frozen=True)
class Container:
    """A parsed safetensors header.

    Attributes
    ----------
    header : bytes
        The header's JSON with its padding.
    entries : dict of str to Entry
        In ascending order of their bytes.
    metadata : dict of str to str
        The header's `__metadata__`.
    data_start : int
        Where the data section starts in the file, in bytes.
    """

    header: bytes
    entries: dict[str, Entry]
    metadata: dict[str, str]

    @cached_property
    def data_start(self) -> int:
        """Where the data section starts in the file, in bytes."""
        return 8 + len(self.header)

    @property
    def data_bytes(self) -> int:
        """Size of the data section."""
        return max((e.end for e in self.entries.values()), default=0)

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """What each tensor is."""
        return {name: entry.spec for name, entry in self.entries.items()}

    def places(self, names: Iterable[str]) -> list[tuple[int, int]]:
        """Where in the file some tensors begin, and their sizes."""
        start, found = self.data_start, [self.entries[name] for name in names]
        return [(start + begin, end - begin) for _, begin, end in found]


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return True


def _are_names(names: Collection[object]) -> bool:
    """Whether all names are what a tensor may be called, told by all of them at once."""
    try:
        texts = cast("Collection[str]", names)  # or else `join` says so
        return METADATA not in texts and _is_unicode("".join(texts))
    except TypeError:  # not texts
        return False


def check_texts(names: Collection[object], metadata: object) -> None:
    """Check names of tensors and `__metadata__`: what every reader demands, and so every writer asks for.

    Parameters
    ----------
    names : collection of str
        Of tensors.
    metadata : mapping of str to str
        Of the file.

    Raises
    ------
    ValueError
        Saying what is wrong, and where.
    """
    for name in () if _are_names(names) else names:
        if not isinstance(name, str):
            raise ValueError(f"the name {name!a:.200} is a {type(name).__name__}; names are texts")
        if name == METADATA:
            raise ValueError(f"a tensor cannot be called `{METADATA}`, which is the place of metadata")
        if not _is_unicode(name):
            raise ValueError(f"the name {name[:50]!a} is not Unicode")
    if not isinstance(metadata, Mapping):
        raise ValueError(f"`{METADATA}` is a {type(metadata).__name__}; it maps names to texts")
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            kinds = f"{type(key).__name__} to {type(value).__name__}"
            raise ValueError(f"`{METADATA}` maps {kinds} at {key!a:.200}; it maps names to texts")
        if not _is_unicode(key) or not _is_unicode(value):
            raise ValueError(f"`{METADATA}` at {key[:50]!a} is not Unicode")
