"""Launches that put matrices of one shape into windows on their GPU, all of them before one wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tpde.codec.native import Bytes
from tpde.cuda.window_encode import COUNTS_BYTES, SAID_AT, SCRATCH_AT, ChosenWindow, Matrix, WindowEncoder
from tpde.format.blob_header import align
from tpde.weights.launch import on_device, stream_handle, upload

if TYPE_CHECKING:
    from typing_extensions import Self


class EncodeLaunches:
    """What encodes matrices on their GPU, on the current stream; at the end, the host waits for all of it.

    Parameters
    ----------
    matrices : sequence of torch.Tensor
        Each as `tpde.weights.windowing.encode` takes it. Beside them there are some bytes for each row and
        chunk.

    Attributes
    ----------
    encoders : list of WindowEncoder
        One for each.
    """

    def __init__(self, matrices: Sequence[Tensor]) -> None:
        self._matrices, self._device = matrices, matrices[0].device
        assert self._device.index is not None
        self.encoders = [
            WindowEncoder(Matrix(it.data_ptr(), it.shape[0], it.shape[1], it.stride(0)), self._device.index)
            for it in matrices
        ]
        self._on = on_device(self._device)

    def __enter__(self) -> Self:
        self._on.__enter__()
        self._stream = stream_handle(self._device)
        count, each = len(self.encoders), align(self.encoders[0].scratch_bytes, SCRATCH_AT)
        self._scratch = torch.zeros((count, each), dtype=torch.uint8, device=self._device)
        first = self._scratch.data_ptr()
        self._places = [first + each * number for number in range(count)]
        return self

    def __exit__(self, *error: object) -> None:
        # A product may start while what comes before it in the stream ends, and reads the matrix at once.
        torch.cuda.current_stream(self._device).synchronize()
        self._on.__exit__(None, None, None)

    def counts(self) -> Bytes:
        """How many escapes of each matrix have each XOR: a row of `COUNTS_BYTES` for each."""
        for encoder, place in zip(self.encoders, self._places, strict=True):
            encoder.plan(place, self._stream)
        return self._scratch[:, :COUNTS_BYTES].cpu().numpy()

    def encode(self, chosen: Sequence[ChosenWindow], blobs: Sequence[int]) -> None:
        """Write the blobs, each to its address."""
        said = upload(np.concatenate([it.said for it in chosen]), self._device).view(len(chosen), -1)
        self._scratch[:, SAID_AT : SAID_AT + said.shape[1]].copy_(said)
        for encoder, it, place, at in zip(self.encoders, chosen, self._places, blobs, strict=True):
            encoder.encode(it, place, at, self._stream)
