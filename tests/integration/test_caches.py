"""Generation under a budget, with every kind of cache that works on a CPU. The device is simulated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.budgets import every, load, simulated
from support.caches import ANYWHERE, NAMES, QUANTIZED, expected, generated
from support.checkpoints import Pair, checkpoint
from support.models import inputs, torch

from tpde.errors import OutOfMemory

transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")


@pytest.fixture(scope="module", params=NAMES)
def named(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Pair]:
    return request.param, checkpoint(tmp_path_factory.mktemp(request.param), request.param)


def generates(name: str, pair: Pair, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = expected(name, pair.kind.from_pretrained(pair.plain), way)
    with simulated(monkeypatch, every("host")):
        model = load(pair.packed)
        assert torch.equal(generated(name, model, way), wanted)
        model.tpde_streamer.check()
        (stats,) = model.tpde_streamer.stats().values()
        assert stats["copied_bytes"] > 0


@pytest.mark.parametrize("way", ANYWHERE)
def test_generation(way: str, named: tuple[str, Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    generates(*named, way, monkeypatch)


@pytest.mark.parametrize("way", QUANTIZED)
def test_quantized_caches(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generates("llama", checkpoint(tmp_path, "llama"), way, monkeypatch)


def test_caches_that_a_user_makes(named: tuple[str, Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    """Filled by one call, used by the next, as in a chat."""
    name, pair = named
    key = "cache_params" if name == "mamba" else "past_key_values"

    def logits(model: Any, cache: Any) -> Any:
        took = inputs(name, 2, 9)["input_ids"]
        with torch.no_grad():
            first = model(took[:, :8], **{key: cache}, use_cache=True)
            return first.logits, model(took[:, 8:], **{key: cache}, use_cache=True).logits

    def caches(config: Any) -> list[Any]:
        static = transformers.StaticCache(config=config, max_cache_len=12)
        return [transformers.DynamicCache(config=config), static]

    plain = pair.kind.from_pretrained(pair.plain)
    wanted = [logits(plain, cache) for cache in caches(plain.config)]
    with simulated(monkeypatch, every("host")):
        model = load(pair.packed, max_tokens=24)
        for cache, both in zip(caches(model.config), wanted, strict=True):
            for found, it in zip(logits(model, cache), both, strict=True):
                assert torch.equal(found, it)


def test_a_state_takes_no_more_for_more_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its model may go on for as long as it likes, but not read more at once than there is memory for."""
    pair = checkpoint(tmp_path, "mamba")
    with simulated(monkeypatch, every("host")):
        model = load(pair.packed, max_tokens=20)
        assert generated("mamba", model, "dynamic", length=10).shape == (2, 15)
        with pytest.raises(OutOfMemory, match="2 x 11 = 22 tokens"):
            generated("mamba", model, "dynamic", length=11)
