"""Deltas of live tensors: made from memory, applied where tensors lie, whole or not at all."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tpde
from tpde.errors import Corrupt, InvalidInput, MissingBase, NotSafetensors, TpdeError, Truncated
from tpde.format.container import TensorSpec
from tpde.frameworks import to_torch, torch_bytes, torch_dtype_name
from tpde.io.sources import FileSource
from tpde.store import live_update
from tpde.store.diffing import diff
from tpde.torch import load_file, save, save_file

torch = pytest.importorskip("torch", reason="live tensors are PyTorch's")

DTYPES = ("bool", "uint8", "int64", "float16", "bfloat16", "float32", "float64", "complex64", "float8_e4m3fn")


def _bits(state: Any) -> dict[str, bytes]:
    found = state.state_dict() if isinstance(state, torch.nn.Module) else state
    return {name: torch_bytes(it).tobytes() for name, it in found.items()}


def _clones(state: dict[str, Any]) -> dict[str, Any]:
    return {name: it.clone() for name, it in state.items()}


def _model(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.BatchNorm1d(96), torch.nn.Linear(96, 8)).to(
        torch.bfloat16
    )


def _train(model: Any) -> None:
    """Change a few weights by little, some tensors as a whole, and others not at all."""
    with torch.no_grad():
        first, last = model[0].weight, model[2].weight
        bits = first.view(torch.int16)
        bits.view(-1)[::37] += 1
        last.normal_()
        model[1].num_batches_tracked.add_(3)


@pytest.mark.parametrize("fast", [False, True], ids=["classes", "fast"])
def test_a_module_becomes_the_target(fast: bool) -> None:
    model, old = _model(), _model()
    _train(model)
    delta = tpde.make_delta(old, model, fast=fast)
    places = {name: it.data_ptr() for name, it in old.state_dict().items()}
    assert tpde.apply_delta(old, delta) == 3
    assert _bits(old) == _bits(model)
    assert {name: it.data_ptr() for name, it in old.state_dict().items()} == places
    assert all(it.requires_grad for it in old.parameters())


def test_applied_twice_it_changes_nothing() -> None:
    model, old = _model(), _model()
    _train(model)
    delta = tpde.make_delta(old, model)
    tpde.apply_delta(old, delta)
    assert tpde.apply_delta(old, delta) == 0
    assert _bits(old) == _bits(model)


@pytest.mark.parametrize("moment", range(3))
def test_what_was_interrupted_is_completed(moment: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, old = _model(), _model()
    _train(model)
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
    assert _bits(old) == _bits(model)


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
    assert _bits(old) == _bits(new)
    assert [(it.data_ptr(), it.stride()) for it in old.values()] == places
    around[:, 3:9] = new["part"]
    assert torch.equal(old["part"]._base, around)


def test_a_part_of_a_model_is_updated_alone() -> None:
    model, old = _model(), _model()
    _train(model)
    part = {"0.weight": model[0].weight}
    before = _bits(old)
    assert tpde.apply_delta(old, tpde.make_delta(old, part)) == 1
    assert _bits(old) == before | {"0.weight": _bits(model)["0.weight"]}


def test_from_a_file_that_holds_the_old_state(tmp_path: Path) -> None:
    model, old = _model(), _model()
    save_file(old.state_dict(), tmp_path / "old.safetensors")
    _train(model)
    assert tpde.apply_delta(old, tpde.make_delta(tmp_path / "old.safetensors", model)) == 3
    assert _bits(old) == _bits(model)


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
    model, old = _model(), _model()
    _train(model)
    save_file(old.state_dict(), tmp_path / "old.safetensors")
    save_file(model.state_dict(), tmp_path / "new.safetensors")
    (tmp_path / "made").write_bytes(tpde.make_delta(tmp_path / "old.safetensors", model))
    tpde.patch(tmp_path / "old.safetensors", tmp_path / "made", tmp_path / "out.safetensors")
    assert _bits(load_file(tmp_path / "out.safetensors")) == _bits(model)
    diff(tmp_path / "old.safetensors", tmp_path / "new.safetensors", tmp_path / "delta")
    assert tpde.apply_delta(old, tmp_path / "delta") == 3
    assert _bits(old) == _bits(model)


def test_tied_tensors_stay_tied() -> None:
    shared = torch.randn(30, 20)
    old = {"embed": shared, "head": shared}
    new = {"embed": shared + 1, "head": shared + 1}
    delta = tpde.make_delta(_clones(old), new)
    tpde.apply_delta(old, delta)
    assert old["embed"] is old["head"]
    assert _bits(old) == _bits(new)
    apart = tpde.make_delta(_clones(old), {"embed": shared + 1, "head": shared + 2})
    before = _bits(old)
    with pytest.raises(InvalidInput, match="shares memory"):
        tpde.apply_delta(old, apart)
    assert _bits(old) == before


def _buffer() -> dict[str, Any]:
    """Give views of one memory: all of it, its start, columns beside each other."""
    torch.manual_seed(0)
    whole = torch.randn(20, 30)
    return {"whole": whole, "start": whole[:5], "left": whole[:, :10], "right": whole[:, 10:]}


def test_views_of_one_memory() -> None:
    old, new = _buffer(), _buffer()
    new["whole"][2, 3:20] += 1
    assert tpde.apply_delta(old, tpde.make_delta(_buffer(), new)) == 4
    assert _bits(old) == _bits(new)
    apart = _clones(new)
    apart["start"][0, 0] += 1
    delta = tpde.make_delta(new, apart)
    with pytest.raises(InvalidInput, match="shares memory"):
        tpde.apply_delta(old, delta)
    assert _bits(old) == _bits(new)


def test_inference_tensors_and_autograd() -> None:
    with torch.inference_mode():
        old = {"w": torch.randn(100)}
    new = {"w": old["w"].clone() * 2}
    tpde.apply_delta(old, tpde.make_delta(old, new))
    assert _bits(old) == _bits(new)
    weight = torch.nn.Parameter(torch.randn(10))
    loss = (weight**2).sum()
    tpde.apply_delta({"w": weight}, tpde.make_delta({"w": weight}, {"w": weight.detach() + 1}))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


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
    before = _bits(old)
    with pytest.raises(MissingBase, match="`b`") as found:
        tpde.apply_delta(old, delta)
    assert found.value.where == "b"
    assert "load the weights" in str(found.value.hint)  # there is no file to name
    assert _bits(old) == before


def test_damage_is_found_before_anything_is_written() -> None:
    old = {name: torch.randn(300) for name in "abc"}
    delta = tpde.make_delta(old, {name: torch.where(it > 1, it * 2, it) for name, it in old.items()})
    before = _bits(old)
    for at in range(0, len(delta), 7):
        bad = bytearray(delta)
        bad[at] ^= 0x10
        with pytest.raises(TpdeError):
            tpde.apply_delta(old, bytes(bad))
        assert _bits(old) == before
    for end in range(0, len(delta), 11):
        with pytest.raises((Truncated, Corrupt, InvalidInput)):
            tpde.apply_delta(old, delta[:end])
        assert _bits(old) == before


def test_what_cannot_be_written_is_refused_before_anything_is() -> None:
    old = {"a": torch.randn(5), "b": torch.zeros(1).expand(5)}
    delta = tpde.make_delta(old, {"a": old["a"] + 1, "b": torch.ones(5)})
    before = _bits(old)
    with pytest.raises(InvalidInput, match="`b` is a view"):
        tpde.apply_delta(old, delta)
    assert _bits(old) == before


def test_one_memory_has_no_two_states() -> None:
    model = _model()
    with pytest.raises(InvalidInput, match="are the same tensors"):
        tpde.make_delta(model.state_dict(), model)


def test_packed_models_are_refused_by_name() -> None:
    packed = tpde.pack_module(_model(), min_bytes=1)
    with pytest.raises(InvalidInput, match=r"unpack_module") as found:
        tpde.make_delta(_model(), packed)
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
    before = _bits({"a": whole})
    with pytest.raises(InvalidInput, match="`a` is a view that cannot be written") as caught:
        tpde.apply_delta(old, delta)
    assert caught.value.where == "a"
    assert _bits({"a": whole}) == before


def test_a_view_of_one_element_repeats_nothing() -> None:
    old = {"a": torch.zeros(4)[:1].expand(1, 1), "b": torch.zeros(1, 3).as_strided((1, 3), (0, 1))}
    new = {name: torch.ones_like(it) for name, it in old.items()}
    assert tpde.apply_delta(old, tpde.make_delta(_clones(old), new)) == 2
    assert _bits(old) == _bits(new)


def test_one_tensor_of_its_own_memory_makes_two_states() -> None:
    """Only where all are the same would nothing have changed; tensors without elements have no place."""
    shared, empty = torch.randn(50), torch.empty(0)
    old = {"a": shared, "b": torch.randn(50), "none": empty}
    new = {"a": shared, "b": old["b"] + 1, "none": empty, "new": shared}
    delta = tpde.make_delta(old, new)
    assert tpde.apply_delta(_clones(old) | {"new": shared.clone() + 1}, delta) == 2
    assert tpde.apply_delta({"none": empty}, tpde.make_delta({"none": empty}, {"none": empty})) == 0
    assert tpde.make_delta({"x": shared}, {"y": shared})
    with pytest.raises(InvalidInput, match="such as `a`") as caught:
        tpde.make_delta(old, {"a": shared, "none": empty})
    assert caught.value.where == "a"


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_a_delta_in_memory_may_be_any_bytes(kind: Any) -> None:
    old, new = {"a": torch.zeros(70)}, {"a": torch.ones(70)}
    assert tpde.apply_delta(old, kind(tpde.make_delta(_clones(old), new))) == 1
    assert _bits(old) == _bits(new)


def test_progress_counts_every_tensor_once() -> None:
    old, new = {"a": torch.zeros(70), "b": torch.zeros(30)}, {"a": torch.ones(70), "b": torch.zeros(30)}
    done: list[int] = []
    delta = tpde.make_delta(old, new, progress=done.append)
    assert sum(done) == 400
    done.clear()
    assert tpde.apply_delta(old, delta, progress=done.append) == 1
    assert sum(done) == 400


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


# ---- what is checked ----


def _weights(words: int = 200_000) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """A state, what becomes of it, and the delta in the fast mode."""
    torch.manual_seed(3)
    old = {"w": torch.randn(words).to(torch.bfloat16), "same": torch.randn(500), "dense": torch.randn(900)}
    new = _clones(old)
    new["w"].view(torch.int16)[5::300] += 1
    new["dense"] += 1
    return old, new, tpde.make_delta(old, new, fast=True)


def test_with_changed_alone_tensors_stay_where_they_are() -> None:
    old, new, delta = _weights()
    place, version = old["w"].data_ptr(), old["w"]._version
    assert tpde.apply_delta(old, delta, check="changed") == 2
    assert _bits(old) == _bits(new)
    assert old["w"].data_ptr() == place
    assert old["w"]._version > version


def test_with_changed_alone_it_may_be_applied_twice() -> None:
    old, new, delta = _weights()
    tpde.apply_delta(old, delta, check="changed")
    assert tpde.apply_delta(old, delta, check="changed") == 0
    assert _bits(old) == _bits(new)


@pytest.mark.parametrize("place", [5, 305, 199_805], ids=["first", "second", "last"])
def test_with_changed_alone_another_base_is_seen_where_it_changes(place: int) -> None:
    old, _, delta = _weights()
    old["w"].view(torch.int16)[place] ^= 1
    before = _bits(old)
    with pytest.raises(MissingBase, match="`w`"):
        tpde.apply_delta(old, delta, check="changed")
    assert _bits(old) == before


def test_with_changed_alone_what_differs_elsewhere_stays() -> None:
    old, new, delta = _weights()
    old["w"].view(torch.int16)[100] ^= 1
    new["w"].view(torch.int16)[100] ^= 1
    old["same"][7] = new["same"][7] = 5
    tpde.apply_delta(old, delta, check="changed")
    assert _bits(old) == _bits(new)


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
        delta = tpde.make_delta(_clones(old), new, fast=True)
    elif how == "classes":
        delta = tpde.make_delta(old, new)
    else:
        with torch.inference_mode():
            old = _clones(old)
    tpde.apply_delta(old, delta, check="changed")
    assert _bits(old) == _bits(new)


def test_with_changed_alone_a_damaged_delta_changes_nothing() -> None:
    old, _, delta = _weights()
    before = _bits(old)
    for at in range(64, len(delta), 97):
        damaged = bytearray(delta)
        damaged[at] ^= 0x10
        with pytest.raises(TpdeError):
            tpde.apply_delta(old, bytes(damaged), check="changed")
        assert _bits(old) == before


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
    before, new = _clones(old), _clones(old)
    base[7::301] += 1
    for name, (begin, end) in spans.items():
        new[name].view(torch.int16).copy_(base[begin:end])
    tpde.apply_delta(old, tpde.make_delta(before, new, fast=True), check="changed")
    assert _bits(old) == _bits(new)


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
        assert _bits(old) == _bits(new)
        assert len(errors) < 3
