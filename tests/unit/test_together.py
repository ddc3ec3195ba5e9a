"""Small tensors are read many at a time, and each is checked and compared as if it were alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.contents import fill, rng
from support.files import MemorySource, pack_bytes, safetensors_bytes, saved_again, unpack_bytes, verify_bytes

import tpde
from tpde.codec.selection import MIN_BYTES
from tpde.errors import Corrupt, Truncated
from tpde.files.reader import PackedFile
from tpde.format.container import TensorSpec
from tpde.io.small_reads import batches, read_together
from tpde.io.sources import BytesSource

Tensors = dict[str, tuple[TensorSpec, bytes]]
DATA = bytes(range(256)) * 4


class _Counting(BytesSource):
    """Notes what is read."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.reads: list[tuple[int, int]] = []

    def read_into(self, offset: int, out: memoryview) -> None:
        self.reads.append((offset, out.nbytes))
        super().read_into(offset, out)


@given(st.lists(st.tuples(st.integers(0, 900), st.integers(0, 124)), max_size=20))
def test_what_lies_anywhere_is_read_in_the_order_asked_for(places: list[tuple[int, int]]) -> None:
    found = read_together(BytesSource(DATA), places)
    assert [bytes(it) for it in found] == [DATA[offset : offset + size] for offset, size in places]


def test_what_lies_side_by_side_is_read_at_once() -> None:
    source = _Counting(DATA)
    places = [(30, 10), (10, 0), (10, 20), (100, 1), (0, 10), (102, 8), (110, 0), (300, 0)]
    read_together(source, places)
    assert source.reads == [(0, 40), (100, 1), (102, 8)]
    assert read_together(source, []) == []
    assert len(source.reads) == 3
    with pytest.raises(Truncated):
        read_together(source, [(0, 5), (1020, 5)])


@given(st.lists(st.tuples(st.booleans(), st.sampled_from([0, 1, 700, 1023, 1024, 1025, 2049])), max_size=6))
def test_batches_keep_the_order_and_their_size(runs: list[tuple[bool, int]]) -> None:
    small = [kind for kind, count in runs for _ in range(count)]
    found = list(batches(map(str, range(len(small))), lambda name: small[int(name)]))
    assert [name for _, names in found for name in names] == [str(i) for i in range(len(small))]
    assert all(0 < len(names) <= 1024 for _, names in found)
    assert all(kind is small[int(name)] for kind, names in found for name in names)


def _mixed(count: int = 2500) -> Tensors:
    """Tensors of every kind, in no order: small ones, apart and side by side, empty ones, packed ones."""
    made: Tensors = {}
    for i in range(count):
        size = [7, 128, 0, 33, 256, 1, MIN_BYTES // 2 - 1][i % 7]
        spec = TensorSpec("BF16", (size,))
        made[f"layers.{i % 3}.{i}.w"] = spec, rng(i).bytes(spec.nbytes)
        if i % 400 == 5:
            large = TensorSpec("BF16", (20_000,))
            made[f"layers.{i % 3}.{i}.large"] = large, fill("normal", large)
        if i % 900 == 7:
            edge = TensorSpec("U8", (MIN_BYTES,))
            made[f"layers.{i % 3}.{i}.edge"] = edge, rng(i).bytes(edge.nbytes)
    return made


def test_tensors_of_every_kind_come_back() -> None:
    source = safetensors_bytes(_mixed(), {"format": "pt"})
    packed = pack_bytes(source)
    assert unpack_bytes(packed) == source
    assert verify_bytes(packed) == []
    again = saved_again(packed)
    assert verify_bytes(again) == []
    with PackedFile(unpack_bytes(again)) as one, PackedFile(source) as other:
        assert {name: bytes(one.read(name)) for name in one.specs} == {
            name: bytes(other.read(name)) for name in other.specs
        }


def test_small_tensors_of_any_source_are_read_alike() -> None:
    made = _mixed(30)
    names = [name for name, (spec, _) in made.items() if spec.nbytes < MIN_BYTES][::-1]
    found = MemorySource(safetensors_bytes(made)).read_small(names)
    assert [bytes(it) for it in found] == [made[name][1] for name in names]


def _damaged(packed: bytes, names: list[str]) -> bytes:
    out = bytearray(packed)
    with PackedFile(packed) as file:
        for offset, _ in file.container.places(names):
            out[offset] ^= 1
    return bytes(out)


def test_each_small_tensor_that_is_damaged_is_named(tmp_path: Path) -> None:
    made = _mixed()
    small = [name for name, (spec, _) in made.items() if 0 < spec.nbytes < MIN_BYTES]
    source, bad = safetensors_bytes(made), [small[0], small[1], small[1500], small[-1]]
    path = tmp_path / "packed.safetensors"
    path.write_bytes(_damaged(pack_bytes(source), bad))
    found = tpde.verify(path)
    assert {it.tensor for it in found} == set(bad)
    assert len(found) == len(bad)
    assert all("the bytes hash to" in it.message for it in found)
    with pytest.raises(Corrupt, match="the bytes hash to") as told:
        tpde.unpack(path, tmp_path / "back.safetensors")
    assert told.value.tensor in bad
    assert [it.name for it in tmp_path.iterdir()] == ["packed.safetensors"]


@pytest.mark.parametrize("at", [0, 1, 1500, -1])
def test_each_small_tensor_that_differs_from_the_source_is_named(at: int, tmp_path: Path) -> None:
    made = _mixed()
    small = [name for name, (spec, _) in made.items() if 0 < spec.nbytes < MIN_BYTES]
    name = small[at]
    spec, data = made[name]
    other = bytearray(data)
    other[-1] ^= 0x80
    plain, packed = tmp_path / "plain.safetensors", tmp_path / "packed.safetensors"
    packed.write_bytes(pack_bytes(safetensors_bytes(made)))
    plain.write_bytes(safetensors_bytes(made))
    assert tpde.verify(packed, against=plain) == []
    plain.write_bytes(safetensors_bytes(made | {name: (spec, bytes(other))}))
    (found,) = tpde.verify(packed, against=plain)
    assert found.tensor == name
    assert f"byte {len(data) - 1} is {data[-1]:#04x}, but {other[-1]:#04x} in the source" in found.message
    # The same bytes as other numbers, and as other ones of the same size.
    for kind in (TensorSpec("F16", spec.shape), TensorSpec("BF16", (1, *spec.shape))):
        plain.write_bytes(safetensors_bytes(made | {name: (kind, data)}))
        header, found = tpde.verify(packed, against=plain)
        assert "the source's header differs" in header.message
        assert found.tensor == name
        assert f"but {kind.dtype} {list(kind.shape)} in the source" in found.message
    del made[name]
    plain.write_bytes(safetensors_bytes(made))
    missing, header = tpde.verify(packed, against=plain)
    assert missing.tensor == name
    assert "missing from the source file" in missing.message


def test_the_hash_of_a_whole_file_has_its_small_tensors(tmp_path: Path) -> None:
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    plain.mkdir()
    (plain / "model.safetensors").write_bytes(safetensors_bytes(_mixed()))
    tpde.pack(plain, packed)
    assert tpde.verify(packed, against=plain) == []
