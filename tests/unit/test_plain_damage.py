"""A tensor that is stored plain has one hash, which is compared wherever all of it is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.plain_damage import damage_plain

import tpde
import tpde.numpy
import tpde.torch
from tpde.errors import Corrupt
from tpde.files.checked_reads import check_plain
from tpde.files.reader import PackedFile

torch = pytest.importorskip("torch")


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    draw = np.random.default_rng(0)
    weights = {"weight": (0.02 * draw.standard_normal((300, 100))).astype(np.float32)}
    weights |= {"norm": draw.standard_normal((20, 10)).astype(np.float32), "empty": np.zeros(0, np.float32)}
    tpde.numpy.save_file(weights, tmp_path / "x.safetensors")
    assert damage_plain(tmp_path / "x.safetensors", "norm") == "norm"
    return tmp_path / "x.safetensors"


def _all_of_a_slice(path: Path) -> Any:
    with tpde.safe_open(path) as file:
        return file.get_slice("norm")[:]


def _tensor(path: Path) -> Any:
    with tpde.safe_open(path, framework="np") as file:
        return file.get_tensor("norm")


def _in_pieces(path: Path) -> None:
    with PackedFile(path) as file:
        check_plain(file, file.specs)


@pytest.mark.parametrize(
    "read",
    [
        tpde.numpy.load_file,
        lambda path: tpde.numpy.load(path.read_bytes()),
        tpde.torch.load_file,
        lambda path: tpde.torch.load(path.read_bytes()),
        _tensor,
        _all_of_a_slice,
        _in_pieces,
    ],
)
def test_damage_is_found(read: Callable[[Path], Any], damaged: Path) -> None:
    with pytest.raises(
        Corrupt, match=r"tensor `norm`: the bytes hash to .* was packed; .*fetch it"
    ) as caught:
        read(damaged)
    assert caught.value.tensor == "norm"


def test_other_tensors_and_parts_are_read(damaged: Path) -> None:
    with tpde.safe_open(damaged) as file:
        assert file.get_tensor("weight").shape == (300, 100)
        assert file.get_tensor("empty").shape == (0,)
        assert file.get_slice("norm")[1:].shape == (19, 10)


def test_what_lost_its_hashes_is_read(damaged: Path) -> None:
    """Another tool saved the file, and dropped its metadata."""
    safetensors = pytest.importorskip("safetensors.numpy")
    safetensors.save_file(safetensors.load_file(damaged), damaged)
    assert tpde.numpy.load_file(damaged)["norm"].shape == (20, 10)
    _in_pieces(damaged)
