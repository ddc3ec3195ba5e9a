"""Plain matrices into the window layout, on CPU or GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tpde.codec import window_plan, windows
from tpde.codec.native import Bytes
from tpde.codec.windows import FLAG_ZERO, Window
from tpde.cuda.window_encode import ChosenWindow
from tpde.errors import InvalidInput
from tpde.files.thread_count import default_threads
from tpde.format.blob_header import align
from tpde.weights.encode_launches import EncodeLaunches

_ALIGN = 128  # of sections, windows.md 5.2
_SPARE = 1024  # entries


class EncodedWindow(NamedTuple):
    """A window blob, one-dimensional and uint8, and what it holds."""

    blob: Tensor
    window: Window


def encode(
    matrix: Tensor, most: int | None = None, room: Tensor | None = None, *, spare: bool = False
) -> EncodedWindow | None:
    """A matrix as a window blob (docs/windows.md), on its device.

    Parameters
    ----------
    matrix : torch.Tensor
        bfloat16, of two dimensions, contiguous.
    most : int, optional
        How many bytes the blob may have.
    room : torch.Tensor, optional
        Bytes at whose start the blob is put; on another device, it is copied there. By default, it has memory
        of its own.
    spare : bool
        On a GPU, leave room for more entries, so that `encode_again` can put other words there. Such a blob
        is none that others read: its bodies do not follow its entries.

    Returns
    -------
    EncodedWindow or None
        None if it would be larger than `most` or `room`, or the matrix has no window layout.

    Notes
    -----
    On a GPU two launches read the matrix once each, and the host waits for 2 KiB between them. Beside matrix
    and blob they take some bytes for each row and chunk.
    """
    if room is not None:
        most = room.numel() if most is None else min(most, room.numel())
    here = room if room is None or room.device == matrix.device else None
    try:
        windows.sections(*matrix.shape)
        made = _on_gpu(matrix, most, here, spare) if matrix.is_cuda else _on_host(matrix, most, here)
    except InvalidInput:  # empty, or escapes so many that 32 bits do not count them
        return None
    if made is None or room is here or room is None:
        return made
    return made._replace(blob=room[: made.window.nbytes].copy_(made.blob))


def _blob(size: int, device: torch.device, room: Tensor | None) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device) if room is None else room[:size]


def _on_host(matrix: Tensor, most: int | None, room: Tensor | None) -> EncodedWindow | None:
    threads = default_threads()
    plan = window_plan.WindowPlan(matrix.view(torch.int16).numpy(), threads)
    if most is not None and plan.nbytes > most:
        return None
    blob = _blob(plan.nbytes, matrix.device, room)
    plan.encode(blob.numpy(), threads)
    return EncodedWindow(blob, windows.header(blob.numpy()))


def with_spare(window: Window) -> Window:
    """The same with room for a quarter more entries, and some: fine-tunes have about as many."""
    spare = align(2 * (window.entries // 4 + _SPARE), _ALIGN)
    return window._replace(bodies_at=window.bodies_at + spare, nbytes=window.nbytes + spare)


def without_spare(blob: Tensor, window: Window) -> Tensor:
    """The bytes of a blob as others read it."""
    usual = windows.sections(window.rows, window.columns, window.entries)
    if usual.bodies_at == window.bodies_at:
        return blob
    return torch.cat([blob[: usual.bodies_at], blob[window.bodies_at : window.nbytes]])


def encode_again(matrix: Tensor, window: Window, blob: Tensor) -> Window | None:
    """Put another matrix of the same shape where a blob is, on a GPU: all that kernels were told stays.

    Parameters
    ----------
    matrix : torch.Tensor
        As `encode` takes it.
    window : Window
        What the blob holds, which `encode` made with room to spare.
    blob : torch.Tensor
        Its bytes.

    Returns
    -------
    Window or None
        What it holds then; None if there is no room for the escapes, and nothing was changed.

    Notes
    -----
    Flag and table are the blob's, so that there may be more entries than a blob of its own would have.
    """
    found = encode_all_again([matrix], [window], [blob.data_ptr()])
    return None if found is None else found[0]


def encode_all_again(
    matrices: Sequence[Tensor], held: Sequence[Window], blobs: Sequence[int]
) -> list[Window] | None:
    """Put others of one shape where blobs are, all of them or none: as `encode_again`, of their addresses."""
    with EncodeLaunches(matrices) as launches:
        both = zip(held, launches.counts(), strict=True)
        chosen = [it for it in (_again(*one) for one in both) if it is not None]
        if len(chosen) < len(held):
            return None
        launches.encode(chosen, blobs)
    return [it.window for it in chosen]


def _again(window: Window, counts: Bytes) -> ChosenWindow | None:
    """What a blob holds with other words, going by their escapes; None if it has no room for these."""
    said = window_plan.said_by(window.table)
    each = counts.view(np.uint64).reshape(2, 128)[window.flags & FLAG_ZERO]
    entries = sum(int(it) * int(bits).bit_count() for it, bits in zip(each, said, strict=True))
    if 2 * entries > window.bodies_at - window.entries_at:
        return None
    return ChosenWindow(window._replace(entries=entries), said.view(np.uint8))


def _on_gpu(matrix: Tensor, most: int | None, room: Tensor | None, spare: bool) -> EncodedWindow | None:
    with EncodeLaunches([matrix]) as launches:
        chosen = launches.encoders[0].choose(launches.counts())
        if spare:
            chosen = chosen._replace(window=with_spare(chosen.window))
        if most is not None and chosen.window.nbytes > most:
            return None
        blob = _blob(chosen.window.nbytes, matrix.device, room)
        launches.encode([chosen], [blob.data_ptr()])
    return EncodedWindow(blob, chosen.window)
