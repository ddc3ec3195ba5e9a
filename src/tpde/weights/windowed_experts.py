"""Weights of experts in the window layout: bf16 tensors of three dimensions, made of matrices."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tpde.codec import window_stacks, windows
from tpde.codec.native import Bytes
from tpde.codec.window_stacks import Stack
from tpde.cuda.window_experts import DeviceExperts
from tpde.errors import Corrupt, Truncated, UnsupportedVersion
from tpde.files.thread_count import default_threads
from tpde.format.blob_header import BlobHeader
from tpde.format.constants import CODEC_PREFIX
from tpde.format.container import TensorSpec
from tpde.weights import window_stacking, windowing
from tpde.weights.launch import on_device, stream_handle, upload
from tpde.weights.source import Source, decoded
from tpde.weights.windows_source import WindowSource


class WindowedExperts(WindowSource):
    """A bf16 tensor of experts, each of which is a matrix in the window layout, in one memory.

    Parameters
    ----------
    blob : torch.Tensor
        A stack (`tpde.codec.window_stacks`): see `WindowSource`.
    name : str
        What errors call it.
    stack : Stack, optional
        What it holds, if it is known to be right. By default, it is checked.
    prepared : bool
        Compile kernels now, if it is on a GPU. Otherwise `Experts.prepare` does, or the first product.

    Raises
    ------
    InvalidInput
        If `blob` is not such a tensor.
    Truncated, UnsupportedVersion, Corrupt
        If it is no stack of window blobs. All but the words is checked here, on the host; words may be any.
    """

    def __init__(self, blob: Tensor, name: str, stack: Stack | None = None, *, prepared: bool = True) -> None:
        super().__init__(blob, name)
        self._prepared = prepared
        try:
            self.stack = (
                window_stacks.validate(blob.cpu().numpy(), default_threads()) if stack is None else stack
            )
        except (Corrupt, Truncated, UnsupportedVersion) as error:
            raise error.of_tensor(name) from error
        shape = self.stack.shape
        self._words = shape[1] * shape[2]
        # A chunk of it is an expert: whatever spans hold of one, all of it is decoded.
        self.header = BlobHeader(TensorSpec("BF16", shape), CODEC_PREFIX, self._words, self._words)
        self._place(blob)

    @classmethod
    def of(cls, source: Source, most: float, turned: bool) -> WindowedExperts | None:
        """A source's tensor in the window layout, on its device.

        Parameters
        ----------
        source : Source
            One whose bytes are there.
        most : float
            What share of the plain tensor's bytes it may take.
        turned : bool
            Whether it is multiplied from the left, `x @ weight[i]`: rows and columns are then exchanged.

        Returns
        -------
        WindowedExperts or None
            None if it would take more, or is no bf16 tensor of three dimensions.
        """
        if source.dtype is not torch.bfloat16 or len(source.shape) != 3 or 0 in source.shape:
            return None
        return cls.of_plain(decoded(source), source.name, most, turned)

    @classmethod
    def of_plain(
        cls,
        weight: Tensor,
        name: str,
        most: float,
        turned: bool,
        *,
        prepared: bool = True,
        spare: bool = False,
    ) -> WindowedExperts | None:
        """A contiguous bf16 tensor in the window layout, on its device: as `of`.

        With `spare`, there is room for `renew`.
        """
        taken = weight.transpose(1, 2).contiguous() if turned else weight
        made = window_stacking.encode_together(taken.detach().unbind(), turned=turned, spare=spare)
        if made is None or made.blob.numel() > most * weight.nbytes:
            return None
        return cls(made.blob, name, made.stack, prepared=prepared)

    def _tell(self, blob: Tensor) -> None:
        there: DeviceExperts | None = None
        table: Tensor | None = None
        if blob.is_cuda:
            stack, at = self.stack, blob.data_ptr()
            matrices = [(it, at + start) for it, start in zip(stack.windows, stack.starts, strict=True)]
            there = DeviceExperts(matrices, len(matrices), stack.turned, blob.device.index)
            table = upload(there.table.view(np.uint8).reshape(-1), blob.device)
            there.table_at = table.data_ptr()
            if self._prepared:
                there.prepare()
        self._there, self._table = there, table

    @property
    def there(self) -> DeviceExperts | None:
        """What launches kernels, on a GPU."""
        return self._there

    def _like(self, blob: Tensor) -> WindowedExperts:
        return WindowedExperts(blob, self.name, self.stack, prepared=self._prepared)

    def _become(self, made: WindowedExperts) -> None:
        self.stack = made.stack
        self._place(made._blob)

    def anew(self, plain: Tensor) -> WindowedExperts:
        """Another tensor of the same shape in the window layout: see `WindowSource.anew`."""
        made = self.of_plain(plain, self.name, float("inf"), self.stack.turned)
        if made is None:
            raise self.cannot_hold()
        return made

    def renew(self, plain: Tensor) -> bool:
        """Take others: see `WindowSource.renew`. Without room for one of them, nothing changes."""
        assert not self.stack.turned
        made = window_stacking.encode_again(plain.unbind(), self.stack, self._blob)
        if made is None:
            return False
        self.stack = made
        self.version += 1
        return True

    def pickled(self) -> Tensor:
        """The bytes in the window layout: see `Source.pickled`."""
        return window_stacking.without_spare(super().pickled(), self.stack)

    # ---- decoding ----

    def _decode(self, out: Tensor, first: int, end: int) -> None:
        """Decode experts to a buffer of bytes on the current stream."""
        if self._there is None:
            self.decode_on_host(*self._extent(first, end), out.numpy())
            return
        with on_device(self._device):
            start = out.data_ptr() - 2 * self._words * first  # where expert 0 would be
            self._there.decode(start, stream_handle(self._device), first=first, count=end - first)

    def decode_on_host(self, begin: int, end: int, out: Bytes) -> None:
        """Decode bytes `begin` to `end` with the CPU core: see `Source.decode_on_host`."""
        data, step = self._blob.cpu().numpy(), 2 * self._words
        for number in range(begin // step, -(-end // step)):
            low, high = max(begin, number * step), min(end, (number + 1) * step)
            expert = self._expert_on_host(data, number, low - number * step, high - number * step)
            out[low - begin : high - begin] = expert

    def _expert_on_host(self, data: Bytes, number: int, low: int, high: int) -> Bytes:
        """Bytes `low` to `high` of an expert: of one that is turned, all of it is decoded."""
        threads, window = default_threads(), self.stack.windows[number]
        blob = windowing.without_spare(torch.from_numpy(self.stack.blob(data, number)), window).numpy()
        if self.stack.turned:
            whole = windows.decode(blob, threads=threads)
            return np.ascontiguousarray(whole.T).reshape(-1).view(np.uint8)[low:high]
        row = 2 * self.stack.windows[number].columns
        first, last = low // row, -(-high // row)
        found = windows.decode(blob, first, last, threads=threads).reshape(-1).view(np.uint8)
        return found[low - first * row : high - first * row]
