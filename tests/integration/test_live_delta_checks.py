"""What `apply_delta` checks: all, or what changes alone."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from support.live_tensors import bits_of, clones, torch

import tpde
from tpde.errors import InvalidInput, MissingBase, TpdeError


def _weights(words: int = 200_000) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """A state, what becomes of it, and the delta in the fast mode."""
    torch.manual_seed(3)
    old = {"w": torch.randn(words).to(torch.bfloat16), "same": torch.randn(500), "dense": torch.randn(900)}
    new = clones(old)
    new["w"].view(torch.int16)[5::300] += 1
    new["dense"] += 1
    return old, new, tpde.make_delta(old, new, fast=True)


def test_with_changed_alone_tensors_stay_where_they_are() -> None:
    old, new, delta = _weights()
    place, version = old["w"].data_ptr(), old["w"]._version
    assert tpde.apply_delta(old, delta, check="changed") == 2
    assert bits_of(old) == bits_of(new)
    assert old["w"].data_ptr() == place
    assert old["w"]._version > version


def test_with_changed_alone_it_may_be_applied_twice() -> None:
    old, new, delta = _weights()
    tpde.apply_delta(old, delta, check="changed")
    assert tpde.apply_delta(old, delta, check="changed") == 0
    assert bits_of(old) == bits_of(new)


@pytest.mark.parametrize("place", [5, 305, 199_805], ids=["first", "second", "last"])
def test_with_changed_alone_another_base_is_seen_where_it_changes(place: int) -> None:
    old, _, delta = _weights()
    old["w"].view(torch.int16)[place] ^= 1
    before = bits_of(old)
    with pytest.raises(MissingBase, match="`w`"):
        tpde.apply_delta(old, delta, check="changed")
    assert bits_of(old) == before


def test_with_changed_alone_what_differs_elsewhere_stays() -> None:
    old, new, delta = _weights()
    old["w"].view(torch.int16)[100] ^= 1
    new["w"].view(torch.int16)[100] ^= 1
    old["same"][7] = new["same"][7] = 5
    tpde.apply_delta(old, delta, check="changed")
    assert bits_of(old) == bits_of(new)


@pytest.mark.parametrize("how", ["strided", "shared", "classes", "inference"])
def test_with_changed_alone_other_tensors_are_checked_as_ever(how: str) -> None:
    old, new, delta = _weights()
    if how == "strided":
        room = torch.zeros(400_000, dtype=torch.bfloat16)
        room[::2] = old["w"]
        old["w"] = room[::2]
    elif how == "shared":
        old["again"] = old["w"]
        new["again"] = new["w"]
        delta = tpde.make_delta(clones(old), new, fast=True)
    elif how == "classes":
        delta = tpde.make_delta(old, new)
    else:
        with torch.inference_mode():
            old = clones(old)
    tpde.apply_delta(old, delta, check="changed")
    assert bits_of(old) == bits_of(new)


def test_with_changed_alone_a_damaged_delta_changes_nothing() -> None:
    old, _, delta = _weights()
    before = bits_of(old)
    for at in range(64, len(delta), 97):
        damaged = bytearray(delta)
        damaged[at] ^= 0x10
        with pytest.raises(TpdeError):
            tpde.apply_delta(old, bytes(damaged), check="changed")
        assert bits_of(old) == before


def test_an_unknown_check_is_refused() -> None:
    old, _, delta = _weights()
    with pytest.raises(InvalidInput, match='"all" or "changed"'):
        tpde.apply_delta(old, delta, check="none")


@pytest.mark.parametrize("how", ["slices", "dlpack", "mapped"])
def test_with_changed_alone_words_in_two_tensors_move_once(how: str, tmp_path: Path) -> None:
    """Tensors of one memory, of which PyTorch does not know."""
    base = torch.randn(200_000).to(torch.bfloat16).view(torch.int16)
    if how == "slices":
        buffer = base.numpy().copy()
        spans = {"a": (0, 150_000), "b": (50_000, 200_000)}
        old = {name: torch.from_numpy(buffer[begin:end]) for name, (begin, end) in spans.items()}
    elif how == "dlpack":
        whole, spans = base.clone(), {"a": (0, 200_000), "b": (1000, 200_000)}
        old = {"a": whole, "b": torch.from_dlpack(whole[1000:])}
    else:
        path, spans = str(tmp_path / "shared"), dict.fromkeys("ab", (0, 200000))
        base.numpy().tofile(path)
        old = {
            name: torch.from_file(path, shared=True, size=base.numel(), dtype=torch.int16) for name in "ab"
        }
    old = {name: it.view(torch.bfloat16) for name, it in old.items()}
    before, new = clones(old), clones(old)
    base[7::301] += 1
    for name, (begin, end) in spans.items():
        new[name].view(torch.int16).copy_(base[begin:end])
    tpde.apply_delta(old, tpde.make_delta(before, new, fast=True), check="changed")
    assert bits_of(old) == bits_of(new)


def test_with_changed_alone_threads_may_apply_at_once() -> None:
    for _ in range(10):
        old, new, delta = _weights()
        start, errors = threading.Barrier(3), list[BaseException]()

        def apply(old: Any = old, delta: bytes = delta, start: Any = start, errors: Any = errors) -> None:
            start.wait()
            try:
                tpde.apply_delta(old, delta, check="changed")
            except MissingBase as error:  # it looked while the other wrote
                errors.append(error)

        threads = [threading.Thread(target=apply) for _ in range(3)]
        for it in threads:
            it.start()
        for it in threads:
            it.join()
        assert bits_of(old) == bits_of(new)
        assert len(errors) < 3
