"""Weights that a plan keeps in the window layout: what they take, and bringing them to the device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from tpde.codec.registry import codec_of
from tpde.codec.windows import sections
from tpde.errors import InvalidInput
from tpde.format.blob_header import BlobHeader, align
from tpde.format.constants import MAX_PREFIX_CHUNK_WORDS
from tpde.loading.checkpoint_files import GROUP_BYTES, Stored
from tpde.loading.footprint import ALIGN
from tpde.loading.reading import read_in_turn
from tpde.loading.runs import Run
from tpde.memory.device_memory import allocate
from tpde.nn.kernels import MOST_SHARE
from tpde.nn.tiles import least_tile_bytes, whole_tile_bytes
from tpde.planning.units import Windows
from tpde.weights.packed_tensor import PackedTensor
from tpde.weights.resident import Resident
from tpde.weights.source import Source, decoded
from tpde.weights.windowed import Windowed

log = logging.getLogger("tpde")

# Entries that a plan has room for, of a matrix's words: of trained weights 1 to 2 % are escapes, most of them
# one entry each (docs/windows.md). What one matrix does not need, others may have.
ENTRIES = 0.03
# Of a matrix, decoded at a time for many rows of inputs: which takes 34 us at 2.0 TB/s, longer
# than the host takes to launch it.
STRIP_BYTES = 64 << 20
# Of device memory that PyTorch takes beside a blob and a plain weight, by rounding, and for counting escapes.
SPARE_BYTES = 48 << 20


def window_room(part: Stored, header: BlobHeader) -> int:
    """Bytes that a plan keeps for a bf16 matrix in the window layout, or packed if it has too many escapes.

    0 if that is hardly less than it takes plain, or if it could not be decoded in pieces if it stays packed.
    """
    rows, columns = part.shape
    if codec_of(header).stays or least_tile_bytes(columns, 2, MAX_PREFIX_CHUNK_WORDS) > STRIP_BYTES:
        return 0
    try:
        most = sections(rows, columns, int(ENTRIES * rows * columns)).nbytes
    except InvalidInput:  # it has no window layout
        return 0
    room = align(max(most, part.extent.size), ALIGN)
    return room if room <= MOST_SHARE * part.nbytes else 0


def strip_room(part: Stored) -> int:
    """Bytes that rows of a matrix are decoded to, those of all of it if it is small."""
    return min(STRIP_BYTES, align(whole_tile_bytes(part.nbytes, 2, MAX_PREFIX_CHUNK_WORDS), ALIGN))


def windows_of(
    runs: Mapping[str, Run[Stored]], fused: Collection[str], headers: Mapping[Stored, BlobHeader], plain: int
) -> Windows | None:
    """What a unit comes to in the window layout.

    Parameters
    ----------
    runs : mapping of str to Run
        Its parameters.
    fused : collection of str
        Those of the model that linear layers may multiply from windows: bf16 matrices, each of one tensor.
    headers : mapping of Stored to BlobHeader
        Of all tensors that they are made of.
    plain : int
        Bytes of all of them, plain.

    Returns
    -------
    Windows or None
        None if none of its matrices can be there.
    """
    parts = [run.parts[0] for name, run in runs.items() if name in fused]
    rooms = {it: window_room(it, headers[it]) for it in parts}
    there = {it: room for it, room in rooms.items() if room}
    if not there:
        return None
    read, matrices = sum(there.values()), sum(align(it.nbytes, ALIGN) for it in there)
    return Windows(
        size=read + sum(align(it.extent.size, ALIGN) for it in headers if it not in there),
        read=read,
        matrices=matrices,
        beside=plain - matrices,
        strip=max(strip_room(it) for it in there),
        rows=max(min(it.shape[0], STRIP_BYTES // (2 * it.shape[1])) for it in there),
    )


class _Arena:
    """Device memory for weights in the window layout: one after the other, each where the one before ends.

    PyTorch would round each of them up by 1 MiB on average, and leave holes where they were encoded from.
    """

    def __init__(self, rooms: Mapping[Stored, int], device: torch.device) -> None:
        self._rooms = rooms
        self._memory = allocate(sum(rooms.values()), device, "the room for weights in the window layout")
        self._used = self._end = 0

    def put(self, part: Stored, packed: Resident) -> Source:
        """A weight in the window layout; as it is packed, if its share and what others left is too little."""
        self._end += self._rooms[part]
        room = self._memory[self._used : self._end]
        made: Source | None = Windowed.of_plain(decoded(packed), part.name, MOST_SHARE, room)
        if made is None:
            blob = packed.blob
            made = Resident(room[: blob.numel()].copy_(blob), part.name)
        self._used = align(self._used + made.packed_bytes, ALIGN)
        return made


def groups_in(
    room: int, stored: Sequence[Stored], *, group_bytes: int = GROUP_BYTES
) -> Iterator[list[Stored]]:
    """Blobs to be on a device at a time, beside one of them plain.

    Parameters
    ----------
    room : int
        Bytes for both.
    stored : sequence of Stored
        The largest first; each of them fits alone.
    group_bytes : int
        Plain bytes of those that are there at a time, at most, unless it is one.
    """
    group: list[Stored] = []
    plain = there = 0
    for it in stored:
        size = align(it.extent.size, ALIGN)
        most = (group or [it])[0].nbytes
        if group and (plain + it.nbytes > group_bytes or there + size + most > room):
            yield group
            group, plain, there = [], 0, 0
        group.append(it)
        plain, there = plain + it.nbytes, there + size
    if group:
        yield group


def bring_windows(
    rooms: Mapping[Stored, int],
    device: torch.device,
    room: int,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> dict[str, Source]:
    """Read packed matrices, and put them on a device in the window layout.

    They are encoded there if their blobs and one of them plain fit beside, in `room`; else on the CPU, to the
    same bytes.

    Parameters
    ----------
    rooms : mapping of Stored to int
        The matrices, and what is kept for each: `window_room`.
    device : torch.device
        Where they go. It has memory for all of these, and `room` more.
    room : int
        Bytes.
    progress : callable, optional
        Called with numbers of bytes that were read.

    Returns
    -------
    dict of str to Source
        Each `Windowed`, or `Resident` if it needs more.

    Raises
    ------
    Truncated, Corrupt, UnsupportedVersion
        If a file ends before a blob does, or one is damaged.
    OutOfMemory
        If they do not fit.
    """
    if not rooms:
        return {}
    arena, found = _Arena(rooms, device), dict[str, Source]()
    room -= SPARE_BYTES
    ordered = sorted(rooms, key=lambda it: -it.nbytes)
    small = [it for it in ordered if align(it.extent.size, ALIGN) + it.nbytes <= room]
    for at, groups in (
        (torch.device("cpu"), [[it] for it in ordered if it not in small]),
        (device, list(groups_in(room, small))),
    ):
        coming = iter(groups)

        def use(read: Sequence[torch.Tensor], coming: Iterator[list[Stored]] = coming) -> None:
            for it, data in zip(next(coming), read, strict=True):
                found[it.name] = arena.put(it, it.checked(Resident(data, it.name)))
                progress(it.extent.size)

        read_in_turn(([it.extent for it in group] for group in groups), at, use)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # of what they were encoded from: the ring comes in one piece
    for it in found.values():
        if isinstance(it, Windowed):
            it.strip_bytes, it.budgeted = STRIP_BYTES, True
    return found


def settle(parts: Mapping[str, PackedTensor], rooms: Mapping[str, int]) -> dict[str, Any]:
    """Let those matrices that stay packed be decoded a strip at a time, for which a plan has room.

    Parameters
    ----------
    parts : mapping of str to PackedTensor
        What was brought by `bring_windows`, by parameters.
    rooms : mapping of str to int
        What each is decoded to: `strip_room`.

    Returns
    -------
    dict of str to int
        How many weights are in the window layout, and their bytes.
    """
    packed = {name: it for name, it in parts.items() if not it.multiplies}
    for name, it in packed.items():
        it.tile_bytes = rooms[name]
    if packed:
        log.warning(
            "%d of %d weights have too many escapes for the window layout under this budget, and are decoded "
            "for each product, such as `%s`",
            *(len(packed), len(parts), next(iter(packed))),
        )
    there = [it.packed_bytes for it in parts.values() if it.multiplies]
    return {"window_weights": len(there), "window_bytes": sum(there)}
