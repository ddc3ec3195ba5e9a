"""What `safe_open`, `tpde.numpy` and `tpde.torch` promise of files: names, order, devices, and closing."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import spoilt
from support.contents import fill
from support.files import container, pack_bytes, safetensors_bytes

import tpde
import tpde.numpy
from tpde.errors import InvalidArgument, InvalidInput, UnknownTensor, UnsupportedDevice, UnsupportedDtype
from tpde.files.reader import PackedFile
from tpde.format.container import TensorSpec

torch = pytest.importorskip("torch")

from support.every_dtype import FILE, SHAPE, bits_of, by_numpy  # noqa: E402

import tpde.torch  # noqa: E402


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
            assert opened.offset_keys() == list(opened.get_tensors()) == ["b", "c", "a"]
            for name, (begin, end) in places.items():
                assert opened.get_tensor(name).tolist() == list(range(begin, end))
                assert opened.get_tensors()[name].tolist() == list(range(begin, end))


def test_files_are_loaded_in_the_order_of_safetensors(tmp_path: Path) -> None:
    stock = pytest.importorskip("safetensors")
    import safetensors.numpy

    path = tmp_path / "x"
    arrays = {"b": np.ones(2, np.float16), "c": np.ones(3, np.int64), "a": np.ones(2, np.uint8)}
    safetensors.numpy.save_file(arrays, path)
    order = list(safetensors.numpy.load_file(path))
    assert list(tpde.numpy.load_file(path)) == list(tpde.torch.load_file(path)) == order
    assert list(tpde.numpy.load(path.read_bytes())) == list(tpde.torch.load(path.read_bytes())) == order
    public = {name for name in dir(stock.safe_open) if not name.startswith("_")}
    assert public <= set(dir(tpde.safe_open))


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
    assert bits_of(tensor) == bits_of(by_numpy("F32"))
    for use in (lambda: opened.get_tensor("F32"), lambda: opened.get_tensor("BF16"), lambda: part[0]):
        with pytest.raises(InvalidInput, match="x` is closed"):
            use()


def test_bytes_are_closed() -> None:
    opened = tpde.safe_open(FILE, framework="np")
    part = opened.get_slice("F32")
    opened.close()
    for use in (lambda: opened.get_tensor("F32"), lambda: opened.get_slice("F32")[0], lambda: part[0]):
        with pytest.raises(InvalidInput, match="`<bytes>` is closed"):
            use()


def test_names_are_texts_and_bytes_have_no_gaps() -> None:
    with tpde.safe_open(FILE, framework="np") as opened:
        for name in (["F32"], {"F32"}, 5, None, b"F32"):
            for call in (opened.get_tensor, opened.get_slice):
                with pytest.raises(UnknownTensor, match="has no tensor `"):
                    call(name)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="has gaps"):
        tpde.torch.load(memoryview(FILE)[::2])  # type: ignore[arg-type]


def test_a_file_that_is_still_open_when_the_interpreter_ends_says_nothing(tmp_path: Path) -> None:
    """PyTorch has modules of ours end before their objects."""
    (tmp_path / "x").write_bytes(FILE)
    code = "import sys, tpde, torch; opened = tpde.safe_open(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "x"], capture_output=True, text=True, timeout=110, check=True
    )
    assert done.stderr == ""


@pytest.mark.parametrize("failing", [False, True])
def test_leaving_the_block_closes(failing: bool, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(FILE)
    with contextlib.suppress(RuntimeError), tpde.safe_open(tmp_path / "x", framework="np") as opened:
        assert opened.get_tensor("F32").shape == SHAPE
        if failing:
            raise RuntimeError
    with pytest.raises(InvalidInput, match="x` is closed"):
        opened.get_tensor("F32")


@pytest.mark.parametrize("framework", ["np", "numpy"])
@pytest.mark.parametrize("device", ["cuda", "cuda:0", "meta"])
def test_arrays_are_on_no_device(framework: Any, device: str) -> None:
    with pytest.raises(ValueError, match=f"NumPy arrays live on the CPU, not on `{device}`"):
        tpde.safe_open(FILE, framework=framework, device=device)


@pytest.mark.parametrize("device", ["foo", 5.5, torch.float16, -1, True, "hip", 1000])
def test_devices_that_are_none_or_not_there_are_refused(device: Any, tmp_path: Path) -> None:
    """A dtype would be cast to, and a float taken for the CPU."""
    (tmp_path / "x").write_bytes(spoilt.PACKED)
    reads: tuple[Callable[[], object], ...] = (
        lambda: tpde.safe_open(tmp_path / "x", device=device),
        lambda: tpde.torch.load_file(tmp_path / "x", device=device),
        lambda: tpde.torch.load_model(torch.nn.Linear(1, 1), tmp_path / "x", device=device),
    )
    for read in reads:
        with pytest.raises(UnsupportedDevice):
            read()


@pytest.mark.parametrize("framework", ["pt", "torch", "pytorch", "np", "numpy"])
@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu")])
def test_the_cpu_has_some_names(framework: Any, device: Any) -> None:
    with tpde.safe_open(FILE, framework=framework, device=device) as opened:
        assert bits_of(opened.get_tensor("F32")) == bits_of(by_numpy("F32"))


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
