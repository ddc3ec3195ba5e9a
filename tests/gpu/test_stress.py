"""A thousand forward passes with random delays of copies and decodes: the plain model's bits every time."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from support.budgets import PIECE, every, placed
from support.checkpoints import checkpoint
from support.gpu import needs_cuda
from support.models import assert_same_bits, inputs, torch

import tpde
from tpde.errors import Corrupt
from tpde.nn import packed_modules
from tpde.nn.routing import fused
from tpde.streaming.experts import expert_room

pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")
pytest.importorskip("cuda.core", reason="needs cuda-core")
pytestmark = [
    needs_cuda,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]  # memory that cannot be locked

FORWARDS = 1000
DELAYED = 0.3  # of all copies, and of all decodes
SHORT, LONG = 200_000, 20_000_000  # cycles, at most; a delay that must show has to outlast the host
SLOTS = 3  # llama's pieces are four: with as many slots, each would always hold the same piece
PLACES = 3  # of the cache of experts, which are more


def _delay(device: Any, draw: random.Random, without: str) -> None:
    """Let a device be late at random, or never wait for one of its two events."""
    copy, decode = device.copy, device.decode
    longest = LONG if without else SHORT

    def late_copy(*args: Any) -> Any:
        if draw.random() < DELAYED:
            with torch.cuda.stream(device._copies):
                torch.cuda._sleep(draw.randrange(longest))
        return copy(*args)

    def late_decode(handle: Any, number: int, place: int, out: Any, copied: Any) -> Any:
        if without == "copied":
            copied = torch.cuda.Event()  # was never recorded: nobody waits for it
        if draw.random() < DELAYED:
            torch.cuda._sleep(draw.randrange(longest))
        return decode(handle, number, place, out, copied)

    device.copy, device.decode = late_copy, late_decode
    if without == "hold":
        device.hold = lambda event: None


def _small(name: str, packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans with few slots, and few places for experts."""
    fields: dict[str, Any] = {}
    if name == "mixtral":
        with pytest.MonkeyPatch.context() as first:
            placed(first, every("host"))
            model: Any = tpde.from_pretrained(packed, vram="1GiB", max_tokens=256)
        size = PLACES * max(expert_room(fused(it), PIECE) for _, it in packed_modules(model) if fused(it))
        model.tpde_streamer.close()
        fields = {"parts": {"experts": size}, "vram": size}
    placed(monkeypatch, every("host"), slots=SLOTS, **fields)


def stress(
    name: str, host: str, folder: Path, monkeypatch: pytest.MonkeyPatch, forwards: int, without: str = ""
) -> int:
    """How many forward passes had other logits than the plain model's, or found damage."""
    pair = checkpoint(folder, name)
    plain = pair.kind.from_pretrained(pair.plain).to("cuda")
    monkeypatch.setenv("TPDE_HOST_MEMORY", host)
    _small(name, pair.packed, monkeypatch)
    model: Any = tpde.from_pretrained(pair.packed, vram="1GiB", max_tokens=256)
    draw, streaming = random.Random(0), model.tpde_streamer
    took = [inputs(name, 1, length, "cuda") for length in (1, 5)]
    with torch.no_grad():
        expected = [plain(**it, use_cache=False).logits for it in took]
        for it, wanted in zip(took, expected, strict=True):
            assert_same_bits(model(**it, use_cache=False).logits, wanted)  # first uses wait for everything
        devices = [it.device for it in (*streaming.streamers.values(), *streaming.experts.values())]
        assert len(devices) == (2 if name == "mixtral" else 1)
        for device in devices:
            _delay(device, draw, without)
        wrong, damaged = torch.zeros((), dtype=torch.int64, device="cuda"), 0
        for turn in range(forwards):
            try:
                logits = model(**took[turn % 2], use_cache=False).logits
            except Corrupt:
                damaged += 1
                continue
            wrong += (logits.view(torch.int16) != expected[turn % 2].view(torch.int16)).any()
        found = int(wrong) + damaged
    if not without:
        (stats,) = streaming.stats().values()
        assert stats["copied_pieces"] > forwards
        if name == "mixtral":
            assert stats["expert_misses"] > forwards, "experts that were evicted come again"
        streaming.close()
        return found
    try:
        streaming.close()
    except Corrupt:
        found += 1
    return found


@pytest.mark.parametrize("host", ["mapped", "arena"])
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_delays_change_nothing(name: str, host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert stress(name, host, tmp_path, monkeypatch, FORWARDS) == 0


@pytest.mark.parametrize("event", ["hold", "copied"])
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_without_an_event_the_bits_are_wrong(
    name: str, event: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stress test would notice if either wait were missing."""
    assert stress(name, "arena", tmp_path, monkeypatch, 50, without=event) > 0
