"""What waits for what, and what is given back, at the first use of a unit, on errors, and after Ctrl-C."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from support.simulated import probed

torch = pytest.importorskip("torch", reason="needs torch")

from support.kernels import memory  # noqa: E402
from support.locking import FakeLock  # noqa: E402
from support.ring import SIZES, Fixture, filled  # noqa: E402

from tpde.cuda.items import StagedChunks  # noqa: E402
from tpde.errors import Corrupt, InvalidInput  # noqa: E402
from tpde.host.arena import Arena  # noqa: E402
from tpde.host.direct_io import BLOCK, Files  # noqa: E402
from tpde.host.disk import ReadAhead  # noqa: E402
from tpde.host.mapped import Mapping  # noqa: E402
from tpde.host.page_lock import Refused  # noqa: E402
from tpde.host.ranges import GAP_BYTES, PAGE, Range  # noqa: E402
from tpde.io.sources import BytesSource, Extent, FileSource  # noqa: E402
from tpde.streaming import ring  # noqa: E402
from tpde.streaming.expert_cache import ExpertCache  # noqa: E402
from tpde.streaming.pieces import TensorPart, cut  # noqa: E402
from tpde.streaming.prefetch import PrefetchOrder  # noqa: E402
from tpde.streaming.streamed_source import put_on_device  # noqa: E402

pytestmark = pytest.mark.usefixtures("bounded")


def damage(made: Fixture, number: int, chunk: int = 5) -> None:
    extent, offsets = made.tensors[number].extent, made.tensors[number].offsets
    made.feed.whole(extent)[extent.offset + int(offsets[chunk]) + 40] ^= 1


def test_a_first_use_waits_for_its_decoding(tmp_path: Path) -> None:
    """Else damage would be told at the second use, and the first one computes with it."""
    with Fixture(tmp_path, SIZES, blocking=False) as made:
        damage(made, 2)
        (unit, expected) = made.units((2,))[0]
        gate = threading.Event()
        made.device.compute.put(lambda: gate.wait(60) and None)
        threading.Timer(0.05, gate.set).start()
        with pytest.raises(Corrupt, match=r"`t2`, chunk 5: .*is damaged"):
            unit(torch.empty(len(expected), dtype=torch.uint8))
        assert not unit.verified


def test_what_was_damaged_at_first_is_not_verified(tmp_path: Path) -> None:
    with Fixture(tmp_path, SIZES) as made:
        (unit, expected) = made.units((2,))[0]
        damage(made, 2)
        for _ in range(2):
            with pytest.raises(Corrupt, match="is damaged"):
                filled(unit, len(expected))
            assert not unit.verified
        damage(made, 2)  # and back again
        assert filled(unit, len(expected)) == expected
        assert unit.verified


def test_a_check_that_fails_asks_again_for_what_it_has_not_told(tmp_path: Path) -> None:
    """One unit's report is of two launches: the second is told by the next check."""
    with Fixture(tmp_path, SIZES) as made:
        (unit, expected) = made.units((0,))[0]
        filled(unit, len(expected))
        found, asked = [Corrupt("one"), Corrupt("two")], list[int]()

        def report() -> None:
            asked.append(1)
            if found:
                raise found.pop(0)

        unit.report = report  # type: ignore[method-assign]
        for what in ("one", "two"):
            with pytest.raises(Corrupt, match=what):
                made.streamer.check()
        for _ in range(2):
            made.streamer.check()
            assert len(asked) == 3, "what has told all is asked no more"


def test_checking_waits_for_another_threads_fill(tmp_path: Path) -> None:
    with Fixture(tmp_path, SIZES) as made:
        (unit, expected) = made.units((0,))[0]
        probe = made.probe
        copy, checked, seen = made.device.copy, [], list[bool]()

        def check() -> None:
            made.streamer.check()
            checked.append(1)
            probe.asked.set()  # had it not asked

        other = threading.Thread(target=check)

        def slow(*args: Any) -> Any:
            if not seen:
                other.start()
                assert probe.asked.wait(60)
            seen.append(bool(checked))
            return copy(*args)

        made.device.copy = slow  # type: ignore[method-assign]
        made.streamer.ring.prefetch = False
        assert filled(unit, len(expected)) == expected
        other.join()
        assert not any(seen)
        assert checked


def test_filling_waits_for_another_threads_fill(tmp_path: Path) -> None:
    with Fixture(tmp_path, SIZES) as made:
        (unit, expected), (other_unit, needed) = made.units((0,), (1,))
        probe = made.probe
        copy, seen, results = made.device.copy, list[bool](), list[bytes]()

        def fill() -> None:
            results.append(filled(other_unit, len(needed)))
            probe.asked.set()

        other = threading.Thread(target=fill)

        def slow(*args: Any) -> Any:
            if not seen:
                seen.append(False)
                other.start()
                assert probe.asked.wait(60)
            seen.append(bool(results) and len(seen) < len(unit.pieces))
            return copy(*args)

        made.device.copy = slow  # type: ignore[method-assign]
        made.streamer.ring.prefetch = False
        assert filled(unit, len(expected)) == expected
        other.join()
        assert results == [needed]
        assert not any(seen)


def test_after_an_error_places_are_free_when_the_device_is_done(tmp_path: Path) -> None:
    with Fixture(tmp_path, SIZES, blocking=False) as made:
        (unit, expected) = made.units((0, 1))[0]
        gate, decode, calls = threading.Event(), made.device.decode, []

        def interrupted(*args: Any) -> Any:
            calls.append(1)
            if len(calls) == 2:
                made.device.compute.put(lambda: gate.wait(60) and None)
                threading.Timer(0.05, gate.set).start()
                raise KeyboardInterrupt
            return decode(*args)

        made.device.decode = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            filled(unit, len(expected))
        assert gate.is_set(), "it was waited for"
        before, held, hold = len(made.device.copied), list[int](), made.device.hold

        def holding(event: Any) -> None:
            held.append(len(made.device.copied) - before)
            hold(event)

        made.device.hold = holding  # type: ignore[method-assign]
        assert filled(unit, len(expected)) == expected
        assert held[0] == 4, "nothing holds what goes to the first places"


def test_ctrl_c_between_asking_and_noting_gives_the_ticket_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Fixture(tmp_path, SIZES) as made:
        (unit, expected) = made.units((0,))[0]

        def interrupted(*_: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(ring, "_Step", interrupted)
            with pytest.raises(KeyboardInterrupt):
                filled(unit, len(expected))
        assert len(made.feed.requested) == made.feed.cancelled == 1
        assert filled(unit, len(expected)) == expected


def test_feeds_are_told_of_every_copy(tmp_path: Path) -> None:
    with Fixture(tmp_path, SIZES) as made:
        told: list[tuple[str, Any]] = []
        made.feed.copied = lambda extent, event: told.append((extent.name, event))  # type: ignore[method-assign]
        for unit, expected in made.units((0,), (1,), (2,)):
            assert filled(unit, len(expected)) == expected
        assert [name for name, _ in told] == made.device.copied
        assert all(hasattr(event, "wait") for _, event in told)


def test_what_lies_far_between_two_tensors_is_not_copied(tmp_path: Path) -> None:
    with Fixture(tmp_path, [3000, 3000]) as made:
        first, second = made.tensors
        far = second.extent._replace(offset=first.extent.offset + first.extent.size + GAP_BYTES + 256)
        parts = [TensorPart(first, 0, 0, 0), TensorPart(second, 0, 0, 0)]
        assert len(cut(parts, 64 << 20)) == 1
        second.extent = far
        assert len(cut(parts, 64 << 20)) == 2


def test_what_was_made_first_follows_what_was_made_last() -> None:
    order: PrefetchOrder[str] = PrefetchOrder()
    for name in "abc":
        order.expect(name)
    assert [order.after(name) for name in "abc"] == ["b", "c", "a"]
    order.saw("c")
    order.saw("b")
    assert order.after("c") == "b"


def test_an_expert_is_held_by_all_who_hold_it() -> None:
    cache: ExpertCache[str] = ExpertCache(1)
    place = cache.insert("a")
    assert cache.lookup("a") == place
    cache.release("a")
    assert cache.insert("b") is None, "one still decodes it"
    cache.release("a")
    assert cache.insert("b") == place


# ---- memory and files ----


@pytest.fixture
def maps(monkeypatch: pytest.MonkeyPatch) -> list[mmap.mmap]:
    """What is mapped from now on."""
    made: list[mmap.mmap] = []

    class Map(mmap.mmap):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            made.append(self)

    monkeypatch.setattr(mmap, "mmap", Map)
    return made


def test_an_arena_is_given_back_where_locking_is_interrupted(maps: list[mmap.mmap]) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    fake = FakeLock()
    fake.first = interrupt
    with pytest.raises(KeyboardInterrupt):
        ReadAhead(2, 4096, 1, fake)
    assert [it.closed for it in maps] == [True]


def test_an_arena_unlocks_what_it_has_locked() -> None:
    fake, made = FakeLock(), Arena(8 * PAGE)
    made.lock(fake, 0, PAGE)
    made.lock(fake, PAGE, 2 * PAGE)
    assert len(fake.locked) == 2
    made.close()
    assert not fake.locked


def test_an_arena_outlives_the_copies_from_it(tmp_path: Path, maps: list[mmap.mmap]) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(64 << 10))
    source, synchronized = FileSource(path), list[bool]()

    class Copying:
        def synchronize(self) -> None:
            synchronized.append(maps[0].closed)

    ahead = ReadAhead(1, 64 << 10, 1, None)
    ticket = ahead.request(Extent(source, 0, 64 << 10, "x"))
    ticket.wait()
    ticket.copied(Copying())
    ahead.close()
    assert synchronized == [False]
    assert maps[0].closed
    source.close()


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any file system reads past its cache: what is asked for is that it does not."""
    if not hasattr(os, "O_DIRECT") or not os.path.isdir("/proc/self/fd"):
        pytest.skip("needs direct reads, and /proc")
    monkeypatch.setattr(os, "O_DIRECT", 0)


@pytest.mark.usefixtures("everywhere")
def test_short_direct_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = os.urandom(8 * BLOCK)
    path = tmp_path / "file"
    path.write_bytes(data)
    source, files, real, out = FileSource(path), Files(), os.preadv, bytearray(len(data))

    def short(descriptor: int, buffers: Any, offset: int) -> int:
        assert descriptor != source.fileno(), "it is read past the page cache"
        assert offset % BLOCK == 0
        return real(descriptor, [buffers[0][: 3 * BLOCK // 2]], offset)

    monkeypatch.setattr(os, "preadv", short)
    files.read(source, 0, memoryview(out), len(data))
    assert bytes(out) == data
    files.close()
    source.close()


@pytest.mark.usefixtures("everywhere")
def test_files_that_were_opened_for_direct_reads_are_closed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(8192))
    source, files = FileSource(path), Files()
    before = len(os.listdir("/proc/self/fd"))
    assert files.direct(source)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    files.close()
    assert len(os.listdir("/proc/self/fd")) == before
    source.close()


def test_two_threads_open_a_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(8192))
    source, opened, real, found = FileSource(path), list[str](), os.open, list[bool]()
    files, probe = probed(Files, "Lock")

    def read() -> None:
        found.append(files.direct(source))
        probe.asked.set()  # had it not asked

    other = threading.Thread(target=read)

    def slow(name: str, flags: int) -> int:
        opened.append(name)
        if len(opened) == 1:
            other.start()
            assert probe.asked.wait(60)
        return real(name, flags)

    monkeypatch.setattr(os, "open", slow)
    past = files.direct(source)
    other.join()
    files.close()
    source.close()
    assert len(opened) == 1
    assert found == [past], "both read past the page cache, or neither"


def test_files_that_were_closed_are_opened_again(tmp_path: Path) -> None:
    path, out = tmp_path / "file", memoryview(mmap.mmap(-1, BLOCK))
    path.write_bytes(b"abc" * 4096)
    source, files = FileSource(path), Files()
    for _ in range(2):
        files.read(source, 0, out, 100)
        assert bytes(out[:100]) == (b"abc" * 4096)[:100]
        files.close()
        out[:100] = bytes(100)
    source.close()


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP, errno.EIO])
def test_file_systems_that_refuse_direct_reads(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are read through the page cache from then on; a disk that fails is not tried again."""
    path, out = tmp_path / "file", memoryview(mmap.mmap(-1, BLOCK))
    path.write_bytes(b"abc" * 4096)
    source, files, real, tried = FileSource(path), Files(), os.preadv, list[int]()

    def preadv(descriptor: int, *args: Any) -> int:
        if descriptor != source.fileno():
            tried.append(descriptor)
            raise OSError(code, os.strerror(code))
        return real(descriptor, *args)

    monkeypatch.setattr(os, "preadv", preadv)
    for _ in range(2):
        with pytest.raises(OSError, match="Input/output") if code == errno.EIO else nullcontext():
            files.read(source, 0, out, 100)
            assert bytes(out[:100]) == (b"abc" * 4096)[:100]
            assert not out[100:].tobytes().strip(b"\0"), "no more than was asked for"
    assert len(tried) == (2 if code == errno.EIO else 1)
    files.close()
    source.close()


def test_what_was_mapped_is_unmapped_where_the_next_file_cannot_be(
    tmp_path: Path, maps: list[mmap.mmap]
) -> None:
    (tmp_path / "file").write_bytes(bytes(8192))
    source = FileSource(tmp_path / "file")
    with pytest.raises(Refused, match="`bytes` is not a file"):
        Mapping([Range(source, 0, 8192), Range(BytesSource(bytes(10), "bytes"), 0, 10)], FakeLock())
    assert [it.closed for it in maps] == [True]
    source.close()


def test_what_kernels_take_to_read_over_the_bus(tmp_path: Path) -> None:
    """The blob where it is locked, and tables and index map on the device; nothing of what is not locked."""
    with Fixture(tmp_path, [50_000]) as made:
        it, address = made.tensors[0], 1 << 20
        assert it.item(64) is None
        made.feed.device_address = lambda extent: address  # type: ignore[method-assign]
        item = it.item(64)
        assert item is not None
        assert (item.blob, item.out, item.chunks) == (1 << 20, 64, None)
        tables, image = it.device_tables()  # type: ignore[misc]
        assert item.tables is tables
        assert item.tables_at == image.data_ptr()
        index = it.host_reader().index
        assert memory(item.index_at, index.nbytes).tobytes() == index.tobytes()
        assert item.header is it.header
        part = StagedChunks(1, 2, 3, 4)
        assert it.item(64, part).chunks == part  # type: ignore[union-attr]
        address += 8
        assert it.item(64) is None, "not at a multiple of 16"


def test_what_cannot_be_decoded_in_pieces_is_not_for_kernels(tmp_path: Path) -> None:
    with Fixture(tmp_path, [50_000]) as made:
        it = made.tensors[0]
        made.feed.device_address = lambda extent: 1 << 20  # type: ignore[method-assign]
        assert it.decodable()
        it.travels = False
        assert not it.decodable()
        assert it.item(0) is None


def test_which_weights_lie_in_host_memory(tmp_path: Path) -> None:
    with Fixture(tmp_path, [5000]) as made:
        it = made.tensors[0]
        assert it.in_host_memory(made.streamer)
        assert not it.in_host_memory(object()), "another streamer's"
        made.feed.ahead = 1
        assert not it.in_host_memory(made.streamer), "some are read from a disk"


def test_two_threads_put_tables_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One must not replace what the other has launched a kernel with."""
    with Fixture(tmp_path, [50_000]) as made:
        it, begun, empty = made.tensors[0], threading.Event(), torch.empty
        allocations: list[int] = []

        def slow(*args: Any, **options: Any) -> Any:
            allocations.append(1)
            begun.set()
            if len(allocations) == 1:
                other.start()
                other.join(0.2)  # it waits for this one
            return empty(*args, **options)

        monkeypatch.setattr(torch, "empty", slow)
        other = threading.Thread(target=lambda: put_on_device([it]))
        put_on_device([it])
        other.join()
        assert begun.is_set()
        assert allocations == [1]


def test_a_directory_is_called_one(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="is a directory, not a regular file; name a file"):
        FileSource(tmp_path)
