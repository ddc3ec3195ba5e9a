"""What `inspect` finds: tensors, groups of them, and histograms of symbols."""

from __future__ import annotations

from dataclasses import dataclass


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
class GroupReport:
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
    by_codec, by_dtype : tuple of GroupReport
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
    by_codec: tuple[GroupReport, ...]
    by_dtype: tuple[GroupReport, ...]
    tensors: tuple[TensorReport, ...]
    histogram: tuple[Histogram, ...] | None
