"""Models saved and loaded in the manner of safetensors."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

import tpde  # noqa: E402
import tpde.numpy  # noqa: E402
import tpde.torch  # noqa: E402
from tpde.errors import InvalidArgument, InvalidInput, PackedWeight  # noqa: E402


class Tied(torch.nn.Module):
    """Two names for one weight, a part of another, and one that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(40, 32)
        self.head = torch.nn.Linear(32, 40, bias=False)
        self.head.weight = self.embed.weight
        self.turned = torch.nn.Parameter(torch.randn(32, 16).T)
        self.register_buffer("nothing", torch.empty(0))


def _bits(model: torch.nn.Module) -> dict[str, Any]:
    return {name: it.contiguous().numpy().tobytes() for name, it in model.state_dict().items()}


def test_models_are_saved_and_loaded_as_safetensors_does(tmp_path: Path) -> None:
    theirs = pytest.importorskip("safetensors.torch", reason="needs safetensors")
    model, other, third = Tied(), Tied(), Tied()
    tpde.torch.save_model(model, tmp_path / "ours", {"format": "pt"})
    theirs.save_model(model, str(tmp_path / "theirs"), {"format": "pt"})
    tpde.unpack(tmp_path / "ours", tmp_path / "plain")
    with tpde.safe_open(tmp_path / "plain") as ours, tpde.safe_open(tmp_path / "theirs") as plain:
        assert (sorted(ours.keys()), ours.metadata()) == (sorted(plain.keys()), plain.metadata())
    assert tpde.torch.load_model(other, tmp_path / "ours") == (set(), [])
    assert theirs.load_model(third, str(tmp_path / "plain")) == (set(), [])
    assert _bits(other) == _bits(third) == _bits(model)
    assert other.head.weight is other.embed.weight


def test_packed_models_are_saved_as_plain_ones(tmp_path: Path) -> None:
    model = Tied().to(torch.bfloat16)
    tpde.torch.save_model(model, tmp_path / "plain")
    tpde.pack_module(model, min_bytes=0)
    tpde.torch.save_model(model, tmp_path / "packed")
    assert (tmp_path / "plain").read_bytes() == (tmp_path / "packed").read_bytes()
    assert tpde.torch.load_model(model, tmp_path / "packed") == (set(), []), "the bits that it has"
    other = tpde.pack_module(Tied().to(torch.bfloat16), min_bytes=0)
    with pytest.raises(PackedWeight):
        tpde.torch.load_model(other, tmp_path / "packed")


def test_files_of_other_models_are_refused(tmp_path: Path) -> None:
    model, other = Tied(), torch.nn.Sequential(torch.nn.Linear(3, 3))
    tpde.torch.save_model(model, tmp_path / "tied")
    before = _bits(other)
    with pytest.raises(InvalidInput, match=r"it lacks 2 tensors, such as `0.bias`, `0.w.*model lacks 3"):
        tpde.torch.load_model(other, tmp_path / "tied")
    assert _bits(other) == before
    missing, unexpected = tpde.torch.load_model(other, tmp_path / "tied", strict=False)
    assert (missing, sorted(unexpected)) == ({"0.bias", "0.weight"}, ["embed.weight", "nothing", "turned"])
    wider = Tied()
    wider.turned = torch.nn.Parameter(torch.randn(16, 33))
    before = _bits(wider)
    with pytest.raises(InvalidInput, match=r"`turned` has the shape \[16, 32\].*\[16, 33\] in the model"):
        tpde.torch.load_model(wider, tmp_path / "tied", strict=False)
    assert _bits(wider) == before, "nothing of it was loaded"


def test_models_without_memory_are_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    tpde.torch.save_model(model, tmp_path / "x")
    with torch.device("meta"):
        other = torch.nn.Linear(4, 4)
    for strict in (True, False):
        with pytest.raises(InvalidInput, match="`weight` of the model is on the `meta` device"):
            tpde.torch.load_model(other, tmp_path / "x", strict)
    other.to_empty(device="cpu")
    assert tpde.torch.load_model(other, tmp_path / "x") == (set(), [])
    assert _bits(other) == _bits(model)


def test_tied_tensors_with_names_that_metadata_may_not_have_are_saved(tmp_path: Path) -> None:
    model, other = (
        torch.nn.ModuleDict({it: torch.nn.Linear(9, 9) for it in ("embed", "tpde", "tpdes")})
        for _ in range(2)
    )
    for it in (model, other):
        it["tpde"].weight = it["tpdes"].weight = it["embed"].weight
    tpde.torch.save_model(model, tmp_path / "x")
    with tpde.safe_open(tmp_path / "x") as file:
        assert (len(file.keys()), file.metadata()) == (4, {"tpdes.weight": "embed.weight"})
    assert tpde.torch.load_model(other, tmp_path / "x") == (set(), [])
    assert _bits(other) == _bits(model)


def test_tensors_of_models_that_are_not_contiguous(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="`turned` is not contiguous"):
        tpde.torch.save_model(Tied(), tmp_path / "x", force_contiguous=False)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("other", [torch.conj, lambda it: it.imag])
def test_buffers_that_are_read_otherwise_are_saved_apart(tmp_path: Path, other: Any) -> None:
    class Views(torch.nn.Module):
        def __init__(self, values: torch.Tensor) -> None:
            super().__init__()
            turned = other(values.conj()), other(values)
            for name, tensor in zip("abc", (*turned, turned[0]), strict=True):
                self.register_buffer(name, tensor)

    model, read = Views(torch.tensor([1 + 2j, 3 + 4j])), Views(torch.zeros(2, dtype=torch.complex64))
    tpde.torch.save_model(model, tmp_path / "x")
    assert sorted(tpde.torch.load_file(tmp_path / "x")) == ["a", "b"]
    assert tpde.torch.load_model(read, tmp_path / "x") == (set(), [])
    for name, tensor in model.named_buffers():
        assert torch.equal(read.get_buffer(name), tensor)


def test_models_that_never_ran_are_refused_by_the_name_of_a_tensor(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LazyLinear(2))
    with pytest.raises(InvalidInput, match=r"`1\.bias` is not initialized"):
        tpde.torch.save_model(model, tmp_path / "x")
    model(torch.zeros(1, 3))
    tpde.torch.save_model(model, tmp_path / "x")


def test_backends_of_safetensors_are_taken_and_others_refused(tmp_path: Path) -> None:
    from inspect import signature

    path, model = tmp_path / "x", torch.nn.Linear(3, 2)
    tpde.torch.save_model(model, path)
    loads: list[Any] = [
        tpde.torch.load_file,
        tpde.numpy.load_file,
        lambda *args, **options: tpde.torch.load_model(model, *args, **options),
        tpde.safe_open,
    ]
    for load in loads:
        for backend in ("mmap", "pread"):
            assert load(path, backend=backend)
        with pytest.raises(InvalidArgument, match="no backend `cpu`") as caught:
            load(path, backend="cpu")
        assert caught.value.where == "backend"
    stock = pytest.importorskip("safetensors.torch")
    import safetensors.numpy

    for theirs, ours in ((stock, tpde.torch), (safetensors.numpy, tpde.numpy)):
        for name in ("load_file", "load_model", "load", "save_file", "save_model", "save"):
            if hasattr(theirs, name):
                wanted, found = (signature(getattr(it, name)).parameters for it in (theirs, ours))
                assert set(wanted) <= set(found)


def _with_weight_norm() -> tuple[Any, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        old = torch.nn.utils.weight_norm(torch.nn.Linear(3, 4))
    return old, torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(3, 4))


def _without_a_count() -> tuple[Any, Any]:
    model = torch.nn.BatchNorm1d(4)
    model.num_batches_tracked = None
    return model, torch.nn.BatchNorm1d(4)


def _with_a_number_in_a_list() -> tuple[Any, Any]:
    models = torch.nn.Module(), torch.nn.Module()
    for model, value in zip(models, (torch.ones(1), torch.tensor(0.0)), strict=True):
        model.register_buffer("scale", value)
    return models


@pytest.mark.parametrize("make", [_with_weight_norm, _without_a_count, _with_a_number_in_a_list])
@pytest.mark.parametrize("strict", [True, False])
def test_modules_load_what_earlier_ones_saved(tmp_path: Path, make: Any, strict: bool) -> None:
    theirs = pytest.importorskip("safetensors.torch", reason="needs safetensors")
    (old, new), (_, other) = make(), make()
    theirs.save_model(old, str(tmp_path / "x"))
    assert theirs.load_model(other, str(tmp_path / "x"), strict) == (set(), [])
    assert tpde.torch.load_model(new, tmp_path / "x", strict) == (set(), [])
    assert _bits(new) == _bits(other)


def test_a_model_is_as_it_was_where_its_modules_take_a_part(tmp_path: Path) -> None:
    old, model = _with_weight_norm()
    extra = {**{name: it.clone() for name, it in old.state_dict().items()}, "more": torch.ones(2)}
    tpde.torch.save_file(extra, tmp_path / "x")
    before = _bits(model)
    with pytest.raises(InvalidInput, match="the model lacks 1 tensors, such as `more`") as caught:
        tpde.torch.load_model(model, tmp_path / "x")
    assert (caught.value.found, caught.value.needed) == (["more"], [])
    assert _bits(model) == before
    assert tpde.torch.load_model(model, tmp_path / "x", strict=False) == (set(), ["more"])
    tpde.torch.save_file({"scale": torch.ones(2)}, tmp_path / "x")
    number = _with_a_number_in_a_list()[1]
    with pytest.raises(InvalidInput, match="`scale` has the shape"):
        tpde.torch.load_model(number, tmp_path / "x")


def test_parts_of_a_tensor_are_not_missing(tmp_path: Path) -> None:
    theirs = pytest.importorskip("safetensors.torch", reason="needs safetensors")

    class Parts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both = torch.nn.Parameter(torch.randn(4, 6))
            self.register_buffer("head", self.both.data[:1])
            self.register_buffer("tail", self.both.data[1:, ::2])
            self.register_buffer("other", torch.zeros(2))

    model, read = Parts(), Parts()
    theirs.save_file({"both": model.both.data, "other": model.other}, str(tmp_path / "x"))
    assert tpde.torch.load_model(read, tmp_path / "x") == (set(), [])
    assert _bits(read) == _bits(model)
    theirs.save_file({"head": torch.ones(1, 6), "other": model.other}, str(tmp_path / "x"))
    with pytest.raises(InvalidInput, match="it lacks 2 tensors, such as `both`, `tail`"):
        tpde.torch.load_model(read, tmp_path / "x")
    assert _bits(read) == _bits(model)


def test_tied_tensors_that_differ_in_a_file_are_refused(tmp_path: Path) -> None:
    model = Tied()
    before = _bits(model)
    state = {name: it.clone() for name, it in model.state_dict().items()}
    tpde.torch.save_file({name: it.contiguous() for name, it in state.items()}, tmp_path / "x")
    assert tpde.torch.load_model(model, tmp_path / "x") == (set(), []), "the same twice"
    state["head.weight"] += 1
    tpde.torch.save_file({name: it.contiguous() for name, it in state.items()}, tmp_path / "x")
    with pytest.raises(InvalidInput, match=r"`\w+.weight` and `\w+.weight` are one tensor of the model"):
        tpde.torch.load_model(model, tmp_path / "x")
    assert _bits(model) == before
    missing, unexpected = tpde.torch.load_model(model, tmp_path / "x", strict=False)
    assert (missing, len(unexpected)) == (set(), 1)
