"""What `pickle` keeps of a packed weight: plain types, so that `torch.load(weights_only=True)` takes them.

What comes back may be anybody's: it is checked, and made sources of.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType
from typing import TypeAlias

import torch
import xxhash
from torch import Tensor, uint8

from tpde.codec import window_stacks
from tpde.errors import Corrupt, InvalidInput, PackedWeight
from tpde.weights.resident import Resident
from tpde.weights.source import Source
from tpde.weights.windowed import MAGIC, Windowed
from tpde.weights.windowed_experts import WindowedExperts

Digests: TypeAlias = list[str | None] | None
"""XXH3-128 of blobs in the window layout, for each blob; pickles of older versions have none."""


def what_is_pickled(sources: Sequence[Source]) -> tuple[list[Tensor], list[str], Digests]:
    """Blobs and names of sources, and hashes of those whose chunks have no checksums.

    Raises
    ------
    PackedWeight
        If PyTorch saves in the format that it had before 1.6.
    """
    _refuse_old_format(sources[0].name)
    blobs = [it.pickled() for it in sources]
    digests = [_digest(blob) if it.multiplies else None for blob, it in zip(blobs, sources, strict=True)]
    return blobs, [it.name for it in sources], digests


def _refuse_old_format(name: str) -> None:
    """Refuse what `torch.load` could not load: its blobs have no bytes yet when they are checked.

    Raises
    ------
    PackedWeight
        If this is called within what saves in that format.
    """
    saving = getattr(getattr(torch.serialization, "_legacy_save", None), "__code__", None)
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is saving:
            raise PackedWeight(
                f"`{name}` is packed, and could not be loaded from PyTorch's old file format",
                hint="leave out `_use_new_zipfile_serialization=False`, or save "
                "`tpde.nn.plain_state_dict(model)`",
            )
        frame = frame.f_back


def _digest(blob: Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(blob.cpu().numpy().data)


def pickled_sources(
    blobs: list[Tensor],
    names: list[str],
    shape: tuple[int, ...],
    name: str,
    tile_bytes: int,
    digests: Digests,
) -> list[Source]:
    """The sources of a weight; all arguments are those of `rebuild_tensor`.

    Raises
    ------
    InvalidInput
        If one of them is of another type, or a size is no size.
    Truncated, UnsupportedVersion, Corrupt
        If a blob is damaged: they are checked as those of a file are.
    """
    digests = [None] * len(names) if digests is None and isinstance(names, list) else digests
    known = (
        isinstance(blobs, list)
        and isinstance(names, list)
        and isinstance(digests, list)
        and len(blobs) == len(names) == len(digests)
        and all(isinstance(blob, Tensor) for blob in blobs)
        and all(isinstance(it, str) for it in (*names, name))
        and all(it is None or isinstance(it, str) for it in digests)
        and isinstance(shape, tuple)
        and all(isinstance(n, int) and 0 <= n < 1 << 62 for n in (*shape, tile_bytes))
    )
    if not known:
        raise InvalidInput(
            "what was pickled is no packed weight", hint="fetch it again", where=str(name)[:200]
        )
    assert digests is not None
    alone = len(blobs) == 1
    return [_source(blob, it, digest, alone) for blob, it, digest in zip(blobs, names, digests, strict=True)]


def _source(blob: Tensor, name: str, digest: str | None, alone: bool) -> Source:
    """A blob of any kind, which all of a weight or a part is in: they begin with different bytes."""
    made: Source
    magic = b""
    if blob.dtype is uint8 and blob.dim() == 1 and not blob.is_meta:
        magic = bytes(blob[: len(MAGIC)].tolist())
    if magic == MAGIC:
        made = Windowed(blob.contiguous(), name, prepared=alone)
    elif magic == window_stacks.MAGIC:
        made = WindowedExperts(blob.contiguous(), name)
    else:
        made = Resident(blob, name)
    if digest is not None and (found := _digest(blob.contiguous())) != digest:
        raise Corrupt(
            f"tensor `{name}`: the bytes hash to {found}, {digest[:32]} was pickled",
            hint="the file is damaged, fetch it again",
            tensor=name,
            found=found,
            needed=digest,
        )
    return made
