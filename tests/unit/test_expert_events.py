"""What fetching experts waits for: events between streams, other threads; and what an error leaves."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.simulated import Probe

torch = pytest.importorskip("torch", reason="needs torch")

from support.cuda import Cuda  # noqa: E402
from support.expert_stores import Fixture  # noqa: E402

from tpde.errors import Corrupt  # noqa: E402
from tpde.io.sources import Extent  # noqa: E402
from tpde.streaming.cuda_device import CudaDevice  # noqa: E402

pytestmark = pytest.mark.usefixtures("bounded")


@pytest.mark.parametrize(("without", "differs"), [("", False), ("hold", True), ("copied", True)])
def test_events(without: str, differs: bool, tmp_path: Path) -> None:
    """With copies and decodes late at random; and it shows when either wait is left out."""
    wrong: list[int] = []
    for seed in range(8 if differs else 1):
        folder = tmp_path / str(seed)
        folder.mkdir()
        it = Fixture(folder, 6, 2, delay=2e-3, seed=seed, without=without, blocking=False)
        try:
            # What is not there yet may not even be decodable.
            with suppress(*((Corrupt,) if differs else ())):
                wrong.append(-1)
                wrong[-1:] = late(it, np.random.default_rng(seed))
        finally:
            it.close()
        if wrong:
            break
    assert bool(wrong) is differs


def late(it: Fixture, draw: np.random.Generator) -> list[int]:
    """Fetch experts at random, the host never waiting before they are wanted; gives those that are wrong."""
    it.experts.fetch([], it.out)
    for n in range(6):
        it.experts._experts[n] = it.store.expert(it.slots, n)
        it.experts._experts[n].verified = True
    wrong = []
    for _ in range(40):
        it.out.fill_(0xFF)
        numbers = sorted(draw.choice(6, 3, replace=False).tolist())
        it.experts.fetch(numbers, it.out)
        it.device.compute.record().wait(60)
        wrong += it.wrong(numbers)
    return wrong


def test_copies_are_queued_before_what_is_there_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bus is busy meanwhile."""
    it = Fixture(tmp_path, 2, 2)
    try:
        it.experts.fetch([0], it.out)
        log: list[str] = []
        for name in ("copy", "decode"):
            real = getattr(it.device, name)
            monkeypatch.setattr(
                it.device, name, lambda *args, name=name, real=real: log.append(name) or real(*args)
            )
        it.experts.fetch([0, 1], it.out)
        assert log == sorted(log)
        assert {*log} == {"copy", "decode"}
    finally:
        it.close()


@pytest.mark.parametrize("eager", ["copies", "computes"])
def test_the_bytes_are_right_in_whatever_order_streams_run(
    eager: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launch_on: Any
) -> None:
    pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")
    cuda = Cuda(monkeypatch, launch_on, eager)
    it = Fixture(tmp_path, 6, 2, kind=lambda ring: CudaDevice(cuda, ring))  # type: ignore[arg-type]
    try:
        cuda.tensors += [source for slot in it.slots for source in slot.packed.sources]  # type: ignore[misc]
        it.experts.fetch([], it.out)
        for n in range(6):
            it.experts._experts[n] = it.store.expert(it.slots, n)
            it.experts._experts[n].verified = True
        found: list[list[int]] = []
        for numbers in ([0, 1], [1, 2, 3], [3, 4, 0], [0, 5], [5, 0]):
            it.out.fill_(0xFF)
            it.experts.fetch(numbers, it.out)
            cuda.streams[0].put(lambda numbers=numbers: found.append(it.wrong(numbers)))
            cuda.streams[0].put(it.out.zero_)
        assert not found, "nobody has waited yet"
        it.store.check()
        assert found == [[]] * 5
        assert it.store.cache.hits > 0
        assert it.store.copied_bytes == sum(size for *_, size in cuda.copied)
    finally:
        it.close()


@pytest.mark.parametrize("what", ["record", "check", "fetch"])
def test_a_fetch_is_not_disturbed_by_another_thread(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = Fixture(tmp_path, 4, 2)
    try:
        probe = it.store._lock = Probe(it.store._lock)  # type: ignore[assignment]
        another = it.store.expert(it.slots, 2)
        trace, out, alive = object(), torch.full((2 << 20,), 0xFF, dtype=torch.uint8), list[bool]()
        calls = {
            "record": lambda: it.store.record(trace),  # type: ignore[arg-type]
            "check": it.store.check,
            "fetch": lambda: it.store.fetch(it.experts, [another], out),
        }

        def call() -> None:
            calls[what]()
            probe.asked.set()  # had it not asked

        other, copy = threading.Thread(target=call), it.device.copy

        def slow(*args: Any) -> Any:
            if not alive:
                other.start()
                assert probe.asked.wait(60)
                alive.append(other.is_alive())
                assert it.device.trace is None
            return copy(*args)

        monkeypatch.setattr(it.device, "copy", slow)
        it.experts.fetch([0, 1], it.out)
        other.join()
        assert alive == [True], "it waits"
        assert not it.wrong([0, 1])
        assert what != "record" or it.device.trace is trace
    finally:
        it.device.trace = None
        it.close()


# ---- damage, and errors


def test_a_new_expert_is_waited_for_beside_known_ones(tmp_path: Path) -> None:
    """Else damage would be told at its second use."""
    it = Fixture(tmp_path, 2, 2)
    try:
        it.experts.fetch([0], it.out)
        of: Any = it.slots[1].packed.sources[1]
        it.feed.whole(of.extent)[of.extent.offset + int(of.offsets[0]) + 40] ^= 1
        with pytest.raises(Corrupt, match=r"`e3`, chunk 0: .* is damaged"):
            it.experts.fetch([0, 1], it.out)
        assert not it.store._asked
    finally:
        it.close()


def test_checking_tells_of_damage_at_once(tmp_path: Path) -> None:
    it = Fixture(tmp_path, 3, 1)
    try:
        it.store.check()
        it.experts.fetch([0, 1], it.out)
        it.store.check()
        extent = it.slots[0].packed.sources[1].extent
        whole = it.feed.whole(extent)
        whole[extent.offset + int(it.slots[0].packed.sources[1].offsets[1]) + 40] ^= 1
        it.experts.fetch([0], it.out)
        it.store.check()
        it.experts.fetch([1], it.out)
        it.experts.fetch([2], it.out)
        with pytest.raises(Corrupt, match=r"`e2`, chunk 1: .* was damaged since it was first read"):
            it.store.check()
        it.store.check()
    finally:
        it.close()


def test_places_are_free_after_an_error_when_the_device_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = Fixture(tmp_path, 4, 4, blocking=False)
    try:
        gate, decode, calls = threading.Event(), it.device.decode, list[int]()

        def interrupted(*args: Any) -> Any:
            calls.append(1)
            if len(calls) == 2:
                it.device.compute.put(lambda: gate.wait(60) and None)
                threading.Timer(0.05, gate.set).start()
                raise KeyboardInterrupt
            return decode(*args)

        monkeypatch.setattr(it.device, "decode", interrupted)
        with pytest.raises(KeyboardInterrupt):
            it.experts.fetch([0, 1], it.out)
        assert gate.is_set(), "it was waited for"
    finally:
        it.close()


def test_interrupted_again_while_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    it = Fixture(tmp_path, 6, 3)
    for expert in range(6):  # verified: nobody waits for checksums from now on
        it.experts.fetch([expert], it.out)
    it.store._forget()
    with monkeypatch.context() as patch:
        patch.setattr(it.feed, "wait", interrupted)
        patch.setattr(it.device, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            it.experts.fetch([0, 1], it.out)
    it.out.fill_(0xFF)
    it.experts.fetch([2, 3], it.out)
    assert not it.wrong([2, 3])
    it.close()


@pytest.mark.parametrize("kind", ["wait", "copy", "decode"])
@pytest.mark.parametrize("number", [0, 1, 3])
def test_what_a_failed_fetch_has_requested_is_given_back(
    kind: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A feed with few buffers would have none left otherwise."""
    it, calls = Fixture(tmp_path, 6, 3), list[None]()
    of = it.feed if kind == "wait" else it.device
    real, copied = getattr(of, kind), list[Extent]()

    def fails(*args: Any) -> Any:
        calls.append(None)
        if len(calls) > number:
            raise OSError("it failed")
        return real(*args)

    monkeypatch.setattr(it.feed, "copied", lambda extent, event: copied.append(extent))
    with monkeypatch.context() as patch:
        patch.setattr(of, kind, fails)
        with pytest.raises(OSError, match="it failed"):
            it.experts.fetch([*range(6)], it.out)
    assert it.feed.requested
    assert len(it.feed.requested) == len(copied) + it.feed.cancelled
    it.experts.fetch([*range(6)], it.out)
    assert not it.wrong([*range(6)])
    assert len(it.feed.requested) == len(copied) + it.feed.cancelled
    it.close()
