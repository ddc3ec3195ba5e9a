"""What `safe_open`, `tpde.numpy` and `tpde.torch` promise, against NumPy's own indexing, for every dtype."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import spoilt
from support.contents import CONTENTS, fill
from support.files import container, pack_bytes, safetensors_bytes

import tpde
import tpde.numpy
from tpde.access import TensorSlice
from tpde.errors import InvalidInput, MissingDependency, UnsupportedDtype
from tpde.files.reader import PackedFile
from tpde.format.constants import DTYPES
from tpde.format.container import TensorSpec
from tpde.frameworks import _ML_DTYPES, _NUMPY, _TORCH, torch_bytes

torch = pytest.importorskip("torch")

import tpde.torch  # noqa: E402

SHAPE = (6, 5, 400)  # of bf16: 12,000 words, so two chunks
SPECS = {dtype: TensorSpec(dtype, SHAPE) for dtype in DTYPES}
FILE = pack_bytes(
    safetensors_bytes({d: (s, fill("normal", s)) for d, s in SPECS.items()}, {"k": "v", "a": "b"})
)
PLAIN = safetensors_bytes({d: (s, fill("normal", s)) for d, s in SPECS.items()})
KNOWN = [*_NUMPY, *_ML_DTYPES]
SUB_BYTE = [d for d in DTYPES if DTYPES[d].bits < 8]


def _bits(array: Any) -> tuple[Any, ...]:
    """Shape and bytes: values compare equal where bits differ."""
    array = np.asarray(array)
    return array.shape, array.dtype.name, np.ascontiguousarray(array).tobytes()


def _whole(dtype: str) -> Any:
    """The tensor by NumPy alone."""
    if dtype in _NUMPY:
        kind: Any = np.dtype(_NUMPY[dtype])
    else:
        import ml_dtypes

        kind = np.dtype(getattr(ml_dtypes, _ML_DTYPES[dtype]))
    return np.frombuffer(fill("normal", SPECS[dtype]), kind).reshape(SHAPE)


def _part(size: int) -> st.SearchStrategy[Any]:
    bound = st.none() | st.integers(-size - 2, size + 2)
    return st.integers(-size, size - 1) | st.builds(slice, bound, bound, st.none() | st.integers(1, size + 1))


@st.composite
def indices(draw: st.DrawFn) -> Any:
    """Give an index as NumPy takes it: up to three parts, perhaps an ellipsis, perhaps alone."""
    sizes = SHAPE[: draw(st.integers(0, 3))]
    parts: list[Any] = [draw(_part(n)) for n in sizes]
    if draw(st.booleans()):
        behind = draw(st.integers(0, 3 - len(parts)))
        parts += [..., *[draw(_part(n)) for n in SHAPE[len(SHAPE) - behind :]]] if behind else [...]
    return parts[0] if len(parts) == 1 and draw(st.booleans()) else tuple(parts)


@given(st.sampled_from(KNOWN), indices(), st.sampled_from([FILE, PLAIN]))
def test_slices_are_those_of_numpy(dtype: str, index: Any, file: bytes) -> None:
    with tpde.safe_open(file, framework="np") as opened:
        part = opened.get_slice(dtype)
        assert (part.get_shape(), part.get_dtype()) == (list(SHAPE), dtype)
        assert _bits(part[index]) == _bits(_whole(dtype)[index])


@settings(max_examples=30)
@given(st.sampled_from(["BF16", "F8_E5M2", "I64", "C64", "F32"]), indices())
def test_slices_of_torch_have_the_same_bits(dtype: str, index: Any) -> None:
    with tpde.safe_open(FILE, framework="pt") as opened:
        found = opened.get_slice(dtype)[index]
    needed = _whole(dtype)[index]
    assert tuple(found.shape) == needed.shape
    assert torch_bytes(found).tobytes() == needed.tobytes()


@pytest.mark.parametrize("index", [(0, 0, 0, 0), (..., ...), 6, -7, (0, 5), (0, 0, 400)])
def test_indices_that_are_none_are_refused_as_numpy_refuses_them(index: Any) -> None:
    with tpde.safe_open(FILE, framework="np") as opened, pytest.raises(IndexError):
        opened.get_slice("BF16")[index]


@pytest.mark.parametrize("index", [slice(None, None, -1), (0, slice(None, None, -2))])
def test_steps_backwards_are_refused(index: Any) -> None:
    with tpde.safe_open(FILE, framework="np") as opened, pytest.raises(IndexError, match="steps start at 1"):
        opened.get_slice("BF16")[index]


@pytest.mark.parametrize("index", [True, None, 1.0, "0", [0], (0, None)])
def test_indices_of_other_kinds_are_refused(index: Any) -> None:
    with tpde.safe_open(FILE, framework="np") as opened, pytest.raises(IndexError, match="an index of type"):
        opened.get_slice("BF16")[index]


def test_numbers_of_four_bits_are_sliced_in_pairs() -> None:
    data = np.frombuffer(fill("normal", SPECS["F4"]), np.uint8).reshape(6, 5, 200)
    with tpde.safe_open(FILE, framework="pt") as opened:
        part = opened.get_slice("F4")
        if hasattr(torch, "float4_e2m1fn_x2"):
            assert part[2:4].view(torch.uint8).numpy().tobytes() == data[2:4].tobytes()
            assert part[1, 3].view(torch.uint8).numpy().tobytes() == data[1, 3].tobytes()
            assert opened.get_tensor("F4").view(torch.uint8).numpy().tobytes() == data.tobytes()
            for low, high in ((0, 0), (0, 2), (2, 6), (398, 400)):
                found = part[1, 3, low:high].view(torch.uint8).numpy()
                assert found.tobytes() == data[1, 3, low // 2 : high // 2].tobytes()
        for low, high in ((1, 3), (1, 4), (0, 3), (399, 400)):
            with pytest.raises(UnsupportedDtype, match="inside a byte"):
                part[0, 0, low:high]
        with pytest.raises(UnsupportedDtype, match="inside a byte"):
            part[0, 0, 3]


@pytest.mark.parametrize("dtype", SUB_BYTE)
def test_dtypes_that_numpy_lacks_are_named(dtype: str) -> None:
    with tpde.safe_open(FILE, framework="np") as opened:
        with pytest.raises(UnsupportedDtype, match=dtype):
            opened.get_tensor(dtype)
        with pytest.raises(UnsupportedDtype, match=dtype):
            opened.get_slice(dtype)[0]


def test_a_slice_reads_its_own_chunks_only() -> None:
    spec = TensorSpec("BF16", (40, 8192))  # a chunk a row
    source = safetensors_bytes({"x": (spec, fill("normal", spec))})
    damaged = bytearray(pack_bytes(source))
    with PackedFile(bytes(damaged)) as file:
        blob = file.tensor("x").blob
        at = file.container.data_start + file.container.entries["x_tpde"].begin + int(blob.offsets[7]) + 40
    damaged[at] ^= 1
    with tpde.safe_open(bytes(damaged), framework="np") as opened:
        part = opened.get_slice("x")
        for rows in (slice(0, 7), slice(8, 40)):
            part[rows]
        with pytest.raises(tpde.Corrupt) as caught:
            part[5:9]
    assert (caught.value.tensor, caught.value.chunk) == ("x", 7)


def test_names_order_and_metadata_are_the_sources() -> None:
    spec = TensorSpec("U8", (600,))
    names = ["z", "layers.10.w", "layers.9.w", "a"]
    source = safetensors_bytes({n: (spec, fill("normal", spec)) for n in names}, {"k": "v", "a": "b"})
    with tpde.safe_open(pack_bytes(source), framework="np") as opened:
        assert opened.keys() == opened.offset_keys() == list(opened) == names
        assert opened.metadata() == {"k": "v", "a": "b"}
    with tpde.safe_open(safetensors_bytes({"a": (spec, bytes(600))}), framework="np") as opened:
        assert opened.metadata() is None
        with pytest.raises(KeyError, match="no tensor `b`"):
            opened.get_tensor("b")
        with pytest.raises(KeyError, match="no tensor `b`"):
            opened.get_slice("b")


def test_offset_keys_are_in_the_order_of_the_bytes() -> None:
    places = {"a": (8, 12), "b": (0, 3), "c": (3, 8)}
    header = {
        name: {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
        for name, (begin, end) in places.items()
    }
    plain = container(header, bytes(range(12)))
    for file in (plain, pack_bytes(plain)):
        with tpde.safe_open(file, framework="np") as opened:
            assert sorted(opened.keys()) == sorted(opened) == ["a", "b", "c"]
            assert opened.offset_keys() == ["b", "c", "a"]
            for name, (begin, end) in places.items():
                assert opened.get_tensor(name).tolist() == list(range(begin, end))


def test_offset_keys_of_a_file_that_was_saved_again_are_in_its_own_order() -> None:
    stock = pytest.importorskip("safetensors.torch")
    specs = {"a": TensorSpec("BF16", (9000,)), "a0": TensorSpec("U8", (40,))}
    packed = pack_bytes(safetensors_bytes({n: (s, fill("normal", s)) for n, s in specs.items()}))
    again = stock.save(stock.load(packed))  # without metadata; `a0` comes before `a_tpde`
    for file, order in ((packed, ["a", "a0"]), (again, ["a0", "a"])):
        with tpde.safe_open(file, framework="np") as opened:
            assert opened.offset_keys() == order
            assert opened.keys() == ["a", "a0"]


def _opened(path: Path, framework: Any) -> Any:
    with tpde.safe_open(path, framework=framework) as opened:
        return {name: opened.get_tensor(name) for name in opened}


READERS: dict[str, Callable[[Path], Any]] = {
    "safe_open pt": lambda path: _opened(path, "pt"),
    "safe_open np": lambda path: _opened(path, "np"),
    "torch.load_file": tpde.torch.load_file,
    "numpy.load_file": tpde.numpy.load_file,
    "torch.load": lambda path: tpde.torch.load(path.read_bytes()),
    "numpy.load": lambda path: tpde.numpy.load(path.read_bytes()),
}


@pytest.mark.parametrize("way", spoilt.PACKED_WAYS)
@pytest.mark.parametrize("reader", READERS)
def test_files_that_cannot_be_read_are_refused(reader: str, way: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    for whole in (spoilt.PACKED, *([spoilt.PLAIN] if way in spoilt.WAYS else [])):
        path.write_bytes(whole)
        assert READERS[reader](path).keys() == {"w", "few"}
        path.unlink()
        error = spoilt.write(path, way, whole)
        if path.exists() or not reader.endswith(".load"):
            with pytest.raises(error) as caught:
                READERS[reader](path)
            if way == "damaged":
                assert (caught.value.tensor, caught.value.chunk) == ("w", 1)  # type: ignore[attr-defined]


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    for reader, read in READERS.items():
        if not reader.endswith(".load"):
            with pytest.raises(InvalidInput):
                read(tmp_path)


@pytest.mark.parametrize("dtype", KNOWN)
def test_dtypes_that_numpy_knows_by_another_package_ask_for_it(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    file = pack_bytes(safetensors_bytes({"x": (SPECS[dtype], fill("normal", SPECS[dtype]))}))
    if dtype in _NUMPY:
        assert tpde.numpy.load(file)["x"].shape == SHAPE
        return
    with pytest.raises(
        MissingDependency, match=rf"{dtype} only with `ml_dtypes`.*pip install \"tpde\[numpy\]\""
    ):
        tpde.numpy.load(file)


def test_dtypes_that_a_framework_lacks_are_refused_in_all_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(FILE)  # every dtype
    for read in READERS.values():
        with pytest.raises(UnsupportedDtype):
            read(tmp_path / "x")


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tensors_go_to_the_device_that_is_named(device: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(spoilt.PACKED)
    with tpde.safe_open(tmp_path / "x", device=device) as opened:
        found = [opened.get_tensor("w"), opened.get_slice("w")[3:9], opened.get_slice("w")[5]]
    for it in (device, torch.device(device)):
        found += tpde.torch.load_file(tmp_path / "x", device=it).values()
    assert {it.device.type for it in found} == {device}
    assert [tuple(it.shape) for it in found[:3]] == [(20_000,), (6,), ()]


def test_close_closes_and_tensors_stay(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(FILE)
    opened = tpde.safe_open(tmp_path / "x", framework="np")
    tensor, part = opened.get_tensor("F32"), opened.get_slice("F32")
    opened.close()
    opened.close()
    assert _bits(tensor) == _bits(_whole("F32"))
    for use in (lambda: opened.get_tensor("F32"), lambda: part[0]):
        with pytest.raises((OSError, ValueError)):
            use()


@pytest.mark.parametrize("failing", [False, True])
def test_leaving_the_block_closes(failing: bool, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(FILE)
    with contextlib.suppress(RuntimeError), tpde.safe_open(tmp_path / "x", framework="np") as opened:
        assert opened.get_tensor("F32").shape == SHAPE
        if failing:
            raise RuntimeError
    with pytest.raises((OSError, ValueError)):
        opened.get_tensor("F32")


@pytest.mark.parametrize("framework", ["np", "numpy"])
@pytest.mark.parametrize("device", ["cuda", "cuda:0", "meta"])
def test_arrays_are_on_no_device(framework: Any, device: str) -> None:
    with pytest.raises(ValueError, match=f"NumPy arrays live on the CPU, not on `{device}`"):
        tpde.safe_open(FILE, framework=framework, device=device)


@pytest.mark.parametrize("framework", ["tf", "", "PT", None])
def test_frameworks_that_are_not_known_are_refused(framework: Any) -> None:
    with pytest.raises(ValueError, match="no framework `"):
        tpde.safe_open(FILE, framework=framework)


@pytest.mark.parametrize("framework", ["pt", "torch", "np", "numpy"])
def test_frameworks_have_two_names_each(framework: Any) -> None:
    kind = torch.Tensor if framework in ("pt", "torch") else np.ndarray
    with tpde.safe_open(FILE, framework=framework) as opened:
        assert isinstance(opened.get_tensor("F32"), kind)
        assert isinstance(opened.get_slice("F32")[1:], kind)


class Asked:
    """A tensor of numbers that notes what is read of it, in elements, and by how many threads."""

    def __init__(self, *shape: int) -> None:
        self.spec, self.reads = TensorSpec("I32", shape), list[tuple[int, int, int]]()
        self.whole = np.arange(self.spec.nbytes // 4, dtype=np.int32).reshape(shape)

    def read(self, begin: int, end: int, out: Any, threads: int) -> None:
        self.reads.append((begin // 4, end // 4, threads))
        out[:] = self.whole.reshape(-1).view(np.uint8)[begin:end]


@pytest.mark.parametrize(
    ("index", "read"),
    [
        (1, (2000, 4000)),
        (slice(1, 6, 3), (2000, 10_000)),
        ((-1, 2, 7), (10_807, 10_808)),
        ((2, slice(1, 1)), (4400, 4400)),
        ((0, slice(1, 4), 3), (400, 1600)),
        (slice(5, 2), (10_000, 10_000)),
        (..., (0, 12_000)),
        ((..., 3), (0, 12_000)),
        ((4, 4, slice(398, None)), (9998, 10_000)),
    ],
)
def test_a_slice_reads_from_its_first_element_to_its_last(index: Any, read: tuple[int, int]) -> None:
    tensor = Asked(6, 5, 400)
    placed: list[Any] = []
    part = TensorSlice(tensor, "np", 3, lambda it: placed.append(it) or it)  # type: ignore[arg-type]
    assert _bits(part[index]) == _bits(tensor.whole[index])
    assert tensor.reads == [(*read, 3)]
    assert len(placed) == 1


def test_scalars_are_indexed_by_nothing() -> None:
    tensor = Asked()
    part = TensorSlice(tensor, "np", 1, lambda it: it)  # type: ignore[arg-type]
    assert (part[()].tolist(), part[...].tolist(), part.get_shape()) == (0, 0, [])
    with pytest.raises(IndexError, match="1 indices for a tensor of 0 dimensions"):
        part[0]


def test_threads_decode_as_many_as_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    read = PackedFile.read

    def counted(self: PackedFile, name: str, threads: int = 1) -> Any:
        asked.append(threads)
        return read(self, name, threads)

    monkeypatch.setattr(PackedFile, "read", counted)
    with tpde.safe_open(FILE, framework="np", threads=3) as opened:
        opened.get_tensor("F32")
    assert asked == [3]
    for threads in (0, -1, True):
        with pytest.raises(ValueError, match="at least 1"):
            tpde.safe_open(FILE, threads=threads)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="no list of open files here")
def test_an_unclosed_safe_open_leaks_no_descriptor(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(FILE)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        assert tpde.safe_open(tmp_path / "x", framework="np").get_tensor("U8").shape == SHAPE
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_pickled_safe_open_reads_no_other_file(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(FILE)
    with tpde.safe_open(tmp_path / "x", framework="np") as opened:
        for it in (opened, opened.get_slice("U8"), opened._file):
            for duplicate in (pickle.dumps, copy.copy, copy.deepcopy):
                if duplicate is copy.copy and it is not opened:
                    continue  # shares the file, which is fine
                with pytest.raises(InvalidInput, match="open it there"):
                    duplicate(it)


@pytest.mark.parametrize("content", CONTENTS)
def test_arrays_saved_come_back_bit_for_bit(content: str, tmp_path: Path) -> None:
    arrays: dict[str, Any] = {}
    for dtype in KNOWN:
        spec = TensorSpec(dtype, (3, 700))
        arrays[dtype] = np.frombuffer(fill(content, spec), _whole(dtype).dtype).reshape(3, 700)
        arrays[f"{dtype}.t"] = arrays[dtype].T
    arrays["scalar"], arrays["empty"] = np.array(3, np.int16), np.empty((0, 4), np.float32)
    arrays["swapped"] = np.arange(600, dtype=">i4")
    tpde.numpy.save_file(arrays, tmp_path / "x", metadata={"a": "b"})
    data = tpde.numpy.save(arrays, metadata={"a": "b"})
    assert data == (tmp_path / "x").read_bytes()
    arrays["swapped"] = arrays["swapped"].astype("<i4")
    for found in (tpde.numpy.load_file(tmp_path / "x"), tpde.numpy.load(data)):
        assert {n: _bits(a) for n, a in found.items()} == {n: _bits(a) for n, a in arrays.items()}


@pytest.mark.parametrize("content", ["normal", "random", "constant", "specials"])
def test_tensors_saved_come_back_bit_for_bit(content: str, tmp_path: Path) -> None:
    tensors: dict[str, Any] = {}
    for dtype, name in _TORCH.items():
        if hasattr(torch, name):
            raw = torch.frombuffer(bytearray(fill(content, TensorSpec(dtype, (3, 700)))), dtype=torch.uint8)
            tensors[dtype] = raw.view(getattr(torch, name)).view(3, -1)
    tensors["scalar"], tensors["empty"] = torch.tensor(3.0), torch.empty(0, 4)
    tpde.torch.save_file(tensors, tmp_path / "x", metadata={"a": "b"})
    data = tpde.torch.save(tensors, metadata={"a": "b"})
    assert data == (tmp_path / "x").read_bytes()
    for found in (tpde.torch.load_file(tmp_path / "x"), tpde.torch.load(data)):
        assert found.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
            assert torch_bytes(found[name]).tobytes() == torch_bytes(tensor).tobytes()
