"""`safe_open`: tensors and slices of tensors, read straight from the packed form."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args

import numpy as np

from tpde.codec.native import Bytes
from tpde.errors import InvalidArgument, InvalidIndex, InvalidInput, UnsupportedDtype
from tpde.files.reader import PackedFile
from tpde.files.target_device import target_device
from tpde.files.tensor_reader import StoredTensor
from tpde.files.thread_count import check_threads
from tpde.format.constants import DTYPES
from tpde.format.container import TensorSpec
from tpde.frameworks import to_numpy, to_torch

if TYPE_CHECKING:
    import torch

Framework = Literal["pt", "torch", "pytorch", "np", "numpy"]
Backend = Literal["mmap", "pread"]
Index = int | np.integer[Any] | slice | EllipsisType


def _convert(data: Bytes, spec: TensorSpec, framework: str) -> Any:
    if framework in ("np", "numpy"):
        return to_numpy(data, spec)
    return to_torch(data, spec, ', or read with `framework="np"`')


class safe_open:
    """Open a packed (or plain) safetensors file and read its tensors one by one.

    Parameters
    ----------
    filename : path-like, bytes-like
        The file, or the bytes of one.
    framework : {"pt", "torch", "pytorch", "np", "numpy"}
        What tensors are made of.
    device : str, int or torch.device, optional
        Where PyTorch tensors go; they are decoded on the CPU, and then copied. A number is that of a GPU.
    threads : int, optional
        How many threads decode; by default one for each processor.
    backend : {"mmap", "pread"}
        As of `safetensors.safe_open`. Files are read, not mapped, whichever is said.

    Raises
    ------
    Truncated, NotSafetensors, Corrupt, UnsupportedVersion, UnsupportedDtype, InvalidInput
        If the file cannot be read.
    UnsupportedDevice
        If the device is none, or not there.

    Examples
    --------
    >>> import tpde
    >>> with tpde.safe_open("packed.safetensors", framework="pt") as file:  # doctest: +SKIP
    ...     for name in file.keys():
    ...         tensor = file.get_tensor(name)
    ...     row = file.get_slice("embed.weight")[17]
    """

    def __init__(
        self,
        filename: str | os.PathLike[str] | bytes | bytearray | memoryview,
        framework: Framework = "pt",
        device: str | int | torch.device | None = "cpu",
        *,
        threads: int | None = None,
        backend: Backend = "mmap",
    ) -> None:
        if backend not in ("mmap", "pread"):
            raise InvalidArgument(
                f"no backend `{backend!s:.50}`",
                hint="there are `mmap` and `pread`; files are read in one way, whichever is said",
                where="backend",
                found=backend,
            )
        if framework not in get_args(Framework):
            raise InvalidArgument(
                f"no framework `{framework!s:.50}`",
                hint="there are `pt` (PyTorch) and `np` (NumPy)",
                where="framework",
                found=framework,
            )
        device = "cpu" if device is None else device
        elsewhere = str(device) != "cpu"
        if framework in ("np", "numpy") and elsewhere:
            raise InvalidArgument(
                f"NumPy arrays live on the CPU, not on `{device!s:.50}`",
                hint='leave `device` out, or pass `framework="pt"`',
                where="device",
                found=device,
            )
        self._framework = framework
        self._device = target_device(device) if elsewhere else None
        self._threads = check_threads(threads)
        self._file = PackedFile(filename)

    def keys(self) -> list[str]:
        """Names of all tensors, as in the source."""
        return list(self._file.specs)

    def offset_keys(self) -> list[str]:
        """Names of all tensors, in the order of their bytes in the source."""
        return self._file.offset_names()

    def metadata(self) -> dict[str, str] | None:
        """The source's `__metadata__`, None if it has none."""
        return self._file.metadata() or None

    def get_tensor(self, name: str) -> Any:
        """Decode a whole tensor.

        Every chunk's checksum is checked; of a tensor that is stored plain, its hash.

        Raises
        ------
        UnknownTensor
            If there is no such tensor: a `KeyError`, too.
        InvalidInput
            If the file is closed.
        Corrupt
            Naming tensor and chunk, if it is damaged; of one that is stored plain, the tensor.
        """
        data, spec = self._file.read(name, self._threads), self._file.specs[name]
        return self._place(_convert(data, spec, self._framework))

    def get_tensors(self) -> dict[str, Any]:
        """Decode all tensors, in the order of their bytes in the source.

        Raises
        ------
        InvalidInput, Corrupt
            As of `get_tensor`.
        """
        return {name: self.get_tensor(name) for name in self.offset_keys()}

    def get_slice(self, name: str) -> TensorSlice:
        """Open a tensor to be indexed; only the chunks that an index needs are read and decoded.

        Each of them is checked. A tensor that is stored plain has one hash: it is compared where all of it is
        read, and not for a part.
        """
        return TensorSlice(self._file.tensor(name), self._framework, self._threads, self._place)

    def _place(self, tensor: Any) -> Any:
        return tensor if self._device is None else tensor.to(self._device)

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __enter__(self) -> safe_open:
        return self

    def __exit__(self, *exc: Any) -> None:
        self._file.close()

    def close(self) -> None:
        """Close the file. Tensors that were read stay valid.

        A file that nobody closed is closed when nobody has it any longer.
        """
        self._file.close()

    def __reduce__(self) -> NoReturn:
        raise InvalidInput(
            f"`{self._file.source.name}` is open, and an open file means nothing in another process",
            hint="pass its path, and open it there",
            where=self._file.source.name,
        )


class TensorSlice:
    """A tensor that is decoded where it is indexed: `file.get_slice(name)[2:5, :, 0]`.

    Indices are integers, slices (steps from 1) and one ellipsis. What lies between the first and the last
    element asked for is decoded, so leading dimensions narrow the work, trailing ones do not.
    """

    def __init__(self, tensor: StoredTensor, framework: str, threads: int, place: Any) -> None:
        self._tensor, self._framework, self._threads, self._place = tensor, framework, threads, place

    def get_shape(self) -> list[int]:
        """The tensor's dimensions."""
        return list(self._tensor.spec.shape)

    def get_dtype(self) -> str:
        """The tensor's dtype, by its name in safetensors."""
        return self._tensor.spec.dtype

    def __getitem__(self, index: Index | tuple[Index, ...]) -> Any:
        spec = self._tensor.spec
        dims = _normalise(index, spec.shape)
        # Elements from `begin` on that cover every one asked for, as an array of `shape`: leading integers
        # fix a position, the next dimension a range, all others are whole.
        begin, shape = 0, list(spec.shape)
        rest: list[int | slice | None] = list(dims)
        while rest and isinstance(rest[0], int):
            begin += rest.pop(0) * math.prod(shape[1:])  # type: ignore[operator]
            shape.pop(0)
        if rest:
            rows = rest[0]
            assert isinstance(rows, slice)
            low, count = rows.start, len(range(rows.start, rows.stop, rows.step))
            high = low + (count - 1) * rows.step + 1 if count else low
            begin += low * math.prod(shape[1:])
            shape[0], rest[0] = high - low, slice(0, high - low, rows.step)
        bits = DTYPES[spec.dtype].bits
        first, size = begin * bits, math.prod(shape) * bits
        if bits < 8 and rest:
            # PyTorch's elements are whole bytes of them: it indexes the last dimension by bytes.
            rest[-1] = _in_bytes(rest[-1], shape[-1], bits)
        if first % 8 or size % 8 or (rest and rest[-1] is None):
            raise UnsupportedDtype(
                f"this slice of a {spec.dtype} tensor of shape {list(spec.shape)} starts or ends "
                "inside a byte",
                hint="ask for whole rows, or for the tensor, and index that",
                found=spec.dtype,
            )
        if size // 8 == spec.nbytes:
            data = self._tensor.read_all(self._threads)
        else:
            data = np.empty(size // 8, np.uint8)
            self._tensor.read(first // 8, (first + size) // 8, data, self._threads)
        array = _convert(data, TensorSpec(spec.dtype, tuple(shape)), self._framework)
        return self._place(array[tuple(rest)] if rest else array)


def _in_bytes(part: int | slice | None, size: int, bits: int) -> slice | None:
    """The bytes that a part of `size` numbers of fewer bits is; None if it is not whole ones side by side."""
    if not isinstance(part, slice) or (part.step != 1 and part.start < part.stop):
        return None
    if (part.start, part.stop) == (0, size):  # of which making the tensor says more, if they are no pairs
        return slice(None)
    begin, end = part.start * bits, part.stop * bits
    if begin == end:
        return slice(0, 0)
    return None if begin % 8 or end % 8 else slice(begin // 8, end // 8)


def _normalise(index: Index | tuple[Index, ...], shape: tuple[int, ...]) -> list[int | slice]:
    """One integer or slice, both within bounds, for each dimension."""
    parts = index if isinstance(index, tuple) else (index,)
    given = [part for part in parts if part is not Ellipsis]
    if len(parts) - len(given) > 1:
        raise InvalidIndex("an index has at most one ellipsis", found=len(parts) - len(given), needed=1)
    if len(given) > len(shape):
        raise InvalidIndex(
            f"{len(given)} indices for a tensor of {len(shape)} dimensions",
            found=len(given),
            needed=len(shape),
        )
    at = next((i for i, part in enumerate(parts) if part is Ellipsis), len(parts))
    whole = [slice(None)] * (len(shape) - len(given))
    full = [*parts[:at], *whole, *parts[at + 1 :]]
    result: list[int | slice] = []
    for part, size in zip(full, shape, strict=True):
        if isinstance(part, slice):
            try:
                start, stop, step = part.indices(size)
            except (TypeError, ValueError) as error:
                raise InvalidIndex(
                    f"`{part}` cannot be sliced by: {error}",
                    hint="bounds are integers, and steps start at 1",
                    found=part,
                ) from None
            if step < 1:
                raise InvalidIndex(f"a step of {step}", hint="steps start at 1", found=step, needed=1)
            # A longer step takes no more than the first, and PyTorch none of more than 64 bits.
            result.append(slice(start, max(stop, start), min(step, max(size, 1))))
        elif isinstance(part, (int, np.integer)) and not isinstance(part, bool):
            if not -size <= part < size:
                raise InvalidIndex(
                    f"index {part} is out of range for a dimension of {size}", found=part, needed=size
                )
            result.append(int(part) % size)
        else:
            raise InvalidIndex(
                f"an index of type {type(part).__name__}", hint="use integers, slices and `...`", found=part
            )
    return result
