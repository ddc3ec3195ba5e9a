"""A file cut anywhere is `Truncated`, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.contents import fill, rng, spec_of
from support.files import pack_bytes, safetensors_bytes

from tpde.errors import Truncated
from tpde.files.operations import unpack, verify
from tpde.files.reader import PackedFile


def _packed(words: int) -> bytes:
    tensors = {
        "a.weight": (spec_of("BF16", words), "normal"),
        "b.constant": (spec_of("F32", words), "constant"),
        "c.plain": (spec_of("U8", 77), "random"),
        "d.ids": (spec_of("I64", words), "ascending"),
    }
    return pack_bytes(
        safetensors_bytes({n: (s, fill(c, s)) for n, (s, c) in tensors.items()}, {"format": "pt"})
    )


def test_every_prefix_of_a_small_file_is_truncated() -> None:
    packed = _packed(1100)
    assert 2_000 < len(packed) < 10_000
    with PackedFile(packed) as file:
        assert len(file.packed_names()) == 3
    for size in range(len(packed)):
        with pytest.raises(Truncated, match="fetch the rest"):
            PackedFile(packed[:size])


def test_random_prefixes_of_a_larger_file_are_truncated() -> None:
    packed = _packed(250_000)
    assert len(packed) > 300_000
    for size in rng("prefixes").integers(0, len(packed), 500):
        with pytest.raises(Truncated, match="fetch the rest"):
            PackedFile(memoryview(packed)[:size])


def test_a_cut_file_on_disk_is_truncated_for_every_command(tmp_path: Path) -> None:
    packed, path = _packed(5_000), tmp_path / "cut.safetensors"
    for size in rng("files").integers(0, len(packed), 20):
        path.write_bytes(packed[:size])
        with pytest.raises(Truncated, match=r"cut\.safetensors"):
            verify(path)
        with pytest.raises(Truncated, match=r"cut\.safetensors"):
            unpack(path, tmp_path / "out.safetensors")
        assert [p.name for p in tmp_path.iterdir()] == ["cut.safetensors"]
