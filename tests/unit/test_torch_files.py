"""What `tpde.torch` and `tpde.numpy` save, replace, and refuse to save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch")

import tpde.numpy  # noqa: E402
import tpde.torch  # noqa: E402
from tpde.errors import InvalidDestination, InvalidInput, UnsupportedDtype  # noqa: E402
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
