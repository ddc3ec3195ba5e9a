"""What `pickle` kept of a packed weight, which may be anybody's: checked, and made sources of."""

from __future__ import annotations

from torch import Tensor, uint8

from tpde.codec import window_stacks
from tpde.errors import InvalidInput
from tpde.weights.resident import Resident
from tpde.weights.source import Source
from tpde.weights.windowed import MAGIC, Windowed
from tpde.weights.windowed_experts import WindowedExperts


def pickled_sources(
    blobs: list[Tensor], names: list[str], shape: tuple[int, ...], name: str, tile_bytes: int
) -> list[Source]:
    """The sources of a weight; all arguments are those of `rebuild_tensor`.

    Raises
    ------
    InvalidInput
        If one of them is of another type, or a size is no size.
    Truncated, UnsupportedVersion, Corrupt
        If a blob is damaged: they are checked as those of a file are.
    """
    known = (
        isinstance(blobs, list)
        and isinstance(names, list)
        and len(blobs) == len(names)
        and all(isinstance(blob, Tensor) for blob in blobs)
        and all(isinstance(it, str) for it in (*names, name))
        and isinstance(shape, tuple)
        and all(isinstance(n, int) and 0 <= n < 1 << 62 for n in (*shape, tile_bytes))
    )
    if not known:
        raise InvalidInput(
            "what was pickled is no packed weight", hint="fetch it again", where=str(name)[:200]
        )
    alone = len(blobs) == 1
    return [_source(blob, it, alone) for blob, it in zip(blobs, names, strict=True)]


def _source(blob: Tensor, name: str, alone: bool) -> Source:
    """A blob of any kind, which all of a weight or a part is in: they begin with different bytes."""
    if blob.dtype is uint8 and blob.dim() == 1 and not blob.is_meta:
        magic = bytes(blob[: len(MAGIC)].tolist())
        if magic == MAGIC:
            return Windowed(blob.contiguous(), name, prepared=alone)
        if magic == window_stacks.MAGIC:
            return WindowedExperts(blob.contiguous(), name)
    return Resident(blob, name)
