"""Deltas of live tensors: made from memory, and applied where tensors lie."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.live_tensors import bits_of, clones, small_module, torch, train

import tpde
from tpde.errors import InvalidInput, MissingBase, NotSafetensors
from tpde.format.container import TensorSpec
from tpde.frameworks import to_torch, torch_bytes, torch_dtype_name
from tpde.io.sources import FileSource
from tpde.store import live_update
from tpde.store.diffing import diff
from tpde.torch import load_file, save, save_file

DTYPES = ("bool", "uint8", "int64", "float16", "bfloat16", "float32", "float64", "complex64", "float8_e4m3fn")


@pytest.mark.parametrize("fast", [False, True], ids=["classes", "fast"])
def test_a_module_becomes_the_target(fast: bool) -> None:
    model, old = small_module(), small_module()
    train(model)
    delta = tpde.make_delta(old, model, fast=fast)
    places = {name: it.data_ptr() for name, it in old.state_dict().items()}
    assert tpde.apply_delta(old, delta) == 3
    assert bits_of(old) == bits_of(model)
    assert {name: it.data_ptr() for name, it in old.state_dict().items()} == places
    assert all(it.requires_grad for it in old.parameters())


def test_applied_twice_it_changes_nothing() -> None:
    model, old = small_module(), small_module()
    train(model)
    delta = tpde.make_delta(old, model)
    tpde.apply_delta(old, delta)
    assert tpde.apply_delta(old, delta) == 0
    assert bits_of(old) == bits_of(model)


@pytest.mark.parametrize("moment", range(3))
def test_what_was_interrupted_is_completed(moment: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, old = small_module(), small_module()
    train(model)
    delta = tpde.make_delta(old, model)
    written, write = [], live_update.write_change

    def interrupted(tensor: Any, it: Any) -> None:
        if len(written) == moment:
            raise KeyboardInterrupt
        written.append(it.entry.name)
        write(tensor, it)

    monkeypatch.setattr(live_update, "write_change", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tpde.apply_delta(old, delta)
    monkeypatch.undo()
    assert tpde.apply_delta(old, delta) == 3 - moment
    assert bits_of(old) == bits_of(model)


@settings(deadline=None, max_examples=60)
@given(data=st.data(), dtype=st.sampled_from(DTYPES), size=st.integers(0, 400), fast=st.booleans())
def test_every_dtype_and_every_bit(data: st.DataObject, dtype: str, size: int, fast: bool) -> None:
    spec = TensorSpec(torch_dtype_name(getattr(torch, dtype)), (size,))
    nbytes = spec.nbytes
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    old = rng.integers(0, 256, nbytes, dtype=np.uint8)
    new = np.where(rng.random(nbytes) < data.draw(st.sampled_from([0.0, 0.01, 0.5, 1.0])), ~old, old)
    made = [{"w": to_torch(it.copy(), spec)} for it in (old, new)]
    tpde.apply_delta(made[0], tpde.make_delta(*made, fast=fast))
    assert torch_bytes(made[0]["w"]).tobytes() == new.tobytes()


def test_views_are_changed_where_they_lie() -> None:
    old = {"t": torch.randn(40, 30).T, "part": torch.randn(50, 20)[:, 3:9], "scalar": torch.tensor(1.5)}
    new = {name: it.clone() + 0.25 for name, it in old.items()}
    around = old["part"]._base.clone()
    delta = tpde.make_delta(old, new)
    places = [(it.data_ptr(), it.stride()) for it in old.values()]
    assert tpde.apply_delta(old, delta) == 3
    assert bits_of(old) == bits_of(new)
    assert [(it.data_ptr(), it.stride()) for it in old.values()] == places
    around[:, 3:9] = new["part"]
    assert torch.equal(old["part"]._base, around)


def test_a_part_of_a_model_is_updated_alone() -> None:
    model, old = small_module(), small_module()
    train(model)
    part = {"0.weight": model[0].weight}
    before = bits_of(old)
    assert tpde.apply_delta(old, tpde.make_delta(old, part)) == 1
    assert bits_of(old) == before | {"0.weight": bits_of(model)["0.weight"]}


def test_from_a_file_that_holds_the_old_state(tmp_path: Path) -> None:
    model, old = small_module(), small_module()
    save_file(old.state_dict(), tmp_path / "old.safetensors")
    train(model)
    assert tpde.apply_delta(old, tpde.make_delta(tmp_path / "old.safetensors", model)) == 3
    assert bits_of(old) == bits_of(model)


def test_from_bytes_that_hold_the_old_state() -> None:
    """A snapshot in memory, in its small form."""
    draw = torch.Generator().manual_seed(3)
    old = {"w": (0.02 * torch.randn(200, 300, generator=draw)).bfloat16(), "b": torch.ones(7)}
    new = {name: it.clone() for name, it in old.items()}
    new["w"].view(-1)[::900] *= 1.01
    snapshot = save(old)
    assert len(snapshot) < 0.8 * 200 * 300 * 2
    made = tpde.make_delta(snapshot, new)
    assert made == tpde.make_delta(old, new)
    assert tpde.apply_delta(old, made) == 1
    assert torch.equal(old["w"].view(torch.int16), new["w"].view(torch.int16))
    with pytest.raises(NotSafetensors, match="<bytes>"):
        tpde.make_delta(b"no file at all", new)


def test_deltas_of_files_and_of_memory_are_one_format(tmp_path: Path) -> None:
    model, old = small_module(), small_module()
    train(model)
    save_file(old.state_dict(), tmp_path / "old.safetensors")
    save_file(model.state_dict(), tmp_path / "new.safetensors")
    (tmp_path / "made").write_bytes(tpde.make_delta(tmp_path / "old.safetensors", model))
    tpde.patch(tmp_path / "old.safetensors", tmp_path / "made", tmp_path / "out.safetensors")
    assert bits_of(load_file(tmp_path / "out.safetensors")) == bits_of(model)
    diff(tmp_path / "old.safetensors", tmp_path / "new.safetensors", tmp_path / "delta")
    assert tpde.apply_delta(old, tmp_path / "delta") == 3
    assert bits_of(old) == bits_of(model)


def test_tied_tensors_stay_tied() -> None:
    shared = torch.randn(30, 20)
    old = {"embed": shared, "head": shared}
    new = {"embed": shared + 1, "head": shared + 1}
    delta = tpde.make_delta(clones(old), new)
    tpde.apply_delta(old, delta)
    assert old["embed"] is old["head"]
    assert bits_of(old) == bits_of(new)
    apart = tpde.make_delta(clones(old), {"embed": shared + 1, "head": shared + 2})
    before = bits_of(old)
    with pytest.raises(InvalidInput, match="shares memory"):
        tpde.apply_delta(old, apart)
    assert bits_of(old) == before


def _buffer() -> dict[str, Any]:
    """Give views of one memory: all of it, its start, columns beside each other."""
    torch.manual_seed(0)
    whole = torch.randn(20, 30)
    return {"whole": whole, "start": whole[:5], "left": whole[:, :10], "right": whole[:, 10:]}


def test_views_of_one_memory() -> None:
    old, new = _buffer(), _buffer()
    new["whole"][2, 3:20] += 1
    assert tpde.apply_delta(old, tpde.make_delta(_buffer(), new)) == 4
    assert bits_of(old) == bits_of(new)
    apart = clones(new)
    apart["start"][0, 0] += 1
    delta = tpde.make_delta(new, apart)
    with pytest.raises(InvalidInput, match="shares memory"):
        tpde.apply_delta(old, delta)
    assert bits_of(old) == bits_of(new)


@pytest.mark.parametrize("check", ["all", "changed"])
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("odd", [0, 1])
def test_memory_of_which_pytorch_has_several_storages(odd: int, fast: bool, check: Any) -> None:
    """Arrays and buffers that overlap: what fits is written, what would differ is refused."""
    data = np.zeros(8001, np.uint8)[odd : odd + 8000]
    data.view(np.float32)[:] = np.arange(2000)
    places = {"tail": (1000, 8000), "head": (0, 4000), "whole": (0, 8000), "other": (4002, 6002)}
    old = {
        name: torch.from_numpy(data[begin:end]).view(torch.float32) for name, (begin, end) in places.items()
    }
    new = clones(old)
    changed = data.copy()
    changed.view(np.float32)[::7] += 1
    for name, (begin, end) in places.items():
        new[name].view(torch.uint8).copy_(torch.from_numpy(changed[begin:end]))
    tpde.apply_delta(old, tpde.make_delta(clones(old), new, fast=fast), check=check)
    assert bits_of(old) == bits_of(new)
    for name, at in (("tail", 20), ("head", 900), ("whole", 1200), ("other", 7)):
        apart = clones(new)
        apart[name][at] += 1
        delta = tpde.make_delta(new, apart, fast=fast)
        with pytest.raises(InvalidInput, match="shares memory"):
            tpde.apply_delta(old, delta, check=check)
        assert bits_of(old) == bits_of(new)


def test_views_of_one_memory_under_another_default_device() -> None:
    old, new = _buffer(), _buffer()
    new["whole"][2, 3:20] += 1
    delta = tpde.make_delta(_buffer(), new)
    with torch.device("meta"):
        assert tpde.apply_delta(old, delta) == 4
    assert bits_of(old) == bits_of(new)


def test_inference_tensors_and_autograd() -> None:
    with torch.inference_mode():
        old = {"w": torch.randn(100)}
    new = {"w": old["w"].clone() * 2}
    tpde.apply_delta(old, tpde.make_delta(old, new))
    assert bits_of(old) == bits_of(new)
    weight = torch.nn.Parameter(torch.randn(10))
    loss = (weight**2).sum()
    tpde.apply_delta({"w": weight}, tpde.make_delta({"w": weight}, {"w": weight.detach() + 1}))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_view_of_one_element_repeats_nothing() -> None:
    old = {"a": torch.zeros(4)[:1].expand(1, 1), "b": torch.zeros(1, 3).as_strided((1, 3), (0, 1))}
    new = {name: torch.ones_like(it) for name, it in old.items()}
    assert tpde.apply_delta(old, tpde.make_delta(clones(old), new)) == 2
    assert bits_of(old) == bits_of(new)


def test_one_tensor_of_its_own_memory_makes_two_states() -> None:
    """Only where all are the same would nothing have changed; tensors without elements have no place."""
    shared, empty = torch.randn(50), torch.empty(0)
    old = {"a": shared, "b": torch.randn(50), "none": empty}
    new = {"a": shared, "b": old["b"] + 1, "none": empty, "new": shared}
    delta = tpde.make_delta(old, new)
    assert tpde.apply_delta(clones(old) | {"new": shared.clone() + 1}, delta) == 2
    assert tpde.apply_delta({"none": empty}, tpde.make_delta({"none": empty}, {"none": empty})) == 0
    assert tpde.make_delta({"x": shared}, {"y": shared})
    with pytest.raises(InvalidInput, match="such as that of `a`") as caught:
        tpde.make_delta(old, {"a": shared, "none": empty})
    assert caught.value.where == "a"


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_a_delta_in_memory_may_be_any_bytes(kind: Any) -> None:
    old, new = {"a": torch.zeros(70)}, {"a": torch.ones(70)}
    assert tpde.apply_delta(old, kind(tpde.make_delta(clones(old), new))) == 1
    assert bits_of(old) == bits_of(new)


def test_progress_counts_every_tensor_once() -> None:
    old, new = {"a": torch.zeros(70), "b": torch.zeros(30)}, {"a": torch.ones(70), "b": torch.zeros(30)}
    done: list[int] = []
    delta = tpde.make_delta(old, new, progress=done.append)
    assert sum(done) == 400
    done.clear()
    assert tpde.apply_delta(old, delta, progress=done.append) == 1
    assert sum(done) == 400


def test_a_delta_of_more_than_weights_is_applied_to_the_weights(tmp_path: Path) -> None:
    """And its file is closed."""
    for step in (0, 1):
        (tmp_path / str(step)).mkdir()
        save_file({"w": torch.full((500,), step + 0.5)}, tmp_path / str(step) / "model.safetensors")
        (tmp_path / str(step) / "config.json").write_text(f"{step}")
    diff(tmp_path / "0", tmp_path / "1", tmp_path / "delta")
    old = {"w": torch.full((500,), 0.5)}
    assert tpde.apply_delta(old, tmp_path / "delta") == 1
    assert torch.equal(old["w"], torch.full((500,), 1.5))


@pytest.mark.parametrize("failing", [False, True])
def test_files_of_deltas_and_bases_are_closed(
    failing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unclosed: list[str] = []

    def check(self: Any) -> None:
        if getattr(self, "_fd", -1) >= 0:
            unclosed.append(self.name)
        self.close()

    monkeypatch.setattr(FileSource, "__del__", check)
    old, new = {"w": torch.zeros(300)}, {"w": torch.ones(300)}
    save_file(old, tmp_path / "old")
    delta = tpde.make_delta(tmp_path / "old", new)
    (tmp_path / "delta").write_bytes(delta)
    if failing:
        with pytest.raises(MissingBase):
            tpde.apply_delta({}, tmp_path / "delta")
        with pytest.raises(RuntimeError, match="mine"):
            tpde.make_delta(tmp_path / "old", new, progress=_raise)
    else:
        assert tpde.apply_delta(old, tmp_path / "delta") == 1
    gc.collect()
    assert unclosed == []


def _raise(_: int) -> None:
    raise RuntimeError("mine")


@pytest.mark.skipif(
    not torch.distributed.is_available() or sys.platform != "linux", reason="needs gloo, and files to meet at"
)
def test_a_replica_follows_a_trainer() -> None:
    example = Path(__file__).parents[2] / "examples" / "weight_sync.py"
    done = subprocess.run([sys.executable, example], capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    assert "the replica has the trainer's weights, bit for bit" in done.stdout
