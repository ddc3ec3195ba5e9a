"""Plain matrices into the window layout, on CPU or GPU."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tpde.codec import window_plan, windows
from tpde.codec.windows import Window
from tpde.errors import InvalidInput
from tpde.files.writer import default_threads
from tpde.weights.launch import on_device, stream_handle, upload


class EncodedWindow(NamedTuple):
    """A window blob, one-dimensional and uint8, and what it holds."""

    blob: Tensor
    window: Window


def encode(matrix: Tensor, most: int | None = None) -> EncodedWindow | None:
    """A matrix as a window blob (docs/windows.md), on its device.

    Parameters
    ----------
    matrix : torch.Tensor
        bfloat16, of two dimensions, contiguous.
    most : int, optional
        How many bytes the blob may have.

    Returns
    -------
    EncodedWindow or None
        None if it would be larger, or the matrix has no window layout.

    Notes
    -----
    On a GPU two launches read the matrix once each, and the host waits for 2 KiB between them. Beside matrix
    and blob they take some bytes for each row and chunk.
    """
    try:
        windows.sections(*matrix.shape)
        return _on_gpu(matrix, most) if matrix.is_cuda else _on_host(matrix, most)
    except InvalidInput:  # empty, or escapes so many that 32 bits do not count them
        return None


def _on_host(matrix: Tensor, most: int | None) -> EncodedWindow | None:
    threads = default_threads()
    plan = window_plan.WindowPlan(matrix.view(torch.int16).numpy(), threads)
    if most is not None and plan.nbytes > most:
        return None
    blob = torch.empty(plan.nbytes, dtype=torch.uint8)
    plan.encode(blob.numpy(), threads)
    return EncodedWindow(blob, windows.header(blob.numpy()))


def _on_gpu(matrix: Tensor, most: int | None) -> EncodedWindow | None:
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
        blob = torch.empty(chosen.window.nbytes, dtype=torch.uint8, device=device)
        encoder.encode(chosen, scratch.data_ptr(), blob.data_ptr(), stream)
        # A product may start while what comes before it in the stream ends, and reads the matrix at once.
        torch.cuda.current_stream(device).synchronize()
    return EncodedWindow(blob, chosen.window)
