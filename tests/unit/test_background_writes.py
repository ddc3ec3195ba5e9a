"""A tensor's pieces are written beside the encoding of others: none is lost, none changed meanwhile."""

from __future__ import annotations

import errno
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from support.contents import fill, spec_of

from tpde.codec import blob, prefix_codes
from tpde.codec.blob import BlobWriter, digest
from tpde.codec.selection import plan_tensor, sample_ranges
from tpde.io.sinks import BytesSink

SPEC = spec_of("BF16", 40 * 8192)
DATA = np.frombuffer(fill("normal", SPEC), np.uint8)
STEP = 8 * 8192 * 2  # bytes of a piece here: five of them


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


def _write(sink: BytesSink, monkeypatch: pytest.MonkeyPatch) -> bytes:
    monkeypatch.setattr(blob, "PIECE_BYTES", STEP)
    monkeypatch.setattr(blob, "MAX_PIECES", 1)
    sample = np.concatenate([DATA[a:b] for a, b in sample_ranges(SPEC)])
    plan = plan_tensor(SPEC, sample)
    assert plan is not None
    with ThreadPoolExecutor(1, "pieces") as background:
        writer = BlobWriter(plan, sink, 0, 2, background)
        writer.write(DATA)
        writer.finish(digest(DATA))
    return bytes(sink.data)


def test_a_buffer_is_not_encoded_into_while_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = _write(BytesSink(), monkeypatch)
    condition, encoded, real = threading.Condition(), [0], prefix_codes.PrefixCodec.encode

    def encode(self: prefix_codes.PrefixCodec, *given: Any) -> Any:
        made = real(self, *given)
        with condition:
            encoded[0] += 1
            condition.notify_all()
        return made

    class Late(_Sink):
        """Writes a piece when the next one has been encoded."""

        written = 0

        def write(self, offset: int, buffers: Sequence[Any]) -> None:
            self.written += 1
            with condition:
                assert condition.wait_for(lambda: encoded[0] >= min(self.written + 1, 5), timeout=20)
            super().write(offset, buffers)

    monkeypatch.setattr(prefix_codes.PrefixCodec, "encode", encode)
    assert _write(Late(), monkeypatch) == needed
    assert encoded == [5]


@pytest.mark.parametrize("number", range(5))
def test_the_error_of_every_background_write_is_raised(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(_Sink):
        written = 0

        def write(self, offset: int, buffers: Sequence[Any]) -> None:
            # The header, at 0, is written by the thread that finishes, which may be ahead of the last piece.
            self.written += offset > 0
            if offset and self.written == number + 1:
                raise OSError(errno.ENOSPC, "No space left on device")
            super().write(offset, buffers)

    with pytest.raises(OSError, match="No space left"):
        _write(Full(), monkeypatch)
