"""Models under a budget: damage that is found late, and what closing, dropping and failing give back."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from support.budgets import Opened, every, load, simulated
from support.checkpoints import Pair
from support.garbage import uncollected
from support.models import assert_same_bits, inputs, torch
from support.simulated import MemoryFeed

from tpde import nn as packed_nn
from tpde.errors import Corrupt, ReadError
from tpde.nn.routing import fused

transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")

from tpde.loading.budgeted import Streaming  # noqa: E402
from tpde.planning.budget import Budget  # noqa: E402

# ---- damage ----


def _damage(model: Any, part: Any) -> None:
    """Change a byte of a streamed weight, where it waits on the host."""
    (streamer,) = model.tpde_streamer.streamers.values()
    streamer.ring.forget()  # what was copied ahead is sound
    part.feed.whole(part.extent)[part.extent.offset + int(part.offsets[0]) + 40] ^= 1


def test_damage_after_the_first_use_is_raised_by_a_check(hosted: Opened, llama: Pair) -> None:
    model, took = load(llama.packed), inputs("llama", 1, 4)
    part = model.lm_head.weight.packed.sources[0]
    with torch.no_grad():
        sound = model(**took).logits
        _damage(model, part)
        assert not torch.equal(model(**took).logits, sound), "this one has used it"
        with pytest.raises(Corrupt, match=r"`lm_head.weight`, chunk 0: .* was damaged since"):
            model.tpde_streamer.check()
        _damage(model, part)  # undone
        assert_same_bits(model(**took).logits, sound)
        model.tpde_streamer.check()
        _damage(model, part)
        model(**took)
        with pytest.raises(Corrupt, match="lm_head"):
            model(**took)


def test_damage_is_raised_by_closing(hosted: Opened, llama: Pair) -> None:
    model, took = load(llama.packed), inputs("llama", 1, 4)
    with torch.no_grad():
        model(**took)
        _damage(model, model.lm_head.weight.packed.sources[0])
        model(**took)
    with pytest.raises(Corrupt, match="lm_head"):
        model.tpde_streamer.close()
    assert hosted.memory[0].closed
    model.tpde_streamer.close()


def test_damage_of_experts_is_raised_by_a_check(hosted: Opened, experts: tuple[str, Pair]) -> None:
    name, pair = experts
    model, took = load(pair.packed), inputs(name, 1, 9)
    (store,) = model.tpde_streamer.experts.values()
    module = next(it for _, it in packed_nn.packed_modules(model) if fused(it))
    with torch.no_grad():
        model(**took)
        store.cache.clear()
        for part in fused(module)[0].packed.sources:
            _damage(model, part)
        model(**took)
    with pytest.raises(Corrupt, match="experts"):
        model.tpde_streamer.check()


# ---- the end ----


def test_closing_gives_all_back_when_a_device_has_crashed() -> None:
    """The other device's memory, and the budgets, too."""
    given: list[str] = []

    class Crashed:
        def check(self) -> None:
            raise RuntimeError("an illegal memory access was encountered")

        def close(self) -> None:
            given.append("crashed")
            self.check()

    class Sound:
        def check(self) -> None:
            pass

        def close(self) -> None:
            given.append("sound")

    streaming: Any = Streaming(Budget(1 << 30))
    streaming.streamers = {torch.device("cuda", 0): Sound(), torch.device("cuda", 1): Crashed()}
    streaming._finalizers.append(lambda: given.append("budget"))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        streaming.close()
    assert sorted(given) == ["budget", "crashed", "sound"]


def test_closing(hosted: Opened, llama: Pair) -> None:
    model = load(llama.packed)
    model.tpde_streamer.close()
    assert hosted.memory[0].closed
    with pytest.raises(ReadError, match="closed"):
        model(**inputs("llama", 1, 4))
    model.tpde_streamer.close()


def test_a_model_that_is_dropped_gives_all_back(hosted: Opened, llama: Pair) -> None:
    model = load(llama.packed)
    with torch.no_grad():
        model(**inputs("llama", 1, 4))
    assert not hosted.memory[0].closed
    del model
    gc.collect()
    assert hosted.memory[0].closed


def test_what_was_dropped_is_gone_before_the_next_load(
    hosted: Opened, llama: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What streams is in cycles, and collection is put off while a model is loaded."""
    gone, passes, collect, make = [], [], gc.collect, Streaming.decide

    def counted() -> int:
        passes.append(len(gone))
        return collect()

    def decide(self: Streaming, *args: Any, **options: Any) -> None:
        gone.append(streamer() is None)
        make(self, *args, **options)

    assert gc.isenabled()
    model = load(llama.packed)
    with torch.no_grad():
        model(**inputs("llama", 1, 4))
    gc.collect()  # what other tests have dropped
    load(llama.packed)  # and what is noted of it
    monkeypatch.setattr(gc, "collect", counted)
    monkeypatch.setattr(Streaming, "decide", decide)
    (made,) = model.tpde_streamer.streamers.values()
    streamer, weights = weakref.ref(made), weakref.ref(model.model.layers[0])
    with uncollected():
        del model, made
        assert weights() is None
        assert streamer() is not None
    model = load(llama.packed)
    (made,) = model.tpde_streamer.streamers.values()
    streamer = weakref.ref(made)
    other = load(llama.packed)
    assert gone == [True, False]
    assert passes == [0]  # nothing was dropped before the last
    del model, other


def test_a_device_that_has_crashed_leaves_nothing_open(
    hosted: Opened, experts: tuple[str, Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, pair = experts
    model = load(pair.packed)
    with torch.no_grad():
        model(**inputs(name, 1, 4))
    (streamer,) = model.tpde_streamer.streamers.values()
    owned = [*streamer.owned]
    assert len(owned) > 2  # a cache of experts, memory, files

    def crashed(*_: Any) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    with monkeypatch.context() as patch:
        for device in hosted.devices:
            patch.setattr(device, "wait", crashed)
            patch.setattr(device, "close", crashed)
        with pytest.raises(RuntimeError, match="illegal memory access"):
            model.tpde_streamer.close()
    assert hosted.memory[0].closed
    assert not streamer.owned


def test_what_was_dropped_before_recording_does_not_count(
    hosted: Opened, llama: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(llama.packed)
    with torch.no_grad():
        for _ in range(3):
            model(**inputs("llama", 1, 4))
            model.lm_head(torch.zeros(1, model.config.hidden_size, dtype=model.dtype))
    (stats,) = model.tpde_streamer.stats().values()
    assert stats["dropped_pieces"] > 0
    model.tpde_streamer.record()
    (device,) = model.tpde_streamer.streamers
    assert model.tpde_streamer.summary(device).dropped == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_loading_that_is_interrupted_gives_all_back(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch, llama: Pair
) -> None:
    def fail(memory: MemoryFeed) -> None:
        raise error

    with simulated(monkeypatch, every("host", "disk")) as opened:
        monkeypatch.setattr(MemoryFeed, "begin", fail)
        with pytest.raises(error):
            load(llama.packed)
        assert opened.memory[0].closed
        assert opened.disks[0].closed
