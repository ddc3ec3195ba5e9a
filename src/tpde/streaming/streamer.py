"""The streamer: what a model asks for the weights that travel, and who is told what was wrong with them.

It makes units of tensors, or of some chunks of one, and fills buffers with them through a ring, one thread at
a time. It owns what that takes: feeds, files and the device's memory, until it is closed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Protocol

from torch import Tensor

from tpde.errors import PackedWeight, ReadError, UnsupportedDevice
from tpde.streaming.cuda_device import Device
from tpde.streaming.damage import Checks, DecodedPieces
from tpde.streaming.pieces import Piece, TensorPart, cut
from tpde.streaming.retained import Retained
from tpde.streaming.ring import Ring
from tpde.streaming.streamed_source import Streamed, travelling
from tpde.streaming.trace import Trace
from tpde.weights.decoder import Materializer
from tpde.weights.source import Source, Watched


class Closing(Protocol):
    """What a streamer takes over: a feed, a file."""

    def close(self) -> None:
        """Give it back."""


class StreamedUnit(DecodedPieces):
    """Tensors, or some chunks of one, that are wanted together: calling it decodes them into a buffer.

    Parameters
    ----------
    streamer : Streamer
        What brings them.
    pieces : sequence of Piece
        Their bytes.
    rest : callable, optional
        What decodes those that have no chunks.
    """

    def __init__(
        self, streamer: Streamer, pieces: Sequence[Piece], rest: Callable[[Tensor], None] | None = None
    ) -> None:
        super().__init__(streamer.device, pieces)
        self.rest, self._streamer = rest, streamer

    def __call__(self, out: Tensor) -> None:
        """Decode into a buffer of bytes, on the current stream.

        Raises
        ------
        Corrupt
            Naming tensor and chunk. At a unit's first use damage is reported at once, later when the unit is
            used next, or by `Streamer.check`, since waiting would cost time.
        UnsupportedDevice
            While a CUDA graph is recorded.
        ReadError
            If the streamer was closed.
        """
        self._streamer.fill(self, out)


class Streamer:
    """Brings packed tensors to a device.

    Parameters
    ----------
    device : Device
        Where to.
    places : int
        Of the ring.
    room : int
        Bytes of a place; pieces are at most as large.
    retained : Retained, optional
        Room behind the ring, for pieces that stay.

    Attributes
    ----------
    ring : Ring
        Through which pieces travel.
    owned : list
        What is closed with it, in this order.
    """

    def __init__(
        self, device: Device, places: int, room: int, retained: Retained[DecodedPieces] | None = None
    ) -> None:
        self.ring = Ring(device, places, room, retained)
        self._lock = threading.RLock()
        self._checks = Checks(device)
        self._used = self._closed = False
        self._chunks: dict[tuple[int, int, int, int], StreamedUnit] = {}
        self.owned: list[Closing] = []

    @property
    def device(self) -> Device:
        """Where packed tensors are brought."""
        return self.ring.device

    @property
    def dropped_pieces(self) -> int:
        """How many were copied in vain so far."""
        return self.ring.dropped_pieces

    def own(self, *things: Closing) -> None:
        """Take feeds and files over, to close them when the streamer is closed.

        In this order, and before those that it has.
        """
        self.owned[:0] = things

    def stats(self) -> dict[str, int]:
        """What was copied so far."""
        return self.ring.stats()

    def record(self, trace: Trace | None) -> None:
        """Note what happens from now on; another thread may be in a forward pass.

        Parameters
        ----------
        trace : Trace or None
            Where to; None to note nothing.
        """
        with self._lock:  # what is being copied is noted as a whole, or not at all
            self.device.trace = trace

    def check(self) -> None:
        """Wait for the device, and make sure that all bytes that were decoded so far were sound.

        Raises
        ------
        Corrupt
            Naming tensor and chunk.
        """
        with self._lock:
            self._checks.settle()

    # ---- what is wanted ----

    def unit(self, items: Sequence[tuple[Source, int]]) -> StreamedUnit:
        """What decodes tensors, each at its byte offset, into a buffer."""
        rest = [(packed, out) for packed, out in items if not travelling(packed)]
        parts = [TensorPart(it, out, 0, it.header.chunks - 1) for it, out in items if travelling(it)]
        if parts and not self.ring.places:
            raise PackedWeight(
                f"`{parts[0].tensor.name}` stays on the host, and only rows of it are read under the VRAM "
                "budget",
                hint="load the model without `vram=` to read all of it",
                where=parts[0].tensor.name,
            )
        made = StreamedUnit(
            self, cut(parts, self.ring.room), Materializer(rest, rest[0][0].device) if rest else None
        )
        if not self._used and made.pieces:
            self.ring.expect(made)
        return made

    def chunks(self, packed: Streamed, first: int, last: int, offset: int) -> StreamedUnit:
        """What decodes chunks `first` to `last` of a tensor into a buffer, from byte `offset` on."""
        key = (id(packed), first, last, offset)
        if key not in self._chunks:
            begin = packed.header.chunk_range(first, last)[0] * packed.header.word_bytes
            pieces = cut([TensorPart(packed, offset - begin, first, last)], self.ring.room)
            made = self._chunks[key] = StreamedUnit(self, pieces)
            if not self._used:
                self.ring.expect(made)
        return self._chunks[key]

    def require_open(self) -> None:
        """Refuse to use memory that was given back.

        Raises
        ------
        ReadError
            After `close`.
        """
        if self._closed:
            raise ReadError(
                "the streamed model was closed, and cannot be used any more", hint="load it again"
            )

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Let bytes be read where they lie: `close` waits meanwhile, and then for what was queued.

        Raises
        ------
        ReadError
            After `close`.
        """
        with self._lock:
            self.require_open()
            yield

    def watch(self, reader: Watched) -> None:
        """Let `check` ask a reader, too: it reads bytes where they lie, without their being brought.

        Raises
        ------
        Corrupt
            What it has read before was damaged.
        """
        with self._lock:
            self._checks.begin([reader])

    # ---- filling a buffer ----

    def fill(self, unit: StreamedUnit, out: Tensor) -> None:
        """Decode a unit into a buffer, on the current stream: see `StreamedUnit`."""
        with self._lock:
            if self.device.recording():
                raise UnsupportedDevice(
                    "streamed weights were wanted while a CUDA graph was recorded, which cannot hold what "
                    "comes from files",
                    hint="run without CUDA graphs, or load the model with more `vram`",
                )
            self.require_open()
            self._used = True
            try:
                self._checks.begin([unit])
                if unit.rest is not None:
                    unit.rest(out)
                self.ring.decode(unit, out)
                self._checks.end([unit])
            except BaseException:
                self.ring.forget()
                raise

    def close(self) -> None:
        """Wait for copies, and give ring, host memory and files back. The model cannot be used any more."""
        with self._lock:
            self._closed = True
            try:
                self.ring.forget()
            finally:  # a device that has crashed cannot be waited for, and copies nothing
                with ExitStack() as rest:  # all of them, whichever fails
                    rest.callback(self.device.close)
                    while self.owned:
                        rest.callback(self.owned.pop().close)  # first added, last closed
