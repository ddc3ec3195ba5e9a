"""What `tpde.torch` and `tpde.numpy` save, replace, and refuse to save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch")

import tpde.numpy  # noqa: E402
import tpde.torch  # noqa: E402
from tpde.errors import (  # noqa: E402
    InvalidArgument,
    InvalidDestination,
    InvalidInput,
    PackedWeight,
    UnsupportedDtype,
)
from tpde.format.container import TensorSpec  # noqa: E402
from tpde.frameworks import (  # noqa: E402
    MAX_EXPANDED,
    numpy_dtype_name,
    refuse_expanded,
    spec_of,
    to_numpy,
    to_torch,
    torch_dtype,
    torch_shape,
    torch_spec,
)


def test_tensors_that_overlap_are_refused() -> None:
    whole = torch.arange(1000, dtype=torch.int32)
    for one, other in ((whole[:500], whole[499:]), (whole, whole[10:20]), (whole[100:200], whole[:101])):
        with pytest.raises(InvalidInput, match="share memory"):
            tpde.torch.save({"one": one, "other": other})
    for one, other in ((whole[:500], whole[499:500]), (whole.view(10, 100)[3], whole[300:301])):
        with pytest.raises(InvalidInput, match=r"tensors `.*` and `.*` share memory"):
            tpde.torch.save({"other": other, "one": one})
    parts = {"one": whole[:500], "other": whole[500:], "none": whole[:0], "nothing": whole[200:200]}
    found = tpde.torch.load(tpde.torch.save(parts))
    assert torch.equal(found["one"], whole[:500])
    assert torch.equal(found["other"], whole[500:])


def test_tensors_that_are_not_contiguous_are_refused() -> None:
    with pytest.raises(InvalidInput, match="`x` is not contiguous"):
        tpde.torch.save({"x": torch.zeros(3, 4).t()})


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:The PyTorch API of nested")
def test_what_holds_no_data_is_refused() -> None:
    for tensor, says in (
        (torch.empty(3, device="meta"), "has no data"),
        (torch.nn.UninitializedParameter(), "`x` is not initialized"),
        (torch.nn.UninitializedBuffer(), "`x` is not initialized"),
        (torch.eye(3).to_sparse(), "is not dense"),
        (torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "is not dense"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "is not dense"),
        ([1.0], "is a list"),
    ):
        with pytest.raises(InvalidInput, match=says):
            tpde.torch.save({"x": tensor})


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
    for name in ("load_file", "load_model", "load", "save_file", "save_model", "save"):
        assert set(signature(getattr(stock, name)).parameters) <= set(
            signature(getattr(tpde.torch, name)).parameters
        )


def test_saving_replaces_a_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for value in (1, 2):
        tpde.torch.save_file({"x": torch.full((9,), value)}, path)
        assert torch.equal(tpde.torch.load_file(path)["x"], torch.full((9,), value))
        tpde.numpy.save_file({"x": np.full(9, value)}, path)
        assert np.array_equal(tpde.numpy.load_file(path)["x"], np.full(9, value))


def test_lazy_conjugates_and_negatives_are_saved_as_they_look() -> None:
    values = torch.randn(50, dtype=torch.complex64)
    found = tpde.torch.load(tpde.torch.save({"x": values.conj(), "y": values.clone().conj().imag.clone()}))
    assert torch.equal(found["x"].view(torch.int64), values.conj().resolve_conj().view(torch.int64))
    assert torch.equal(found["y"], -values.imag)


def test_big_endian_arrays_are_saved_as_numbers() -> None:
    values = np.arange(700)
    for kind in (">i8", ">f4", ">u2"):
        found = tpde.numpy.load(tpde.numpy.save({"x": values.astype(kind)}))["x"]
        assert found.dtype == np.dtype(kind).newbyteorder("=")
        assert np.array_equal(found, values.astype(kind))


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="needs a torch with numbers of four bits")
def test_numbers_of_four_bits_are_pairs() -> None:
    """A byte holds two; files count numbers, PyTorch counts bytes."""
    pairs = torch.arange(32, dtype=torch.uint8).view(4, 8).view(torch.float4_e2m1fn_x2)
    assert torch_spec("x", pairs) == TensorSpec("F4", (4, 16))
    assert torch_shape(TensorSpec("F4", (4, 16))) == (4, 8)
    found = tpde.torch.load(tpde.torch.save({"x": pairs}))["x"]
    assert found.shape == (4, 8)
    assert torch.equal(found.view(torch.uint8), pairs.view(torch.uint8))
    with pytest.raises(UnsupportedDtype, match="is odd"):
        to_torch(np.zeros(3, np.uint8), TensorSpec("F4", (2, 3)))


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(3, np.complex128),
        np.zeros(3, "M8[s]"),
        np.zeros(3, object),
        np.array(["text"]),
        np.zeros(3, [("a", "f4")]),
    ],
    ids=lambda it: str(it.dtype),
)
def test_arrays_of_dtypes_that_files_lack_are_refused(array: Any) -> None:
    with pytest.raises(UnsupportedDtype, match="cast the array first"):
        tpde.numpy.save({"x": array})


def test_tensors_of_dtypes_that_files_lack_are_refused() -> None:
    with pytest.raises(UnsupportedDtype, match="complex128; cast the tensor first"):
        tpde.torch.save({"x": torch.zeros(3, dtype=torch.complex128)})


def test_only_arrays_are_saved_as_arrays() -> None:
    for value in ([1.0], np.float32(1), torch.zeros(3), None):
        with pytest.raises(InvalidInput, match=rf"`x` is a {type(value).__name__}; arrays can be saved"):
            tpde.numpy.save({"x": value})  # type: ignore[dict-item]


SAVERS = {
    "numpy": (tpde.numpy.save_file, np.arange(40_000, dtype=np.float32), np.zeros(3, object)),
    "torch": (tpde.torch.save_file, torch.arange(40_000.0), torch.zeros(3, dtype=torch.complex128)),
}


@pytest.mark.parametrize("library", SAVERS)
def test_places_where_no_file_can_be_are_refused(library: str, tmp_path: Path) -> None:
    save, value, _ = SAVERS[library]
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    before = sorted(tmp_path.rglob("*"))
    for name in ("folder", "none/x", "file/x"):
        with pytest.raises(InvalidDestination):
            save({"x": value}, tmp_path / name)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("library", SAVERS)
def test_what_is_refused_leaves_the_file_that_was_there(library: str, tmp_path: Path) -> None:
    save, value, refused = SAVERS[library]
    save({"x": value}, tmp_path / "x")
    before = (tmp_path / "x").read_bytes()
    with pytest.raises(UnsupportedDtype):
        save({"x": value, "y": refused}, tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == before
    assert list(tmp_path.iterdir()) == [tmp_path / "x"]


@pytest.mark.parametrize("library", SAVERS)
def test_metadata_is_restored_and_threads_change_nothing(library: str, tmp_path: Path) -> None:
    save, value, _ = SAVERS[library]
    for threads in (1, 3):
        save({"x": value}, tmp_path / str(threads), metadata={"format": "pt", "a": "b"}, threads=threads)
    assert (tmp_path / "1").read_bytes() == (tmp_path / "3").read_bytes()
    tpde.unpack(tmp_path / "1", tmp_path / "plain")
    for name in ("1", "plain"):
        with tpde.safe_open(tmp_path / name) as opened:
            assert opened.metadata() == {"format": "pt", "a": "b"}
            assert torch.equal(opened.get_tensor("x"), torch.arange(40_000.0))


# ---- what repeats its bytes, and what no file can hold


def test_what_is_expanded_is_written_out_up_to_64_mib() -> None:
    assert MAX_EXPANDED == 64 << 20
    refuse_expanded("x", MAX_EXPANDED, 1)
    refuse_expanded("x", 1 << 50, 1 << 50)
    for nbytes, reach in ((MAX_EXPANDED + 1, 1), (MAX_EXPANDED + 2, MAX_EXPANDED + 1)):
        with pytest.raises(
            InvalidInput, match=f"`x` repeats {reach} bytes of memory to {nbytes} bytes"
        ) as caught:
            refuse_expanded("x", nbytes, reach)
        assert (caught.value.where, caught.value.found, caught.value.needed) == ("x", nbytes, MAX_EXPANDED)


def test_only_arrays_that_repeat_their_bytes_are_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tpde.frameworks.MAX_EXPANDED", 100)
    whole = np.arange(3000, dtype=np.float32).reshape(50, 60)
    arrays = {
        "reversed": whole[::-1],
        "both": whole[::-1, ::-1],
        "turned": whole.T,
        "every third": whole[:, ::3],
        "one row": whole[3:4, ::-1],
        "none": whole[:0],
        "few": np.broadcast_to(whole[0, :5], (5, 5)),
    }
    found = tpde.numpy.load(tpde.numpy.save(arrays))
    assert all(np.array_equal(found[name], array) for name, array in arrays.items())
    windows = np.lib.stride_tricks.as_strided(whole, (10, 60), (4, 4))  # 69 numbers
    for name, array, reach in (
        ("rows", np.broadcast_to(whole[0], (2, 60)), 240),
        ("one", np.broadcast_to(whole[0, :1], (26,)), 4),
        ("windows", windows, 276),
    ):
        with pytest.raises(InvalidInput, match=f"`{name}` repeats {reach} bytes of memory to {array.nbytes}"):
            tpde.numpy.save({name: array})


def test_tensors_that_no_file_can_hold_are_refused_by_name() -> None:
    for dtype, shape in (("U8", (1 << 60,)), ("F4", (3,)), ("U8", (1,) * 65)):
        with pytest.raises(InvalidInput, match=r"tensor `w`: a .*tensor cannot have the shape") as caught:
            spec_of("w", dtype, shape)
        assert (caught.value.where, caught.value.hint) == ("w", "save a part of it")


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="needs a torch with numbers of four bits")
def test_one_pair_of_four_bits_without_a_dimension_is_refused() -> None:
    with pytest.raises(InvalidInput, match="tensor `x`"):
        torch_spec("x", torch.empty((), dtype=torch.uint8).view(torch.float4_e2m1fn_x2))
    with pytest.raises(UnsupportedDtype, match="is odd"):
        torch_shape(TensorSpec("F4", (2, 3, 0, 5)))
    assert torch_shape(TensorSpec("U8", (3,))) == (3,)
    assert torch_shape(TensorSpec("F4", (0, 6))) == (0, 3)


def test_dtypes_that_this_torch_lacks_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from tpde import frameworks

    with pytest.raises(UnsupportedDtype, match=r"has no dtype for F6_E2M3; upgrade PyTorch") as caught:
        torch_dtype("F6_E2M3")
    assert caught.value.found == "F6_E2M3"
    for lacks in ("no_such_dtype", "nn"):  # an older one has no such name, or something else under it
        monkeypatch.setitem(frameworks._TORCH, "BF16", lacks)
        with pytest.raises(UnsupportedDtype, match="has no dtype for BF16"):
            torch_dtype("BF16")


def test_tensors_are_made_of_bytes_without_a_copy() -> None:
    data = np.arange(24, dtype=np.uint8)
    tensor, array = to_torch(data, TensorSpec("I16", (3, 4))), to_numpy(data, TensorSpec("I16", (3, 4)))
    assert (tuple(tensor.shape), tensor.dtype, array.shape, array.dtype) == (
        (3, 4),
        torch.int16,
        (3, 4),
        np.int16,
    )
    data[0] = 99
    assert int(tensor[0, 0]) == int(array[0, 0]) == 99 + 256
    for shape in ((0,), (2, 0, 3)):
        empty = np.empty(0, np.uint8)
        assert tuple(to_torch(empty, TensorSpec("BF16", shape)).shape) == shape
        assert to_numpy(empty, TensorSpec("F32", shape)).shape == shape
    assert numpy_dtype_name(np.dtype(">i2")) == "I16"


# ---- models


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
