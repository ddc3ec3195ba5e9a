"""Damage of what is streamed is named at the first use, later, and when it is asked for."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from support.ring import CPU, SIZES, Fixture, Rows, filled, replace_shape, sized  # noqa: E402

from tpde.errors import Corrupt  # noqa: E402
from tpde.io.sources import Extent, FileSource  # noqa: E402
from tpde.streaming.pieces import Piece  # noqa: E402
from tpde.streaming.streamed_source import Streamed  # noqa: E402
from tpde.streaming.streamer import StreamedUnit  # noqa: E402

pytestmark = pytest.mark.usefixtures("bounded")


def test_damage_is_named_at_first_use_and_later(tmp_path: Path) -> None:
    with Fixture(tmp_path, SIZES) as made:
        (one, expected), (other, _) = made.units((0,), (2,))
        whole = made.feed.whole(made.tensors[2].extent)
        at = made.tensors[2].extent.offset + int(made.tensors[2].offsets[5]) + 40
        whole[at] ^= 1
        assert filled(one, len(expected)) == expected
        with pytest.raises(Corrupt, match=r"`t2`, chunk 5: .*model\.bin` is damaged; fetch") as caught:
            filled(other, 600_000)
        assert (caught.value.tensor, caught.value.chunk) == ("t2", 5)
        whole[at] ^= 1
        assert filled(other, 600_000)[:600_000] == made.data[2]
        made.device.wait()  # copies ahead of the next use
        whole[at] ^= 1
        for _ in range(2):  # what is in the ring by now is sound, and damage is told at the next use
            filled(other, 600_000)
        with pytest.raises(Corrupt, match="was damaged since it was first read"):
            filled(other, 600_000)


def test_first_use_waits_for_no_copies_ahead(tmp_path: Path) -> None:
    """Only for its own decoding: the copies of what comes next go on meanwhile."""
    with Fixture(tmp_path, SIZES) as made:
        (one, expected), (other, _) = made.units((0,), (2,))
        gate, copied, copy = threading.Event(), threading.Event(), made.device.copy

        def late(place: int, address: int, piece: Piece) -> threading.Event:
            if piece in other.pieces:
                made.device.copies.put(lambda: gate.wait(60) and copied.set())
            return copy(place, address, piece)

        made.device.copy = late  # type: ignore[method-assign]
        assert filled(one, len(expected)) == expected
        assert one.verified
        assert "t2" in made.device.copied
        assert not copied.is_set()
        gate.set()


def damaged_later(made: Fixture) -> StreamedUnit:
    """A unit that was right, and whose last use was of damaged bytes."""
    (unit, expected) = made.units((2,))[0]
    assert filled(unit, len(expected)) == expected
    made.streamer.ring.forget()  # or what was copied ahead would be used
    whole = made.feed.whole(made.tensors[2].extent)
    whole[made.tensors[2].extent.offset + int(made.tensors[2].offsets[5]) + 40] ^= 1
    filled(unit, len(expected))
    return unit


def test_checking_tells_of_damage_at_once(tmp_path: Path) -> None:
    with Fixture(tmp_path, SIZES) as made:
        made.streamer.check()  # nothing was used
        (other, expected) = made.units((0,))[0]
        filled(other, len(expected))
        made.streamer.check()
        damaged_later(made)
        filled(other, len(expected))
        with pytest.raises(Corrupt, match="was damaged since it was first read") as caught:
            made.streamer.check()
        assert (caught.value.tensor, caught.value.chunk) == ("t2", 5)
        made.streamer.check()  # it was told


def test_checking_waits_for_what_was_queued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is at its last decode as long as nobody waits for it, and finds the damage later."""
    with Fixture(tmp_path, SIZES, blocking=False) as made:
        go, (other, size) = threading.Event(), sized(made.units((0,))[0])
        filled(other, size)
        unit = damaged_later(made)
        made.device.wait()
        with pytest.raises(Corrupt):
            made.streamer.check()
        for name in ("wait", "decoded"):
            waits = getattr(made.device, name)
            monkeypatch.setattr(made.device, name, lambda waits=waits: (go.set(), waits()))
        made.device.compute.put(lambda: go.wait(60) and None)
        filled(unit, 600_000)
        assert not go.is_set()
        with pytest.raises(Corrupt):
            made.streamer.check()


def test_checking_tells_of_all_damage_one_after_the_other(tmp_path: Path) -> None:
    with Fixture(tmp_path, SIZES) as made:
        units = made.units((2,), (5,))
        for unit, expected in units:
            assert filled(unit, len(expected)) == expected
        made.streamer.ring.forget()
        whole = made.feed.whole(made.tensors[0].extent)
        for tensor in (2, 5):
            extent, offsets = made.tensors[tensor].extent, made.tensors[tensor].offsets
            whole[extent.offset + int(offsets[3]) + 40] ^= 1
        for unit, expected in units:
            filled(unit, len(expected))
        found = []
        for _ in range(2):
            with pytest.raises(Corrupt) as caught:
                made.streamer.check()
            found.append(caught.value.tensor)
        assert found == ["t2", "t5"]
        made.streamer.check()


def test_rows_that_a_device_reads_on_the_host_are_checked_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Fixture(tmp_path, [50_000]) as made:
        tensor = made.tensors[0]
        monkeypatch.setattr(tensor, "header", replace_shape(tensor.header, (1000, 50)))
        reader, ids = Rows(tensor), torch.zeros(3, dtype=torch.int64)
        for _ in range(2):
            reader(ids)
        assert reader.checked == [True, True]
        made.streamer.check()
        reader(ids)
        reader.find()
        with pytest.raises(Corrupt, match="`t0`, chunk 7"):
            made.streamer.check()
        reader.find()
        with pytest.raises(Corrupt, match="`t0`, chunk 7"):
            reader(ids)


def test_a_damaged_index_is_refused_on_opening(tmp_path: Path) -> None:
    with Fixture(tmp_path, [50_000]) as made:
        data = bytearray(made.path.read_bytes())
        data[made.tensors[0].header.index_at + 3] ^= 1
        broken = tmp_path / "broken.bin"
        broken.write_bytes(data)
        source = FileSource(broken)
        with pytest.raises(Corrupt, match="`t0`: header, tables or index map are damaged"):
            Streamed(Extent(source, 0, source.size, "t0"), made.streamer, CPU, made.feed)
        source.close()
