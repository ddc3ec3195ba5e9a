"""What is in a delta file."""

from __future__ import annotations

import os
from dataclasses import dataclass

from tpde.format.constants import DTYPES
from tpde.format.delta_head import SAME, SPARSE, WITH_BASE, Head, WeightsEntry
from tpde.io.sources import FileSource
from tpde.store.delta_file import DeltaFile, existing_delta


@dataclass(frozen=True)
class TensorChange:
    """A tensor of a delta.

    Attributes
    ----------
    name, file : str
        Its name, and the file of the target that holds it; empty for a file alone.
    dtype : str
        Its name in safetensors.
    shape : tuple of int
        Its dimensions.
    codec : {"same", "sparse", "dense", "full", "plain"}
        How it is stored (docs/delta.md 5.3).
    bytes, stored_bytes : int
        Its size in the target, and in the delta.
    changed : float or None
        The share of its words that changed, where the delta says so.
    """

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    codec: str
    bytes: int
    stored_bytes: int
    changed: float | None


@dataclass(frozen=True)
class DeltaReport:
    """A delta file.

    Attributes
    ----------
    path : str
        Where it is.
    base : str or None
        Where its base was, relative to it.
    file_bytes : int
        Its size.
    target_bytes : int
        Size of the target's tensors.
    ratio : float
        Size of the target's tensors over the size of the file.
    tensors : tuple of TensorChange
        In the order of the target's files.
    others : tuple of (str, int)
        The target's other files, and what they take in the delta: 0 if they are as in the base.
    """

    path: str
    base: str | None
    file_bytes: int
    target_bytes: int
    ratio: float
    tensors: tuple[TensorChange, ...]
    others: tuple[tuple[str, int], ...]

    @property
    def needs_base(self) -> bool:
        """Whether a tensor or another file is made of the base's."""
        return any(it.codec in WITH_BASE for it in self.tensors) or not all(size for _, size in self.others)


def inspect_delta(path: str | os.PathLike[str]) -> DeltaReport:
    """Tell what is in a delta.

    Raises
    ------
    InvalidInput
        If it is no delta.
    Truncated, Corrupt, UnsupportedVersion
        If it is damaged, or newer than this version.
    """
    file = DeltaFile(FileSource(existing_delta(path)))
    try:
        return report_of(file.head, file.name, file.size)
    finally:
        file.close()


def report_of(head: Head, name: str, size: int) -> DeltaReport:
    """What is in a delta, of so many bytes, of which the head is known."""
    tensors = []
    for entry in head.files:
        for it in entry.tensors if isinstance(entry, WeightsEntry) else ():
            words = it.spec.nbytes // DTYPES[it.spec.dtype].word_bytes
            changed = 0.0 if it.codec == SAME else None
            if it.codec == SPARSE and words:
                changed = sum(it.changes.tolist()) / words  # most tensors have one chunk
            tensors.append(
                TensorChange(
                    it.name,
                    entry.name,
                    it.spec.dtype,
                    it.spec.shape,
                    it.codec,
                    it.spec.nbytes,
                    it.size,
                    changed,
                )
            )
    total = sum(it.bytes for it in tensors)
    others = tuple((it.name, it.size) for it in head.others)
    return DeltaReport(name, head.base, size, total, total / size, tuple(tensors), others)
