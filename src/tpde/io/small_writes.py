"""Small pieces that follow each other, written in one call: a file may have hundreds of thousands."""

from __future__ import annotations

from tpde.io.sinks import ByteSink

_MOST = 64 << 10  # bytes that are held: a call of the system takes as long as copying some kilobytes


class Gathered:
    """Writes to a sink, where small pieces may arrive later than they are given, and together.

    Parameters
    ----------
    sink : ByteSink
        Where everything goes.
    """

    def __init__(self, sink: ByteSink) -> None:
        self._sink, self._begin, self._held = sink, 0, bytearray()

    def write(self, offset: int, piece: memoryview) -> None:
        """Write bytes at `offset`; they are copied if they are held."""
        if offset != self._begin + len(self._held) or len(self._held) + piece.nbytes > _MOST:
            self.flush()
            self._begin = offset
        if piece.nbytes > _MOST:
            self._sink.write(offset, [piece])
        else:
            self._held += piece

    def flush(self) -> None:
        """Write what is held."""
        held, self._held = self._held, bytearray()
        if held:
            self._sink.write(self._begin, [held])
