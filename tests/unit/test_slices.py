"""Slices of `safe_open` are those of NumPy's own indexing, for every dtype, and read no more than needed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.contents import fill
from support.files import pack_bytes, safetensors_bytes

import tpde
from tpde.access import TensorSlice
from tpde.errors import InvalidIndex, UnsupportedDtype
from tpde.files.reader import PackedFile
from tpde.format.container import TensorSpec
from tpde.frameworks import torch_bytes

torch = pytest.importorskip("torch")

from support.every_dtype import FILE, KNOWN, PLAIN, SHAPE, SPECS, bits_of, by_numpy, part_by_numpy  # noqa: E402


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
        assert bits_of(part[index]) == bits_of(part_by_numpy(dtype, index))


@settings(max_examples=30)
@given(st.sampled_from(["BF16", "F8_E5M2", "I64", "C64", "F32"]), indices())
def test_slices_of_torch_have_the_same_bits(dtype: str, index: Any) -> None:
    with tpde.safe_open(FILE, framework="pt") as opened:
        found = opened.get_slice(dtype)[index]
    needed = by_numpy(dtype)[index]
    assert tuple(found.shape) == needed.shape
    assert torch_bytes(found).tobytes() == needed.tobytes()


@pytest.mark.parametrize(
    "index", [(0, 0, 0, 0), (..., ...), 6, -7, (0, 5), (0, 0, 400), np.int8(-7), 1 << 70]
)
def test_indices_that_are_none_are_refused_as_numpy_refuses_them(index: Any) -> None:
    with tpde.safe_open(FILE, framework="np") as opened, pytest.raises(IndexError):
        opened.get_slice("BF16")[index]


@pytest.mark.parametrize("index", [slice(None, None, -1), (0, slice(None, None, -2))])
def test_steps_backwards_are_refused(index: Any) -> None:
    with tpde.safe_open(FILE, framework="np") as opened, pytest.raises(IndexError, match="steps start at 1"):
        opened.get_slice("BF16")[index]


@pytest.mark.parametrize(
    "part", [slice(None, None, 0), slice("0"), slice(1.0), slice(None, None, 1.5), slice(0, [1])]
)
def test_slices_that_are_none_are_refused(part: Any) -> None:
    """Python's and NumPy's errors say neither of what they speak, nor what can be taken."""
    with tpde.safe_open(FILE, framework="np") as opened:
        for index in (part, (0, part)):
            with pytest.raises(InvalidIndex, match=r"slice\(.*cannot be sliced by: .*steps start at 1"):
                opened.get_slice("BF16")[index]


@pytest.mark.parametrize(
    "index",
    [
        np.int64(-1),
        (np.uint8(2), np.int32(-3)),
        (..., np.uint64(7)),
        slice(np.int64(1), np.uint8(4), np.int16(2)),
        slice(-(1 << 70), 1 << 70, 1 << 70),
        (slice(True), 1),
    ],
)
def test_integers_of_numpy_and_beyond_64_bits_are_taken_as_numpy_takes_them(index: Any) -> None:
    for framework in ("np", "pt"):
        with tpde.safe_open(FILE, framework=framework) as opened:
            found = opened.get_slice("I64")[index]
        needed = by_numpy("I64")[index]
        assert tuple(found.shape) == needed.shape
        assert np.asarray(found).tobytes() == needed.tobytes()


@pytest.mark.parametrize("index", [True, np.True_, None, 1.0, "0", [0], (0, None)])
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


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this PyTorch has no dtype for F4")
def test_numbers_of_four_bits_are_sliced_in_pairs_behind_other_dimensions() -> None:
    """Indices count numbers in every dimension; PyTorch's last one counts pairs."""
    data = np.frombuffer(fill("normal", SPECS["F4"]), np.uint8).reshape(6, 5, 200)
    with tpde.safe_open(FILE, framework="pt") as opened:
        part = opened.get_slice("F4")
        for low, high in ((0, 4), (204, 300), (398, 400), (7, 7), (0, 400)):
            for lead in ((slice(None), slice(None)), (slice(1, 6, 2), 3), (2, slice(0, 5, 4)), (...,)):
                found, needed = part[(*lead, slice(low, high))], data[(*lead, slice(low // 2, high // 2))]
                assert tuple(found.shape) == needed.shape
                assert found.contiguous().view(torch.uint8).numpy().tobytes() == needed.tobytes()
        for last in (3, -1, 398, slice(1, 4), slice(0, 3), slice(0, 400, 2), slice(0, 8, 5)):
            for lead in ((slice(None), slice(None)), (1, slice(None)), (1, 2), (...,)):
                with pytest.raises(UnsupportedDtype, match="inside a byte"):
                    part[(*lead, last)]


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


class Asked:
    """A tensor of numbers that notes what is read of it, in elements, and by how many threads."""

    def __init__(self, *shape: int) -> None:
        self.spec, self.reads = TensorSpec("I32", shape), list[tuple[int, int, int]]()
        self.whole = np.arange(self.spec.nbytes // 4, dtype=np.int32).reshape(shape)

    def read(self, begin: int, end: int, out: Any, threads: int) -> None:
        self.reads.append((begin // 4, end // 4, threads))
        out[:] = self.whole.reshape(-1).view(np.uint8)[begin:end]

    def read_all(self, threads: int) -> Any:
        out = np.empty(self.spec.nbytes, np.uint8)
        self.read(0, out.size, out, threads)
        return out


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
    assert bits_of(part[index]) == bits_of(tensor.whole[index])
    assert tensor.reads == [(*read, 3)]
    assert len(placed) == 1


def test_scalars_are_indexed_by_nothing() -> None:
    tensor = Asked()
    part = TensorSlice(tensor, "np", 1, lambda it: it)  # type: ignore[arg-type]
    assert (part[()].tolist(), part[...].tolist(), part.get_shape()) == (0, 0, [])
    with pytest.raises(IndexError, match="1 indices for a tensor of 0 dimensions"):
        part[0]
