"""PyTorch state dicts pack to what the stock library would have written of them."""

from __future__ import annotations

import json
import os
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tpde.errors import InvalidInput, Truncated
from tpde.files.operations import pack, unpack, verify
from tpde.files.pickles import StateDictSource
from tpde.frameworks import torch_bytes

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")


def _state_dict() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(60, 50, generator=generator) * 0.02
    return {
        "layers.0.w": weight,
        "layers.0.half": weight.to(torch.bfloat16),
        "layers.1.transposed": weight.T,
        "layers.1.part": weight[10:20, ::2],
        "layers.1.expanded": weight[:1].expand(40, 50),
        "embed": torch.zeros(100, 20),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 3),
        "mask": torch.arange(900) % 3 == 0,
        "parameter": torch.nn.Parameter(weight * 2),
        "complex": torch.complex(weight, weight),
        "eight": weight.to(torch.float8_e4m3fn),
    }


def _as_stock(tensors: dict[str, Any], path: Path) -> bytes:
    copies = {k: v.detach().clone(memory_format=torch.contiguous_format) for k, v in tensors.items()}
    safetensors_torch.save_file(copies, path, {"format": "pt"})
    return path.read_bytes()


@pytest.mark.parametrize("suffix", [".pt", ".bin", ".pth", ".ckpt"])
@pytest.mark.parametrize("zipped", [True, False])
def test_state_dicts_become_what_safetensors_would_write(suffix: str, zipped: bool, tmp_path: Path) -> None:
    source = tmp_path / f"model{suffix}"
    tensors = _state_dict()
    if not zipped:
        del tensors["eight"]  # torch cannot load it from the format before 1.6
    torch.save(tensors, source, _use_new_zipfile_serialization=zipped)
    summary = pack(source, tmp_path / "packed")
    assert summary.tensors == len(tensors)
    unpack(tmp_path / "packed", tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == _as_stock(tensors, tmp_path / "stock")
    assert verify(tmp_path / "packed", against=source) == []


def test_shared_tensors_are_written_once_for_each_name(tmp_path: Path) -> None:
    weight = torch.arange(5_000, dtype=torch.float32)
    shared = OrderedDict(a=weight, b=weight, head=weight[:2_000], tail=weight[1_000:].view(40, 100))
    torch.save(shared, tmp_path / "x.pt")
    pack(tmp_path / "x.pt", tmp_path / "packed")
    unpack(tmp_path / "packed", tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == _as_stock(shared, tmp_path / "stock")


def test_a_state_dict_alone_may_be_called_so(tmp_path: Path) -> None:
    torch.save({"state_dict": {"w": torch.ones(3)}}, tmp_path / "x.ckpt")
    assert pack(tmp_path / "x.ckpt", tmp_path / "packed").tensors == 1


@pytest.mark.parametrize("beside", [{"optimizer_states": [{"m": torch.ones(3)}]}, {"epoch": 3}, {7: 3}])
def test_what_a_checkpoint_holds_beside_its_weights_is_never_left_out(
    beside: dict[Any, Any], tmp_path: Path
) -> None:
    weights = {"w": torch.ones(3)}
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    torch.save(weights, tmp_path / "weights.pt")
    pack(tmp_path / "weights.pt", tmp_path / "packed")
    for source in (tmp_path / "x.ckpt", folder / "pytorch_model.bin"):
        torch.save({"state_dict": weights, **beside}, source)
        with pytest.raises(InvalidInput, match=f"`{next(iter(beside))}` beside `state_dict`") as caught:
            verify(tmp_path / "packed", against=source)
        assert "CheckpointStore" in (caught.value.hint or "")
    for given in (tmp_path / "x.ckpt", folder):
        with pytest.raises(InvalidInput, match="beside `state_dict`"):
            pack(given, tmp_path / "other")
        assert not (tmp_path / "other").exists()


def test_a_tensor_may_be_called_state_dict(tmp_path: Path) -> None:
    torch.save({"state_dict": torch.ones(3), "w": torch.ones(2)}, tmp_path / "x.pt")
    assert pack(tmp_path / "x.pt", tmp_path / "packed").tensors == 2
    for value in ({"state_dict": {}}, {"state_dict": {"w": 1}, "w": torch.ones(3)}):
        torch.save(value, tmp_path / "y.pt")
        with pytest.raises(InvalidInput, match=r"y\.pt"):
            pack(tmp_path / "y.pt", tmp_path / "other")


def test_parts_of_tensors_that_are_not_contiguous_are_read_in_any_order(tmp_path: Path) -> None:
    """One is kept whole between reads, and never taken for another."""
    tensors = {"a": torch.randn(20, 30).t(), "b": torch.randn(30, 20).t(), "c": torch.randn(600)}
    torch.save(tensors, tmp_path / "x.pt")
    source = StateDictSource(tmp_path / "x.pt")
    try:
        out = np.empty(40, np.uint8)
        for name in ("a", "b", "a", "c", "b", "b", "a"):
            for begin in (0, 2000, 1111):
                source.read(name, begin, begin + 40, out)
                assert out.tobytes() == torch_bytes(tensors[name].contiguous())[begin : begin + 40].tobytes()
    finally:
        source.close()


def test_tensors_are_read_from_the_file_and_not_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Views, transposes, conjugates and shared storages too: their bytes are those that torch loads."""
    w = torch.randn(30, 20)
    tensors = {"w": w, "t": w.t(), "rows": w[10:20], "steps": w[::2, ::3], "scalar": torch.tensor(3)}
    tensors |= {"conj": torch.randn(8, dtype=torch.complex64).conj(), "empty": torch.empty(0, 3)}
    tensors |= {
        "neg": torch.randn(4, dtype=torch.complex64).conj().imag,
        "contiguous": torch.randn(1, dtype=torch.complex64).conj().imag,
        "empty conj": torch.empty(0, 3, dtype=torch.complex64).conj(),
        "expanded": torch.ones(1).expand(7),
        "half": torch.randn(5).half(),
    }
    assert tensors["contiguous"].is_contiguous()
    assert tensors["contiguous"].is_neg()
    torch.save(tensors, tmp_path / "x.pt")
    needed = {name: torch_bytes(it).tobytes() for name, it in torch.load(tmp_path / "x.pt").items()}
    monkeypatch.setattr(torch.UntypedStorage, "from_file", None)  # the mapping
    source = StateDictSource(tmp_path / "x.pt")
    try:
        for name, data in needed.items():
            out = np.empty(len(data), np.uint8)
            source.read(name, 0, out.size, out)
            assert out.tobytes() == data, name
            if len(data) > 8:
                source.read(name, 3, 8, out[:5])
                assert out[:5].tobytes() == data[3:8], name
    finally:
        source.close()


def test_a_state_dict_that_shrinks_while_it_is_packed_is_truncated(tmp_path: Path) -> None:
    torch.save({"w": torch.randn(300_000), "t": torch.randn(300, 200).t()}, tmp_path / "x.pt")
    source = StateDictSource(tmp_path / "x.pt")
    os.truncate(tmp_path / "x.pt", 20_000)
    for name in ("w", "t"):
        nbytes = source.specs[name].nbytes
        with pytest.raises(Truncated, match=r"x\.pt"):
            source.read(name, 0, nbytes, np.empty(nbytes, np.uint8))
    source.close()


@pytest.mark.parametrize("change", ["compressed", "byte order"])
def test_storages_that_are_not_in_the_file_as_they_are_in_memory(change: str, tmp_path: Path) -> None:
    tensors = {"w": torch.randn(3000)}
    torch.save(tensors, tmp_path / "y.pt")
    with zipfile.ZipFile(tmp_path / "y.pt") as old, zipfile.ZipFile(tmp_path / "x.pt", "w") as new:
        for info in old.infolist():
            data = old.read(info)
            if change == "byte order" and info.filename.endswith("/byteorder"):
                data = b"big"
            if change == "byte order" and "/data/" in info.filename:
                data = np.frombuffer(data, "<f4").astype(">f4").tobytes()
            kind = zipfile.ZIP_DEFLATED if change == "compressed" else zipfile.ZIP_STORED
            new.writestr(info.filename, data, kind)
    source = StateDictSource(tmp_path / "x.pt")
    out = np.empty(12_000, np.uint8)
    source.read("w", 0, 12_000, out)
    source.close()
    assert out.tobytes() == torch_bytes(tensors["w"]).tobytes()


class Viewed:
    """A tensor that is pickled as any view of its storage, even one that reaches behind it."""

    def __init__(self, tensor: Any, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
        self.tensor, self.view = tensor, (offset, shape, stride)

    def __reduce__(self) -> Any:
        storage = torch.storage.TypedStorage(
            wrap_storage=self.tensor.untyped_storage(), dtype=self.tensor.dtype, _internal=True
        )
        return torch._utils._rebuild_tensor_v2, (storage, *self.view, False, OrderedDict())


@pytest.mark.parametrize(
    ("offset", "shape", "stride", "within"),
    [
        (0, (1000,), (1,), True),
        (990, (10,), (1,), True),
        (0, (10, 10), (110, 1), True),
        (0, (1001,), (1,), False),
        (991, (10,), (1,), False),
        (1, (10, 10), (110, 1), False),
        (0, (2,), (1000,), False),
        (3000, (1,), (1,), False),
    ],
)
def test_a_tensor_that_reaches_behind_its_storage_is_refused(
    offset: int, shape: tuple[int, ...], stride: tuple[int, ...], within: bool, tmp_path: Path
) -> None:
    """What lies there in the file is another tensor's."""
    tensors = {"w": torch.arange(1000.0), "other": torch.full((1000,), 7.0)}
    torch.save(tensors | {"w": Viewed(tensors["w"], offset, shape, stride)}, tmp_path / "x.pt")
    if not within:
        with pytest.raises(InvalidInput, match=r"x\.pt"):
            pack(tmp_path / "x.pt", tmp_path / "packed")
        assert not (tmp_path / "packed").exists()
        return
    pack(tmp_path / "x.pt", tmp_path / "packed")
    unpack(tmp_path / "packed", tmp_path / "out")
    view = tensors["w"].as_strided(shape, stride, offset)
    assert (tmp_path / "out").read_bytes() == _as_stock(tensors | {"w": view}, tmp_path / "stock")


def test_a_directory_of_state_dicts_is_compared_with_its_source(tmp_path: Path) -> None:
    source, packed, back = tmp_path / "source", tmp_path / "packed", tmp_path / "back"
    (source / "sub").mkdir(parents=True)
    names = {"pytorch_model-1.bin": "model-1", "sub/x.bin": "sub/x"}
    for i, name in enumerate(names):
        torch.save({f"w{i}": torch.arange(3000.0) + i}, source / name)
        (source / name).chmod(0o640 + i)
    index = {"metadata": {}, "weight_map": {f"w{i}": name for i, name in enumerate(names)}}
    (source / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    (source / "pytorch_model.bin.index.json").chmod(0o604)
    pack(source, packed)
    made = {f"{name}.safetensors" for name in names.values()} | {"model.safetensors.index.json"}
    found = {it.relative_to(packed).as_posix(): it for it in packed.rglob("*") if it.is_file()}
    assert found.keys() == made | {"tpde_manifest.json"}
    assert [oct(found[it].stat().st_mode & 0o777) for it in sorted(made)] == ["0o640", "0o604", "0o641"]
    assert verify(packed) == verify(packed, against=source) == []
    unpack(packed, back)
    weights = json.loads((back / "model.safetensors.index.json").read_text())["weight_map"]
    assert weights == {f"w{i}": f"{name}.safetensors" for i, name in enumerate(names.values())}
    for i, name in enumerate(names.values()):
        loaded = safetensors_torch.load_file(back / f"{name}.safetensors")
        assert torch.equal(loaded[f"w{i}"], torch.arange(3000.0) + i)
    torch.save({"w1": torch.arange(3000.0)}, source / "sub/x.bin")
    index["metadata"] = {"total_size": 5}
    (source / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    (source / "more.bin").touch()
    said = {it.message.replace(f"{tmp_path}/", "").partition(";")[0] for it in verify(packed, against=source)}
    assert said == {
        "tensor `w1`: byte 2 is 0x80, but 0x00 in the source",
        "`source/pytorch_model.bin.index.json` differs from what was packed",
        "`source/more.bin` was not packed: it is not in the packed directory",
    }
    (source / "pytorch_model-1.bin").unlink()
    said = {it.message.replace(f"{tmp_path}/", "") for it in verify(packed, against=source)}
    assert "`source/pytorch_model-1.bin` is missing from the source, or is no file" in said
