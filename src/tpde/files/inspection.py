"""inspect: what a file's tensors are, how they are stored, and how far they could shrink."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tpde.codec import core_chunks, native
from tpde.codec.registry import PREFIX, codec_of
from tpde.codec.selection import base_header, core_layout, sample_ranges
from tpde.errors import InvalidInput
from tpde.files.forward_order import forward_order
from tpde.files.plot import plot
from tpde.files.reader import PackedFile, PackedTensor, Tensor
from tpde.files.walk import walk
from tpde.format.container import TensorSpec
from tpde.memory.garbage import collecting_later

PLAIN = "plain"
Counts = npt.NDArray[np.int64]
_BATCH, _BATCH_BYTES = (
    1024,
    1 << 20,
)  # tensors that are counted at a time: one by one takes many times as long
_NOTHING = memoryview(b"")


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
            with collecting_later():  # what is made here stays
                for batch in _batches(opened, sample):
                    entropies = _entropies(batch, counts) if sample else [None] * len(batch)
                    tensors += map(_tensor_report, repeat(name), batch, entropies)
    sums = _sums(tensors)
    total = _group("", sums.values())
    return Report(
        str(root),
        packed,
        tuple(f.relative_to(root).as_posix() if f != root else f.name for f in files),
        sum(f.stat().st_size for f in files),
        total.source_bytes,
        total.stored_bytes,
        total.bits_per_weight,
        total.ratio,
        _groups(sums, 0),
        _groups(sums, 1),
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


@dataclass
class _Look:
    """What there is to know of a tensor, and the words of its sample."""

    __slots__ = ("codec", "name", "spec", "stored_bytes", "words")

    name: str
    spec: TensorSpec
    stored_bytes: int
    codec: str
    words: memoryview


def _batches(opened: PackedFile, sample: bool) -> Iterator[list[_Look]]:
    """Tensors in the order of a forward pass, so many at a time that their samples stay small."""
    batch, whole, held = list[_Look](), list[_Look](), 0
    specs = opened.specs
    for name in forward_order(specs):
        spec = specs[name]
        ranges = sample_ranges(spec) if sample and spec.nbytes else []
        if len(ranges) <= 1 and opened.is_plain(name):
            look = _Look(name, spec, spec.nbytes, PLAIN, _NOTHING)
            if ranges:
                whole.append(look)
        else:
            tensor = opened.tensor(name)
            codec = codec_of(tensor.blob.header).name if isinstance(tensor, PackedTensor) else PLAIN
            words = _read_sample(tensor, ranges) if ranges else _NOTHING
            look = _Look(name, spec, tensor.stored_bytes, codec, words)
        held += sum([end - begin for begin, end in ranges])
        batch.append(look)
        if len(batch) == _BATCH or held >= _BATCH_BYTES:
            _read_whole(opened, whole)
            yield batch
            batch, whole, held = [], [], 0
    _read_whole(opened, whole)
    yield batch


def _read_whole(opened: PackedFile, looks: list[_Look]) -> None:
    """Read tensors that are stored as they are, and are their own samples."""
    for it, words in zip(looks, opened.read_plain([it.name for it in looks]), strict=True):
        it.words = words


def _read_sample(tensor: Tensor, ranges: list[tuple[int, int]]) -> memoryview:
    words, at = np.empty(sum(end - begin for begin, end in ranges), np.uint8), 0
    for begin, end in ranges:
        tensor.read(begin, end, words[at : at + end - begin])
        at += end - begin
    return words.data


def _entropies(batch: list[_Look], counts: dict[str, Counts]) -> list[float | None]:
    """The entropy of each tensor's sample; what is counted is added to the counts of its dtype."""
    found: list[float | None] = [None] * len(batch)
    places: dict[str, list[int]] = {}
    for i, it in enumerate(batch):
        if it.spec.dtype not in counts:
            counts[it.spec.dtype] = np.zeros(256, np.int64)
        if it.words.nbytes:
            places.setdefault(it.spec.dtype, []).append(i)
    for dtype, members in places.items():
        rows = _symbol_counts(dtype, [batch[i].words for i in members])
        counts[dtype] += rows.sum(axis=0)
        for i, value in zip(members, _entropy(rows), strict=True):
            found[i] = value
    return found


def _symbol_counts(dtype: str, samples: list[memoryview]) -> Counts:
    """Count the symbols in the symbol planes of samples: 256 numbers for each."""
    layout = _layout(dtype)
    symbols = core_chunks.split(layout, np.frombuffer(b"".join(samples), np.uint8))[-1]
    whose = np.repeat(np.arange(len(samples)), [words.nbytes // layout.word_bytes for words in samples])
    return np.bincount(256 * whose + symbols, minlength=256 * len(samples)).reshape(-1, 256)


@functools.cache
def _layout(dtype: str) -> native.CoreLayout:
    return core_layout(base_header(TensorSpec(dtype, (8,)), PREFIX.number))


def _entropy(counts: Counts) -> list[float]:
    """Entropy in bits of a symbol, of each row of counts; none is all zeros."""
    flat = counts.ravel()  # in which NumPy finds what is not zero in half the time
    there = np.flatnonzero(flat)
    rows, times = there // counts.shape[1], flat[there]
    p = times / np.bincount(rows, times)[rows]
    bits: list[float] = (0.0 - np.bincount(rows, p * np.log2(p))).tolist()  # 0.0 -: never -0.0
    return bits


def _ratio(source: int, stored: int) -> float:
    return source / stored if stored else 1.0


def _tensor_report(file: str, look: _Look, entropy: float | None) -> TensorReport:
    spec, stored = look.spec, look.stored_bytes
    nbytes, count = spec.nbytes, math.prod(spec.shape)
    return TensorReport(
        look.name,
        file,
        spec.dtype,
        spec.shape,
        nbytes,
        stored,
        look.codec,
        8 * stored / count if count else None,
        entropy,
        _ratio(nbytes, stored),
    )


# Of a codec and a dtype: tensors, source bytes, stored bytes, elements.
_Sums = dict[tuple[str, str], list[int]]


def _sums(tensors: list[TensorReport]) -> _Sums:
    """What tensors of a codec and a dtype have together. All groups come from this one pass."""
    found: _Sums = {}
    for it in tensors:
        sums = found.setdefault((it.codec, it.dtype), [0, 0, 0, 0])
        sums[0] += 1
        sums[1] += it.source_bytes
        sums[2] += it.stored_bytes
        sums[3] += math.prod(it.shape)
    return found


def _group(name: str, members: Iterable[list[int]]) -> Group:
    tensors, source, stored, count = map(sum, zip((0, 0, 0, 0), *members, strict=True))
    return Group(name, tensors, source, stored, 8 * stored / count if count else None, _ratio(source, stored))


def _groups(sums: _Sums, place: int) -> tuple[Group, ...]:
    """Groups by the codec, which is in place 0, or the dtype, in place 1."""
    names = {key[place] for key in sums}
    groups = [_group(name, [it for key, it in sums.items() if key[place] == name]) for name in names]
    return tuple(sorted(groups, key=lambda g: (-g.source_bytes, g.name)))


__all__ = ["Group", "Histogram", "Report", "TensorReport", "inspect", "plot"]
