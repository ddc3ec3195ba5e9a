"""Host memory of models loaded under a budget: when it is filled, what fails then, and what is reported."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from support.budgets import every, load, simulated
from support.checkpoints import Pair, checkpoint
from support.locking import FakeLock
from support.models import assert_same_bits, outputs, torch
from support.simulated import MemoryFeed

from tpde import nn as packed_nn
from tpde.errors import Corrupt, OutOfMemory, UnsupportedDevice
from tpde.files.forward_order import forward_order

pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")

from tpde.integrations.transformers.load_target import load_target, loading_to
from tpde.loading import feeds
from tpde.planning.budget import Budget


def _host_threads() -> list[str]:
    return [it.name for it in threading.enumerate() if it.name.startswith("tpde-host")]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeLock:
    """Locks host memory, an arena, for no device."""
    monkeypatch.setenv("TPDE_HOST_MEMORY", "arena")
    return FakeLock()


def test_host_memory_is_filled_in_the_order_of_a_forward_pass(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The first pass waits for it, file by file; by name, the head would come before the embedding."""
    packed = checkpoint(tmp_path, "llama", max_shard_size="60kB").packed
    with simulated(monkeypatch, every("host")) as opened:
        load(packed).tpde_streamer.close()
    files = list(dict.fromkeys(Path(it.source.name).name for it in opened.wanted))
    assert len(files) > 3
    assert files == sorted(files)
    names = [it.name for it in opened.wanted]
    assert names == forward_order(names)
    assert (names[0], names[-1]) == ("model.embed_tokens.weight", "lm_head.weight")


def test_host_memory_begins_when_all_else_is_there(monkeypatch: pytest.MonkeyPatch, llama: Pair) -> None:
    """It would be in the way of all else; embeddings are read in place, so that they are waited for."""
    log: list[str] = []

    class Kernels:
        device, reserved = torch.device("cpu"), 0

        def wait(self) -> None:
            log.append("kernels")

        def abandon(self) -> None:
            log.append("abandoned")

    def logged(owner: Any, name: str, what: str) -> None:
        original = getattr(owner, name)

        def call(*args: Any) -> Any:
            log.append(what)
            return original(*args)

        monkeypatch.setattr(owner, name, call)

    def begin(memory: MemoryFeed) -> None:
        log.append("host memory")
        if fails:
            raise OutOfMemory("full")

    logged(packed_nn.group.Group, "prepare", "block")
    logged(packed_nn.PackedTensor, "prepare_rows", "rows")
    monkeypatch.setattr(MemoryFeed, "begin", begin)
    for fails in (False, True):
        log.clear()
        with simulated(monkeypatch, every("host")) as opened:
            with (
                pytest.raises(OutOfMemory, match="full") if fails else nullcontext(),
                loading_to(torch.device("cpu"), Budget(1 << 30, None, 256)),
            ):
                load_target().warmup = Kernels()  # type: ignore[assignment]
                llama.kind.from_pretrained(llama.packed, dtype="auto")
            assert opened.memory[0].closed == fails
        first = log.index("host memory")
        assert "kernels" in log[:first]
        assert "block" in log[:first]
        assert "rows" not in log[:first]
        assert log[first + 1] == ("abandoned" if fails else "rows")


def test_a_model_is_there_before_its_host_memory_is(
    monkeypatch: pytest.MonkeyPatch, llama: Pair, fake: FakeLock
) -> None:
    """Locking waits here until the model has been loaded; its first forward pass waits for that."""
    loaded, reached = threading.Event(), threading.Event()

    def wait() -> None:
        reached.set()
        assert loaded.wait(60), "loading waits for host memory"

    fake.first = wait
    with simulated(monkeypatch, every("host"), page_lock=fake):
        model = load(llama.packed)
        assert reached.wait(60)
        assert not fake.locked
        with ThreadPoolExecutor() as pool:
            made = pool.submit(outputs, "llama", model, 1)
            assert not made.done()
            loaded.set()
            model.tpde_streamer.wait()
            assert fake.locked
            assert_same_bits(
                made.result(60), outputs("llama", llama.kind.from_pretrained(llama.plain), 1), ""
            )
        model.tpde_streamer.close()
        assert not fake.locked
        assert not _host_threads()


def test_host_memory_that_fails_is_told_by_the_first_forward_pass(
    monkeypatch: pytest.MonkeyPatch, llama: Pair, fake: FakeLock
) -> None:
    fake.error = UnsupportedDevice("page-locking failed: CUDA_ERROR_DEINITIALIZED")
    with simulated(monkeypatch, every("host"), page_lock=fake):
        model = load(llama.packed)
        for _ in range(2):
            with pytest.raises(UnsupportedDevice, match="DEINITIALIZED"):
                outputs("llama", model, 1)
        with pytest.raises(UnsupportedDevice, match="DEINITIALIZED"):
            model.tpde_streamer.wait()
        model.tpde_streamer.close()
        assert not _host_threads()


@pytest.mark.parametrize("error", [OutOfMemory("full"), KeyboardInterrupt()], ids=["memory", "interrupt"])
def test_opening_that_fails_gives_locked_memory_back(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, llama: Pair
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    with simulated(monkeypatch, every("host")) as opened:
        monkeypatch.setattr(feeds, "Streamer", fail)
        with pytest.raises(type(error)):
            load(llama.packed)
        assert opened.memory[0].closed


@pytest.mark.parametrize("error", [Corrupt("damaged"), KeyboardInterrupt()], ids=["damage", "interrupt"])
def test_nothing_is_locked_before_headers_are_read(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, llama: Pair
) -> None:
    def fail(*_: Any) -> Any:
        raise error

    with simulated(monkeypatch, every("host")) as opened:
        monkeypatch.setattr(feeds, "Streamed", fail)
        with pytest.raises(type(error)):
            load(llama.packed)
        assert not opened.memory


def test_progress(monkeypatch: pytest.MonkeyPatch, llama: Pair) -> None:
    sizes: list[int] = []
    with simulated(monkeypatch, every("host", "packed", "plain")):
        load(llama.packed, progress=sizes.append)
    from tpde.files.reader import PackedFile

    with PackedFile(llama.packed / "model.safetensors") as file:
        packed = sum(e.end - e.begin for n, e in file.container.entries.items() if n.endswith("_tpde"))
    assert sum(sizes) == packed
