"""inspect: what a file's tensors are, how they are stored, and how far they could shrink."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from itertools import repeat

from tpde.files.entropy import Counts, entropies_of
from tpde.files.inputs import safetensors_files
from tpde.files.inspection_report import GroupReport, Histogram, Report, TensorReport
from tpde.files.reader import PackedFile
from tpde.files.sampling import Look, looks_at
from tpde.io.paths import given_path
from tpde.memory.garbage import collecting_later


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
    root = given_path(path)
    files = list(safetensors_files(root))
    tensors: list[TensorReport] = []
    counts: dict[str, Counts] = {}
    packed = False
    for file in files:
        name = file.relative_to(root).as_posix() if file != root else file.name
        with PackedFile(file) as opened:
            packed |= opened.is_packed
            with collecting_later():  # what is made here stays
                for batch in looks_at(opened, sample):
                    entropies = entropies_of(batch, counts) if sample else [None] * len(batch)
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


def _ratio(source: int, stored: int) -> float:
    return source / stored if stored else 1.0


def _tensor_report(file: str, look: Look, entropy: float | None) -> TensorReport:
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


def _group(name: str, members: Iterable[list[int]]) -> GroupReport:
    tensors, source, stored, count = map(sum, zip((0, 0, 0, 0), *members, strict=True))
    return GroupReport(
        name, tensors, source, stored, 8 * stored / count if count else None, _ratio(source, stored)
    )


def _groups(sums: _Sums, place: int) -> tuple[GroupReport, ...]:
    """Groups by the codec, which is in place 0, or the dtype, in place 1."""
    names = {key[place] for key in sums}
    groups = [_group(name, [it for key, it in sums.items() if key[place] == name]) for name in names]
    return tuple(sorted(groups, key=lambda g: (-g.source_bytes, g.name)))
