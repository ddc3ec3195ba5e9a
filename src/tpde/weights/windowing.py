"""Plain matrices into the window layout, on CPU or GPU."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tpde.codec import window_plan, windows
from tpde.codec.windows import Window
from tpde.errors import InvalidInput
from tpde.files.thread_count import default_threads
from tpde.weights.launch import on_device, stream_handle, upload


class EncodedWindow(NamedTuple):
    """A window blob, one-dimensional and uint8, and what it holds."""

    blob: Tensor
    window: Window


def encode(matrix: Tensor, most: int | None = None, room: Tensor | None = None) -> EncodedWindow | None:
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
        made = _on_gpu(matrix, most, here) if matrix.is_cuda else _on_host(matrix, most, here)
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


def _on_gpu(matrix: Tensor, most: int | None, room: Tensor | None) -> EncodedWindow | None:
    from tpde.cuda.window_encode import COUNTS_BYTES, SAID_AT, Matrix, WindowEncoder

    assert matrix.device.index is not None
    device = matrix.device
    rows, columns = matrix.shape
    encoder = WindowEncoder(Matrix(matrix.data_ptr(), rows, columns, matrix.stride(0)), device.index)
    with on_device(device):
        stream = stream_handle(device)
        scratch = torch.zeros(encoder.scratch_bytes, dtype=torch.uint8, device=device)
        encoder.plan(scratch.data_ptr(), stream)
        chosen = encoder.choose(scratch[:COUNTS_BYTES].cpu().numpy())
        if most is not None and chosen.window.nbytes > most:
            return None
        said = upload(chosen.said, device)
        scratch[SAID_AT : SAID_AT + said.numel()].copy_(said)
        blob = _blob(chosen.window.nbytes, device, room)
        encoder.encode(chosen, scratch.data_ptr(), blob.data_ptr(), stream)
        # A product may start while what comes before it in the stream ends, and reads the matrix at once.
        torch.cuda.current_stream(device).synchronize()
    return EncodedWindow(blob, chosen.window)
