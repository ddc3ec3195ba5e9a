"""inspect: what a file's tensors are, how they are stored, and how far they could shrink."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tpde.codec import native
from tpde.codec.plan import base_header, core_layout, sample_ranges
from tpde.codec.registry import PREFIX, codec_of
from tpde.errors import InvalidInput
from tpde.format.container import TensorSpec
from tpde.packing.order import forward_order
from tpde.packing.plot import plot
from tpde.packing.reader import PackedFile, PackedTensor, Tensor
from tpde.packing.tree import walk

PLAIN = "plain"
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TensorReport:
    """One tensor.

    Attributes
    ----------
    name, file : str
        Its name in the source, and the file that holds it, relative to what was inspected.
    dtype : str
        Its name in safetensors.
    shape : tuple of int
        Of the source's tensor.
    source_bytes, stored_bytes : int
        Its size in the source, and in this file.
    codec : {"plain", "prefix", "zstd", "constant"}
        How it is stored.
    bits_per_weight : float or None
        Stored bits for each element; None if it has no elements.
    entropy : float or None
        Of the symbol plane (docs/format.md 2.3), in bits for each word, measured on a sample: the least
        that an optimal code without context needs. None if it has no words, or was not asked for.
    ratio : float
        Source bytes over stored bytes; 1 for an empty tensor.
    """

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    source_bytes: int
    stored_bytes: int
    codec: str
    bits_per_weight: float | None
    entropy: float | None
    ratio: float


@dataclass(frozen=True)
class Group:
    """The tensors that have a codec or a dtype in common.

    Attributes
    ----------
    name : str
        Of the codec or the dtype.
    tensors : int
        How many there are.
    source_bytes, stored_bytes : int
        Their sizes in the source, and in this file.
    bits_per_weight : float or None
        Stored bits for each element.
    ratio : float
        Source bytes over stored bytes.
    """

    name: str
    tensors: int
    source_bytes: int
    stored_bytes: int
    bits_per_weight: float | None
    ratio: float


@dataclass(frozen=True)
class Histogram:
    """How often each symbol of a dtype's symbol plane occurs in the samples.

    Attributes
    ----------
    dtype : str
        The dtype.
    counts : tuple of int
        256 numbers. For BF16 and F32 the symbol is the biased exponent; docs/format.md 2.3 has the rest.
    """

    dtype: str
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Report:
    """What `inspect` found. `dataclasses.asdict` makes it ready for JSON.

    Attributes
    ----------
    path : str
        What was inspected.
    packed : bool
        Whether any file of it is packed.
    files : tuple of str
        The files, relative to `path`.
    file_bytes : int
        Their sizes, headers included.
    source_bytes, stored_bytes : int
        Sizes of all tensors in the source, and here.
    bits_per_weight : float or None
        Stored bits for each element.
    ratio : float
        Source bytes over stored bytes.
    by_codec, by_dtype : tuple of Group
        The same by codec and by dtype, largest first.
    tensors : tuple of TensorReport
        File by file, in the order of a forward pass.
    histogram : tuple of Histogram or None
        One for each dtype, if asked for.
    """

    path: str
    packed: bool
    files: tuple[str, ...]
    file_bytes: int
    source_bytes: int
    stored_bytes: int
    bits_per_weight: float | None
    ratio: float
    by_codec: tuple[Group, ...]
    by_dtype: tuple[Group, ...]
    tensors: tuple[TensorReport, ...]
    histogram: tuple[Histogram, ...] | None


def inspect(path: str | os.PathLike[str], *, histogram: bool = False) -> Report:
    """Tell what is in a safetensors file or a directory of them, packed or not.

    Sizes are exact. Entropies and histograms come from a sample of at most 64 chunks of each tensor, so
    that neither time nor memory grows with the size of tensors.

    Parameters
    ----------
    path : path-like
        A safetensors file, packed or plain, or a directory of such files.
    histogram : bool
        Keep the counts of symbols for each dtype.

    Returns
    -------
    Report

    Raises
    ------
    InvalidInput
        If it is not there, not a safetensors file, or a directory without one.
    Truncated, Corrupt, UnsupportedVersion, UnsupportedDtype
        If it is damaged, or newer than this version.

    Examples
    --------
    >>> import tpde
    >>> report = tpde.inspect("packed.safetensors")  # doctest: +SKIP
    >>> report.ratio, report.tensors[0].codec  # doctest: +SKIP
    (1.4962, 'prefix')
    """
    return survey(path, sample=True, histogram=histogram)


def survey(path: str | os.PathLike[str], *, sample: bool, histogram: bool = False) -> Report:
    """`inspect`, without a look at the words if `sample` is false: entropies are then None."""
    root = Path(path)
    files = list(safetensors_files(root))
    tensors: list[TensorReport] = []
    counts: dict[str, Counts] = {}
    packed = False
    for file in files:
        name = file.relative_to(root).as_posix() if file != root else file.name
        with PackedFile(file) as opened:
            packed |= opened.is_packed
            for tensor_name in forward_order(opened.specs):
                tensor = opened.tensor(tensor_name)
                if sample and tensor.spec.dtype not in counts:
                    counts[tensor.spec.dtype] = np.zeros(256, np.int64)
                seen = symbol_counts(tensor) if sample and tensor.spec.nbytes else None
                tensors.append(_tensor_report(tensor_name, name, tensor, seen))
                if seen is not None:
                    counts[tensor.spec.dtype] += seen
    total = _group("", tensors)
    return Report(
        str(root),
        packed,
        tuple(f.relative_to(root).as_posix() if f != root else f.name for f in files),
        sum(f.stat().st_size for f in files),
        total.source_bytes,
        total.stored_bytes,
        total.bits_per_weight,
        total.ratio,
        _groups(tensors, lambda t: t.codec),
        _groups(tensors, lambda t: t.dtype),
        tuple(tensors),
        tuple(Histogram(d, tuple(map(int, c))) for d, c in counts.items()) if histogram else None,
    )


def safetensors_files(path: Path) -> Iterator[Path]:
    """The file itself, or the safetensors files below a directory, in order.

    Raises
    ------
    InvalidInput
        If there is none.
    """
    if not path.is_dir():
        yield path
        return
    found = [path / name for name in walk(path).files if name.endswith(".safetensors")]
    if not found:
        raise InvalidInput(
            f"`{path}` has no `*.safetensors` file", hint="name a file, or another directory", where=str(path)
        )
    yield from found


def symbol_counts(tensor: Tensor) -> Counts:
    """Count the symbols in the sample of a tensor's symbol plane: 256 numbers."""
    spec = tensor.spec
    counts = np.zeros(256, np.int64)
    layout = _layout(spec)
    for begin, end in sample_ranges(spec):
        words = np.empty(end - begin, np.uint8)
        tensor.read(begin, end, words)
        if words.size:
            counts += np.bincount(native.split(layout, words)[-1], minlength=256)
    return counts


@functools.lru_cache(maxsize=64)  # many tensors are alike
def _layout(spec: TensorSpec) -> native.CoreLayout:
    return core_layout(base_header(spec, PREFIX.number))


def entropy(counts: Counts) -> float | None:
    """Entropy in bits of a symbol, or None if there are no symbols."""
    total = int(counts.sum())
    if not total:
        return None
    p = counts[counts > 0] / total
    return max(0.0, float(-(p * np.log2(p)).sum()))  # not -0.0 where one symbol has it all


def _ratio(source: int, stored: int) -> float:
    return source / stored if stored else 1.0


def _tensor_report(name: str, file: str, tensor: Tensor, counts: Counts | None) -> TensorReport:
    spec, stored = tensor.spec, tensor.stored_bytes
    codec = codec_of(tensor.blob.header).name if isinstance(tensor, PackedTensor) else PLAIN
    count = math.prod(spec.shape)
    return TensorReport(
        name,
        file,
        spec.dtype,
        spec.shape,
        spec.nbytes,
        stored,
        codec,
        8 * stored / count if count else None,
        entropy(counts) if counts is not None else None,
        _ratio(spec.nbytes, stored),
    )


def _group(name: str, tensors: list[TensorReport]) -> Group:
    source = sum(t.source_bytes for t in tensors)
    stored = sum(t.stored_bytes for t in tensors)
    count = sum(math.prod(t.shape) for t in tensors)
    bits = 8 * stored / count if count else None
    return Group(name, len(tensors), source, stored, bits, _ratio(source, stored))


def _groups(tensors: list[TensorReport], key: Callable[[TensorReport], str]) -> tuple[Group, ...]:
    parts: dict[str, list[TensorReport]] = {}
    for tensor in tensors:
        parts.setdefault(key(tensor), []).append(tensor)
    groups = [_group(name, members) for name, members in parts.items()]
    return tuple(sorted(groups, key=lambda g: (-g.source_bytes, g.name)))


__all__ = ["Group", "Histogram", "Report", "TensorReport", "inspect", "plot"]
