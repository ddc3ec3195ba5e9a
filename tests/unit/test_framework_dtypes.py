"""Every dtype that NumPy and PyTorch have comes back bit for bit; those that NumPy lacks are named."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.contents import CONTENTS, fill
from support.files import pack_bytes, safetensors_bytes

import tpde
import tpde.numpy
from tpde.errors import MissingDependency, UnsupportedDtype
from tpde.format.constants import DTYPES
from tpde.format.container import TensorSpec
from tpde.frameworks import _NUMPY, _TORCH, torch_bytes

torch = pytest.importorskip("torch")

from support.every_dtype import FILE, KNOWN, SHAPE, SPECS, bits_of, by_numpy  # noqa: E402

import tpde.torch  # noqa: E402

SUB_BYTE = [d for d in DTYPES if DTYPES[d].bits < 8]


@pytest.mark.parametrize("dtype", SUB_BYTE)
def test_dtypes_that_numpy_lacks_are_named(dtype: str) -> None:
    with tpde.safe_open(FILE, framework="np") as opened:
        with pytest.raises(UnsupportedDtype, match=dtype):
            opened.get_tensor(dtype)
        with pytest.raises(UnsupportedDtype, match=dtype):
            opened.get_slice(dtype)[0]


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


@pytest.mark.parametrize("content", CONTENTS)
def test_arrays_saved_come_back_bit_for_bit(content: str, tmp_path: Path) -> None:
    arrays: dict[str, Any] = {}
    for dtype in KNOWN:
        spec = TensorSpec(dtype, (3, 700))
        arrays[dtype] = np.frombuffer(fill(content, spec), by_numpy(dtype).dtype).reshape(3, 700)
        arrays[f"{dtype}.t"] = arrays[dtype].T
    arrays["scalar"], arrays["empty"] = np.array(3, np.int16), np.empty((0, 4), np.float32)
    arrays["swapped"] = np.arange(600, dtype=">i4")
    tpde.numpy.save_file(arrays, tmp_path / "x", metadata={"a": "b"})
    data = tpde.numpy.save(arrays, metadata={"a": "b"})
    assert data == (tmp_path / "x").read_bytes()
    arrays["swapped"] = arrays["swapped"].astype("<i4")
    for found in (tpde.numpy.load_file(tmp_path / "x"), tpde.numpy.load(data)):
        assert {n: bits_of(a) for n, a in found.items()} == {n: bits_of(a) for n, a in arrays.items()}


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


def test_tensors_come_on_the_host_under_another_default_device() -> None:
    data = tpde.torch.save({"empty": torch.empty(0, 4), "full": torch.ones(4)})
    with torch.device("meta"):
        found = tpde.torch.load(data)
    assert {it.device.type for it in found.values()} == {"cpu"}
