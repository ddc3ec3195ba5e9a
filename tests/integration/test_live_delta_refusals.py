"""Deltas of live tensors are refused whole: by the name of a tensor, with nothing written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.live_tensors import bits_of, small_module, torch

import tpde
from tpde.errors import Corrupt, InvalidInput, MissingBase, TpdeError, Truncated
from tpde.store.diffing import diff
from tpde.torch import save_file


def _another(old: dict[str, Any]) -> None:
    old["b"][5] += 1


def _missing(old: dict[str, Any]) -> None:
    del old["b"]


def _reshaped(old: dict[str, Any]) -> None:
    old["b"] = old["b"].reshape(-1, 1)


def _cast(old: dict[str, Any]) -> None:
    old["b"] = old["b"].to(torch.float64)


@pytest.mark.parametrize("change", [_another, _missing, _reshaped, _cast])
def test_another_base_is_refused_by_name_and_left_alone(change: Callable[[dict[str, Any]], None]) -> None:
    old = {"a": torch.randn(500), "b": torch.randn(600), "c": torch.randn(700)}
    delta = tpde.make_delta(old, {name: torch.where(it > 1.5, it + 1, it) for name, it in old.items()})
    change(old)
    before = bits_of(old)
    with pytest.raises(MissingBase, match="`b`") as found:
        tpde.apply_delta(old, delta)
    assert found.value.where == "b"
    assert "load the weights" in str(found.value.hint)  # there is no file to name
    assert bits_of(old) == before


def test_damage_is_found_before_anything_is_written() -> None:
    old = {name: torch.randn(300) for name in "abc"}
    delta = tpde.make_delta(old, {name: torch.where(it > 1, it * 2, it) for name, it in old.items()})
    before = bits_of(old)
    for at in range(0, len(delta), 7):
        bad = bytearray(delta)
        bad[at] ^= 0x10
        with pytest.raises(TpdeError):
            tpde.apply_delta(old, bytes(bad))
        assert bits_of(old) == before
    for end in range(0, len(delta), 11):
        with pytest.raises((Truncated, Corrupt, InvalidInput)):
            tpde.apply_delta(old, delta[:end])
        assert bits_of(old) == before


@pytest.mark.parametrize(
    "view",
    [
        torch.zeros(1).expand(5),
        torch.zeros(3, 1).expand(3, 4),
        torch.zeros(101).unfold(0, 2, 1),
        torch.zeros(9, 11).unfold(0, 3, 2),
        torch.zeros(20).as_strided((4, 4), (1, 3)),
    ],
)
def test_what_cannot_be_written_is_refused_before_anything_is(view: Any) -> None:
    old = {"a": torch.randn(5), "b": view}
    delta = tpde.make_delta(old, {"a": old["a"] + 1, "b": torch.rand(view.shape)})
    before = bits_of(old)
    with pytest.raises(InvalidInput, match="`b` is a view"):
        tpde.apply_delta(old, delta)
    assert bits_of(old) == before


@pytest.mark.parametrize(
    "view",
    [
        torch.zeros(9, 11).T,
        torch.zeros(9, 11)[::2, 1::3],
        torch.zeros(9, 11)[:, :1],
        torch.zeros(4, 5, 6).permute(2, 0, 1)[1::2],
        torch.zeros(4, 5, 6)[:, None, ::4].transpose(0, 2),
        torch.zeros(9, 11).diagonal(),
        torch.zeros(12).unfold(0, 3, 3)[:, ::2],
        torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.zeros(3, 0, 2).transpose(0, 2),
    ],
)
def test_every_other_view_is_written(view: Any) -> None:
    new = {"b": torch.rand(view.shape)}
    tpde.apply_delta({"b": view}, tpde.make_delta({"b": view}, new))
    assert bits_of({"b": view}) == bits_of(new)


@pytest.mark.parametrize("kind", ["weights", "empty", "folder"])
def test_a_file_that_is_no_delta_is_none_and_not_damaged(kind: str, tmp_path: Path) -> None:
    path, model = tmp_path / "z.st", small_module()
    if kind == "folder":
        path.mkdir()
    elif kind == "empty":
        path.touch()
    else:
        save_file({"w": torch.ones(500)}, path)
    packed = tpde.pack_module(small_module(), min_bytes=1)
    for use in (
        lambda: tpde.apply_delta(model, path),
        lambda: tpde.apply_delta(packed, path),
        lambda: tpde.nn.add_deltas(packed, {"a": path}),
        lambda: tpde.patch(path, path, tmp_path / "out"),
    ):
        with pytest.raises(InvalidInput, match=r"` is no delta; name a file that `tpde diff` wrote$"):
            use()


@pytest.mark.parametrize("name", [5, None, "\ud800", "__metadata__"])
def test_names_that_no_file_has_are_refused(name: Any) -> None:
    with pytest.raises(InvalidInput, match="no reader would open the file"):
        tpde.make_delta({name: torch.zeros(3)}, {name: torch.ones(3)})


def test_one_memory_has_no_two_states() -> None:
    model = small_module()
    with pytest.raises(InvalidInput, match="have the same memory, such as that of"):
        tpde.make_delta(model.state_dict(), model)


def test_packed_models_are_refused_by_name() -> None:
    packed = tpde.pack_module(small_module(), min_bytes=1)
    with pytest.raises(InvalidInput, match=r"unpack_module") as found:
        tpde.make_delta(small_module(), packed)
    assert "weight" in str(found.value.where)


@pytest.mark.parametrize("state", [None, 3, ["a"], {"a": np.zeros(3)}, {"a": 3}])
def test_what_holds_no_tensors_is_refused(state: Any) -> None:
    with pytest.raises(InvalidInput):
        tpde.make_delta({"a": torch.zeros(3)}, state)


def test_directories_with_a_tensor_twice_have_no_live_state(tmp_path: Path) -> None:
    for step in (0, 1):
        for part in ("one", "two"):
            folder = tmp_path / str(step) / part
            folder.mkdir(parents=True)
            save_file({"w": torch.full((500,), step + 0.5)}, folder / "model.safetensors")
    diff(tmp_path / "0", tmp_path / "1", tmp_path / "delta")
    with pytest.raises(InvalidInput, match="in two files"):
        tpde.apply_delta({"w": torch.full((500,), 0.5)}, tmp_path / "delta")


@pytest.mark.parametrize("view", ["conjugated", "negative"])
def test_a_view_that_changes_what_it_reads_is_not_written(view: str) -> None:
    """What lies in memory is not what it shows."""
    whole = torch.randn(40, dtype=torch.complex64)
    old = {"a": whole.conj() if view == "conjugated" else whole.conj().imag}
    assert (old["a"].is_conj(), old["a"].is_neg()) == (view == "conjugated", view == "negative")
    delta = tpde.make_delta(old, {"a": old["a"].clone() * 2})
    before = bits_of({"a": whole})
    with pytest.raises(InvalidInput, match="`a` is a view that cannot be written") as caught:
        tpde.apply_delta(old, delta)
    assert caught.value.where == "a"
    assert bits_of({"a": whole}) == before


def test_a_tensor_that_repeats_its_bytes_beyond_the_bound_has_no_delta() -> None:
    small, large = torch.zeros(1, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8).expand(1 << 40)
    for old, new in (({"a": large}, {"a": small}), ({"a": small}, {"a": large})):
        with pytest.raises(InvalidInput, match="`a` repeats"):
            tpde.make_delta(old, new)


def test_a_subclass_of_tensors_has_no_plain_bytes() -> None:
    class Mine(torch.Tensor):
        pass

    with pytest.raises(InvalidInput, match="`a` is a Mine") as caught:
        tpde.make_delta({"a": torch.zeros(3)}, {"a": torch.zeros(3).as_subclass(Mine)})
    assert caught.value.where == "a"
