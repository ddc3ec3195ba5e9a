"""bf16 matrices in the window layout (docs/windows.md), which are multiplied without being rebuilt."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tpde.codec import windows
from tpde.codec.native import Bytes
from tpde.cuda.product_ways import MOST_ROWS
from tpde.cuda.window_products import X_AT, DeviceWindow
from tpde.errors import Corrupt, Truncated, UnsupportedVersion
from tpde.files.thread_count import default_threads
from tpde.format.blob_header import BlobHeader
from tpde.format.constants import CODEC_PREFIX
from tpde.format.container import TensorSpec
from tpde.weights import operators as ops
from tpde.weights import windowing
from tpde.weights.frozen import as_weight
from tpde.weights.launch import on_device, stream_handle
from tpde.weights.source import RowsDecoder, Source, decoded
from tpde.weights.windows_source import WindowSource

MAGIC = bytes.fromhex("89 54 50 44 57 0D 0A 1A")  # windows.md 5.1
ROWS = windows.ROWS_AT  # of a stripe
_X_WORDS = X_AT // 2


def _can_be(source: Source) -> bool:
    """Whether a source's tensor can be in the window layout."""
    return source.dtype is torch.bfloat16 and len(source.shape) == 2 and 0 not in source.shape


class Windowed(WindowSource):
    """A bf16 matrix in the window layout, on the device on which it is multiplied.

    Parameters
    ----------
    blob : torch.Tensor
        See `WindowSource`.
    name : str
        What errors call it.
    window : Window, optional
        What the blob holds, if it is known to be right. By default, it is checked.
    prepared : bool
        Compile its kernels now, if it is on a GPU. Otherwise `prepare` does, or the first product.

    Raises
    ------
    InvalidInput
        If `blob` is not such a tensor.
    Truncated, UnsupportedVersion, Corrupt
        If it is no window blob. All but the words is checked here, on the host; words may be any.

    Attributes
    ----------
    strip_bytes : int
        Of the matrix, that are decoded at a time for many rows of inputs. Whoever loads a model sets it.
    budgeted : bool
        A budget of device memory has room for it as it is.
    """

    strip_bytes = 256 << 20
    budgeted = False

    def __init__(
        self, blob: Tensor, name: str, window: windows.Window | None = None, *, prepared: bool = True
    ) -> None:
        super().__init__(blob, name)
        self.key, self._prepared = 0, prepared
        try:
            self.window = (
                windows.validate(blob.cpu().numpy(), default_threads()) if window is None else window
            )
        except (Corrupt, Truncated, UnsupportedVersion) as error:
            raise error.of_tensor(name) from error
        self._rows, self._columns = rows, columns = self.window.rows, self.window.columns
        # A chunk of it is a stripe: spans of it are decoded stripe by stripe.
        spec = TensorSpec("BF16", (rows, columns))
        self.header = BlobHeader(spec, CODEC_PREFIX, rows * columns, ROWS * columns)
        self._place(blob)

    @classmethod
    def of(cls, source: Source, most: float) -> Windowed | None:
        """A source's tensor in the window layout, on its device.

        Parameters
        ----------
        source : Source
            One whose bytes are there.
        most : float
            What share of the plain tensor's bytes it may take.

        Returns
        -------
        Windowed or None
            None if it would take more, or is no bf16 matrix.
        """
        if not _can_be(source):
            return None
        return cls.of_plain(decoded(source), source.name, most)

    @classmethod
    def of_plain(
        cls,
        matrix: Tensor,
        name: str,
        most: float,
        room: Tensor | None = None,
        *,
        prepared: bool = True,
        spare: bool = False,
    ) -> Windowed | None:
        """A contiguous bf16 matrix in the window layout, on its device, or in `room`: as `of`.

        With `spare`, there is room for `renew`.
        """
        made = windowing.encode(matrix, int(most * matrix.nbytes), room, spare=spare)
        return None if made is None else cls(made.blob, name, made.window, prepared=prepared)

    def _tell(self, blob: Tensor) -> None:
        there = DeviceWindow(self.window, blob.data_ptr(), blob.device.index) if blob.is_cuda else None
        if there is not None and self._prepared:
            there.prepare()
        self._there = there
        self.key = ops.register(self)  # the one before stays valid: what moves has the same values

    def prepare(self) -> None:
        """Compile the kernels, for the errors that there may be, and for CUDA graphs; on the CPU nothing."""
        if self._there is not None:
            self._there.prepare()

    def _like(self, blob: Tensor) -> Windowed:
        return Windowed(blob, self.name, self.window, prepared=self._prepared)

    def _become(self, made: Windowed) -> None:
        self.window = made.window
        self.retire()
        self._place(made._blob)

    def retire(self) -> None:
        """Have what was begun with it refused: see `Source.retire`."""
        ops.refuse(self.key)

    def anew(self, plain: Tensor) -> Windowed:
        """Another matrix of the same shape in the window layout: see `WindowSource.anew`."""
        made = windowing.encode(plain)
        if made is None:
            raise self.cannot_hold()
        return Windowed(made.blob, self.name, made.window, prepared=self._prepared)

    def renew(self, plain: Tensor) -> bool:
        """Take another matrix: see `WindowSource.renew`. Without room for it, nothing changes."""
        assert self._there is not None
        made = windowing.encode_again(plain, self.window, self._blob)
        if made is None:
            return False
        self.window = made
        self.version += 1
        return True

    def pickled(self) -> Tensor:
        """The bytes in the window layout: see `Source.pickled`."""
        return windowing.without_spare(super().pickled(), self.window)

    # ---- decoding ----

    def _decode(self, out: Tensor, first: int, end: int) -> None:
        """Decode stripes to a buffer of bytes on the current stream."""
        if self._there is None:
            self.decode_on_host(*self._extent(first, end), out.numpy())
            return
        with on_device(self._device):
            stream = stream_handle(self._device)
            self._there.rows(out.data_ptr(), self._columns, stream, first, end)

    def decode_on_host(self, begin: int, end: int, out: Bytes) -> None:
        """Decode bytes `begin` to `end` with the CPU core: see `Source.decode_on_host`."""
        row, threads = 2 * self._columns, default_threads()
        blob = windowing.without_spare(self._blob, self.window).cpu().numpy()
        first, last = begin // row, -(-end // row)
        whole = end - begin == (last - first) * row and out.ctypes.data % 2 == 0
        if whole and out.flags.c_contiguous:  # no room for a second one is taken
            rows = out.view(np.uint16).reshape(-1, self._columns)
            windows.decode(blob, first, last, out=rows, threads=threads)
            return
        found = windows.decode(blob, first, last, threads=threads)
        out[:] = found.reshape(-1).view("u1")[begin - first * row : end - first * row]

    def row_reader(self) -> RowsDecoder:
        """What rebuilds the rows that are asked for."""
        if self._there is None:
            return super().row_reader()
        return self._look_up

    def _look_up(self, ids: Tensor) -> Tensor:
        assert self._there is not None
        if ids.device != self.device or ids.dtype not in (torch.int64, torch.int32):
            raise RuntimeError(
                f"rows of `{self.name}` on {self.device} are asked for by {ids.dtype} on {ids.device}; "
                "integers of 32 or 64 bits on the same device are needed"
            )
        out = torch.empty((*ids.shape, self._columns), dtype=self.dtype, device=self.device)
        flat = ids.detach().reshape(-1).to(torch.int64).contiguous()
        if flat.numel():
            with on_device(self.device):
                stream = stream_handle(self.device)
                self._there.lookup(flat.data_ptr(), flat.numel(), out.data_ptr(), stream)
        return out

    # ---- multiplying ----

    def release(self) -> int:
        """Nothing is given up for it: see `operators.KeyedWeights`."""
        return 0

    def decode_into(self, out: Tensor) -> None:
        """Decode all of it to the start of a buffer of bytes, on the current stream."""
        self._decode(out[: self.nbytes], 0, self.window.stripes)

    def instead(self) -> Tensor:
        """The matrix, decoded: a tensor that also autograd may keep."""
        with torch.inference_mode(False), torch.no_grad():
            return self._made()

    def _made(self) -> Tensor:
        # A step with many rows comes here for each layer, and each microsecond of Python delays its launch.
        made = torch.empty((self._rows, self._columns), dtype=self.kind, device=self._device)
        if self._there is None:
            self.decode_into(made.view(-1).view(torch.uint8))
        else:
            with on_device(self._device):
                self._there.rows(made.data_ptr(), self._columns, stream_handle(self._device))
        return made

    @property
    def most_rows(self) -> int:
        """With how many rows of x, at most, a row has the same bits in any product; 0 on the CPU."""
        return 0 if self._there is None else MOST_ROWS

    def product(self, x: Tensor, bias: Tensor | None, trained: bool) -> Tensor:
        """`x W^T + bias` (docs/windows.md 9), on the current stream.

        Parameters
        ----------
        x : torch.Tensor
            Its last dimension has as many elements as the matrix has columns.
        bias : torch.Tensor, optional
            One element for each row of the matrix.
        trained : bool
            What the plain weight says of gradients: PyTorch chooses kernels by it.

        Returns
        -------
        torch.Tensor
            Of shape `(*x.shape[:-1], rows)`.

        Notes
        -----
        On a GPU, up to `most_rows` rows of x are multiplied straight from the blob; each gives the same bits
        in any batch. So are more where that is faster, with sums in another order. Otherwise, and on the CPU,
        the matrix is decoded and multiplied as a plain one.
        """
        if self._there is not None and x.dim() and x.shape[-1] == self._columns:
            count = x.numel() // self._columns
            kinds = x.dtype is self.kind and (bias is None or bias.dtype is self.kind)
            if kinds and count and self._there.takes(count):
                return self._product(self._there, x, bias, count)
            if self.nbytes > self.strip_bytes:
                return self._in_strips(x, bias)
        if trained:
            made = self.instead()
            return functional.linear(
                x, as_weight(made.view(-1).view(torch.uint8), self.kind, made.shape, True), bias
            )
        return functional.linear(x, self._made(), bias)

    def _product(self, there: DeviceWindow, x: Tensor, bias: Tensor | None, count: int) -> Tensor:
        # A forward pass comes here for each layer of each token: 1 us a call of Python where it is cold.
        rows, step, at = self._rows, self._columns, x.data_ptr()
        if step % _X_WORDS or at % X_AT or not x.is_contiguous():
            step += -step % _X_WORDS
            padded = x.new_zeros((*x.shape[:-1], step))
            padded[..., : self._columns] = x.detach()
            x, at = padded, padded.data_ptr()
        out = x.new_empty((*x.shape[:-1], rows))
        bias = None if bias is None else bias.contiguous()  # held until the kernel is queued, if it is a copy
        to, added = out.data_ptr(), 0 if bias is None else bias.data_ptr()
        with on_device(self._device):
            needed = there.room(count)
            room = x.new_empty(needed, dtype=torch.uint8) if needed else None
            room_at = 0 if room is None else room.data_ptr()
            there.product(at, step, count, to, rows, added, stream_handle(self._device), room_at)
        return out

    def _in_strips(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Some rows of the matrix at a time."""
        out = x.new_empty((*x.shape[:-1], self._rows))
        step = max(self.strip_bytes // (2 * ROWS * self._columns), 1)
        room = torch.empty(2 * ROWS * step * self._columns, dtype=torch.uint8, device=self.device)
        for first in range(0, self.window.stripes, step):
            end = min(first + step, self.window.stripes)
            low, high = self._extent(first, end)
            self._decode(room[: high - low], first, end)
            part = room[: high - low].view(self.dtype).view(-1, self._columns)
            begin, stop = ROWS * first, ROWS * first + len(part)
            out[..., begin:stop] = functional.linear(x, part, None if bias is None else bias[begin:stop])
        return out
