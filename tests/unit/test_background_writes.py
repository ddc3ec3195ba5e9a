"""A tensor's pieces are written beside the encoding of others: none is lost, none changed meanwhile."""

from __future__ import annotations

import errno
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from support.contents import fill_large, spec_of

from tpde.codec.blob import BlobWriter, digest
from tpde.codec.selection import plan_tensor, sample_ranges
from tpde.io.sinks import BytesSink

SPEC = spec_of("BF16", 20 << 20)  # of five pieces of one thread
DATA = np.frombuffer(fill_large("normal", SPEC), np.uint8)


class _Sink(BytesSink):
    """A sink that is no memory, as a file is."""

    def room(self, offset: int, size: int) -> Any:
        return None

    def write(self, offset: int, buffers: Sequence[Any]) -> None:
        for buffer in buffers:
            place = BytesSink.room(self, offset, len(bytes(buffer)))
            place[:] = np.frombuffer(buffer, np.uint8)
            self._size = max(self._size, offset + place.size)
            offset += place.size


def _write(sink: BytesSink, pool: type[ThreadPoolExecutor] = ThreadPoolExecutor) -> bytes:
    sample = np.concatenate([DATA[a:b] for a, b in sample_ranges(SPEC)])
    plan = plan_tensor(SPEC, sample)
    assert plan is not None
    with pool(1, "pieces") as background:
        writer = BlobWriter(plan, sink, 0, 1, background)
        writer.write(DATA)
        writer.finish(digest(DATA))
    return bytes(sink.data)


class _Late(ThreadPoolExecutor):
    """Does what it was given when there is more: a piece is written when the next one is encoded."""

    given = 0
    condition = threading.Condition()

    def submit(self, call: Any, /, *args: Any, **more: Any) -> Any:
        with self.condition:
            self.given += 1
            self.condition.notify_all()
        return super().submit(self._after, min(self.given + 1, 5), call, *args, **more)

    def _after(self, number: int, call: Any, *args: Any, **more: Any) -> Any:
        with self.condition:
            assert self.condition.wait_for(lambda: self.given >= number, timeout=20)
        return call(*args, **more)


def test_a_buffer_is_not_encoded_into_while_it_is_written() -> None:
    assert _write(_Sink(), _Late) == _write(BytesSink())


@pytest.mark.parametrize("number", range(5))
def test_the_error_of_every_background_write_is_raised(number: int) -> None:
    class Full(_Sink):
        written = 0

        def write(self, offset: int, buffers: Sequence[Any]) -> None:
            # The header, at 0, is written by the thread that finishes, which may be ahead of the last piece.
            self.written += offset > 0
            if offset and self.written == number + 1:
                raise OSError(errno.ENOSPC, "No space left on device")
            super().write(offset, buffers)

    with pytest.raises(OSError, match="No space left"):
        _write(Full())
