"""Packed files are safetensors files to the stock library, and survive being saved again by it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.contents import fill
from support.files import safetensors_bytes

from tpde.files.operations import pack, unpack, verify
from tpde.files.reader import PackedFile
from tpde.format.container import TensorSpec

safetensors = pytest.importorskip("safetensors")
TENSORS = {
    "model.layers.0.weight": (TensorSpec("BF16", (300, 200)), "specials"),
    "model.layers.1.weight": (TensorSpec("F32", (128, 64)), "normal"),
    "model.layers.1.experts": (TensorSpec("F16", (4, 30, 40)), "normal"),
    "model.bias": (TensorSpec("F32", (7,)), "normal"),
    "model.zero": (TensorSpec("F64", (5_000,)), "zeros"),
    "model.noise": (TensorSpec("U8", (3_001,)), "random"),
    "model.scalar": (TensorSpec("I64", ()), "random"),
    "model.empty": (TensorSpec("F32", (0, 4)), "zeros"),
}


@pytest.fixture
def paths(tmp_path: Path) -> tuple[Path, Path, Path]:
    """Give a source, its packed form, and a place for what another tool makes of that."""
    source, packed = tmp_path / "source.safetensors", tmp_path / "packed.safetensors"
    data = {name: (spec, fill(content, spec)) for name, (spec, content) in TENSORS.items()}
    source.write_bytes(safetensors_bytes(data, {"format": "pt"}))
    assert pack(source, packed).packed == 4
    return source, packed, tmp_path / "saved.safetensors"


def _check(packed: Path, source: Path) -> None:
    """Expect the same bits of every tensor from a packed file, and another header."""
    with PackedFile(packed) as file, PackedFile(source) as original:
        assert file.specs.keys() == original.specs.keys()
        for name, spec in original.specs.items():
            assert file.specs[name] == spec
            assert file.read(name).tobytes() == original.read(name).tobytes(), name
    assert verify(packed) == []
    (problem,) = verify(packed, against=source)
    assert problem.message == "the source's header differs from the one that unpacking gives"


def test_the_stock_library_opens_packed_files(paths: tuple[Path, Path, Path]) -> None:
    source, packed, _ = paths
    with safetensors.safe_open(packed, "np") as file, PackedFile(packed) as ours:
        assert set(file.keys()) == set(ours.container.entries)
        assert file.metadata() == ours.container.metadata
        plain = set(TENSORS) & set(file.keys())
        assert plain == {"model.bias", "model.noise", "model.scalar", "model.empty"}
        with safetensors.safe_open(source, "np") as original:
            for name in plain:
                assert file.get_tensor(name).tobytes() == original.get_tensor(name).tobytes()


def test_saved_again_with_torch_they_still_read(paths: tuple[Path, Path, Path]) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file, save_file

    source, packed, saved = paths
    save_file(load_file(packed), saved)
    _check(saved, source)
    unpack(saved, saved.with_name("unpacked.safetensors"))
    found, needed = load_file(saved.with_name("unpacked.safetensors")), load_file(source)
    assert found.keys() == needed.keys()
    for name, tensor in needed.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (found[name], tensor)]
        assert torch.equal(*bits), name


def test_saved_again_with_numpy_and_metadata_they_still_read(paths: tuple[Path, Path, Path]) -> None:
    from safetensors.numpy import load_file, save_file

    source, packed, saved = paths
    tensors = load_file(packed)
    save_file(tensors, saved, {"format": "np", "note": "kept"})
    _check(saved, source)
    unpack(saved, saved.with_name("unpacked.safetensors"))
    with safetensors.safe_open(saved.with_name("unpacked.safetensors"), "np") as file:
        assert file.metadata() == {"format": "np", "note": "kept"}
        assert np.array_equal(file.get_tensor("model.noise"), tensors["model.noise"])


def test_part_of_a_packed_file_saved_by_another_tool_reads_alone(paths: tuple[Path, Path, Path]) -> None:
    from safetensors.numpy import load_file, save_file

    source, packed, saved = paths
    tensors = {k: v for k, v in load_file(packed).items() if k.startswith("model.layers.1")}
    save_file(tensors, saved)
    with PackedFile(saved) as file, PackedFile(source) as original:
        assert set(file.specs) == {"model.layers.1.weight", "model.layers.1.experts"}
        for name in file.specs:
            assert file.read(name).tobytes() == original.read(name).tobytes()
    assert verify(saved) == []


def test_what_the_stock_library_wrote_is_restored_byte_for_byte(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    dtypes = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn]
    tensors = {
        f"layers.{i}.w": (torch.randn(64, 90, generator=generator) * 0.02).to(dtype)
        for i, dtype in enumerate(dtypes)
    }
    tensors |= {"ids": torch.arange(3000), "mask": torch.ones(2000, dtype=torch.bool)}
    path = tmp_path / "a.safetensors"
    for metadata in (None, {"format": "pt"}, {"a": "1", "b": "é", "c": "", "": "x"}):
        save_file(tensors, path, metadata)
        pack(path, tmp_path / "b.safetensors", force=True)
        unpack(tmp_path / "b.safetensors", tmp_path / "c.safetensors", force=True)
        assert (tmp_path / "c.safetensors").read_bytes() == path.read_bytes()
