"""What is no state dict, is damaged, or asks for code is refused before anything is written."""

from __future__ import annotations

import sys
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
from support.commands import process
from support.craft import bounded

from tpde.errors import InvalidDestination, InvalidInput, MissingDependency, UnsafePickle, UnsupportedDtype
from tpde.files.operations import pack, unpack

torch = pytest.importorskip("torch")


def quantized() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


def nested() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


@pytest.mark.filterwarnings("ignore:.*quantize", "ignore:.*nested", "ignore:TypedStorage")
@pytest.mark.parametrize(
    ("value", "error", "match"),
    [
        ([torch.ones(3)], InvalidInput, "holds a list, not a state dict"),
        (torch.ones(3), InvalidInput, "holds a tensor, not a state dict"),
        ({}, InvalidInput, "holds an empty state dict"),
        ({"a": 1}, InvalidInput, "entry `a` is a int"),
        ({1: torch.ones(3)}, InvalidInput, "the name 1 is a int; names are texts; rename"),
        ({1: 3}, InvalidInput, "the name 1 is a int; names are texts; rename"),
        ({"a": torch.ones(3).to_sparse()}, InvalidInput, "`a` is not dense"),
        ({"a": quantized()}, InvalidInput, "x.pt` holds a tensor that is not dense, .*; make it dense first"),
        ({"a": nested()}, InvalidInput, "x.pt` holds a tensor that is not dense, .*; make it dense first"),
        ({"a": torch.ones(3, dtype=torch.complex128)}, UnsupportedDtype, "complex128"),
    ],
    ids=["list", "tensor", "empty", "number", "key", "keys", "sparse", "quantized", "nested", "dtype"],
)
def test_what_is_no_state_dict_is_refused(
    value: object, error: type[Exception], match: str, tmp_path: Path
) -> None:
    torch.save(value, tmp_path / "x.pt")
    with pytest.raises(error, match=match):
        pack(tmp_path / "x.pt", tmp_path / "packed")
    assert not (tmp_path / "packed").exists()


def test_what_torch_says_of_a_damaged_file_is_cut(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3)}, path := tmp_path / "x.pt")
    path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(InvalidInput, match=r"x\.pt` is not a PyTorch state dict, or is damaged") as caught:
        pack(path, tmp_path / "packed")
    assert len(caught.value.message) < len(str(path)) + 300


def test_without_torch_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.pt").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingDependency, match=r'x\.pt` is a PyTorch.*pip install "tpde\[torch\]"'):
        pack(tmp_path / "x.pt", tmp_path / "packed")


@pytest.mark.parametrize("error", [MemoryError("no room"), KeyboardInterrupt()])
def test_a_machine_that_has_no_memory_is_no_damaged_file(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "x.pt")

    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(torch, "load", fail)
    with pytest.raises(type(error)):
        pack(tmp_path / "x.pt", tmp_path / "packed")
    monkeypatch.setattr(torch, "load", lambda *_, **__: {}["one line\nand more"])
    with pytest.raises(InvalidInput, match=r"is damaged \(KeyError: 'one line"):
        pack(tmp_path / "x.pt", tmp_path / "packed")


def test_a_storage_that_is_shorter_than_it_says_is_refused(tmp_path: Path) -> None:
    """What follows in the file is another tensor's."""
    torch.save({"w": torch.arange(1000.0), "other": torch.full((1000,), 7.0)}, tmp_path / "y.pt")
    with zipfile.ZipFile(tmp_path / "y.pt") as old, zipfile.ZipFile(tmp_path / "x.pt", "w") as new:
        for info in old.infolist():
            data = old.read(info)
            new.writestr(info.filename, data[:2000] if info.filename.endswith("/data/0") else data)
    with pytest.raises(InvalidInput, match=r"x\.pt"):
        pack(tmp_path / "x.pt", tmp_path / "packed")
    assert not (tmp_path / "packed").exists()


@pytest.mark.parametrize("data", [b"", b"garbage", b"PK\x03\x04 garbage", b"\x80\x02."])
def test_files_that_are_no_pickles_are_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(data)
    with pytest.raises(InvalidInput, match=r"x\.pt"):
        pack(tmp_path / "x.pt", tmp_path / "packed")


def test_cut_state_dicts_are_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(30_000)}, tmp_path / "x.pt")
    data = (tmp_path / "x.pt").read_bytes()
    for size in (1, 100, 1000, len(data) // 2, len(data) - 1):
        (tmp_path / "x.pt").write_bytes(data[:size])
        with pytest.raises(InvalidInput, match=r"x\.pt"):
            pack(tmp_path / "x.pt", tmp_path / "packed")
    assert not (tmp_path / "packed").exists()


@pytest.mark.parametrize("zipped", [True, False])
def test_whole_modules_are_refused_as_code(zipped: bool, tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
    with pytest.raises(UnsafePickle, match=r"asks for `torch\.nn\.modules\.linear\.Linear`.* never run"):
        pack(tmp_path / "x.pt", tmp_path / "packed")


@pytest.fixture
def old_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let packed weights be saved in PyTorch's old format, as whoever means harm may do."""
    monkeypatch.setattr("tpde.weights.pickled._refuse_old_format", lambda _: None)


@pytest.mark.usefixtures("old_files")
@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
@pytest.mark.parametrize("zipped", [True, False])
def test_state_dicts_of_packed_models_are_refused_with_a_way_out(
    zipped: bool, known: bool, tmp_path: Path
) -> None:
    from tpde.nn import pack_module

    state = pack_module(torch.nn.Linear(128, 128)).state_dict()
    torch.save(state, tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
    if known:
        with pytest.raises(UnsafePickle, match=r"x\.pt` is the state dict of a packed model") as caught:
            pack(tmp_path / "x.pt", tmp_path / "packed")
        assert "tpde.nn.plain_state_dict(model)" in str(caught.value.hint)
    else:  # as on the command line, where nothing imported `tpde.nn`
        done = process("pack", tmp_path / "x.pt", tmp_path / "packed")
        assert done.returncode == 2
        assert "x.pt` is the state dict of a packed model" in done.stderr
    assert not (tmp_path / "packed").exists()


@pytest.mark.usefixtures("old_files")
def test_old_files_are_refused_where_memory_holds_what_they_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch makes tensors before it reads the bytes of old files: of what was in that memory."""
    from tpde.nn import pack_module

    state = pack_module(torch.nn.Linear(128, 128)).state_dict()
    torch.save(state, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    monkeypatch.setattr(torch, "load", lambda *_, **__: state)
    with pytest.raises(UnsafePickle, match=r"x\.pt` is the state dict of a packed model"):
        pack(tmp_path / "x.pt", tmp_path / "packed")
    assert not (tmp_path / "packed").exists()


def test_an_expanded_tensor_of_a_petabyte_is_refused(tmp_path: Path) -> None:
    for new in (True, False):
        torch.save(
            {"w": torch.zeros(1).expand(1 << 50)}, tmp_path / "x.pt", _use_new_zipfile_serialization=new
        )
        with (
            bounded(8),
            pytest.raises(InvalidInput, match="`w` repeats 4 bytes of memory to 4503599627370496"),
        ):
            pack(tmp_path / "x.pt", tmp_path / "packed")
    assert not (tmp_path / "packed").exists()


@pytest.mark.parametrize("name", ["w\ud800", "__metadata__"])
def test_names_that_safetensors_cannot_hold_are_refused(name: str, tmp_path: Path) -> None:
    torch.save({name: torch.zeros(3)}, tmp_path / "x.pt")
    with pytest.raises(InvalidInput, match=r"not Unicode|place of metadata"):
        pack(tmp_path / "x.pt", tmp_path / "packed")


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".ckpt"])
def test_no_safetensors_file_is_written_by_a_state_dict_s_name(suffix: str, tmp_path: Path) -> None:
    """It would be taken for one, and refused."""
    torch.save({"w": torch.randn(300).bfloat16()}, source := tmp_path / "x.pt")
    pack(source, packed := tmp_path / "packed.safetensors")
    for write, file in ((pack, source), (unpack, packed)):
        with pytest.raises(InvalidDestination, match=r"name it `.*y\.safetensors`"):
            write(file, tmp_path / f"y{suffix}")
    assert sorted(it.name for it in tmp_path.iterdir()) == ["packed.safetensors", "x.pt"]
