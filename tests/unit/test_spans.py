"""Spans of packed weights: their bits, which chunks are decoded for them, and where runs of them go."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.codecs import CASES, Case, pack_everything
from support.contents import fill

torch = pytest.importorskip("torch", reason="needs torch")

import tpde.torch as packed_torch  # noqa: E402
from tpde.codec.blob import BlobReader  # noqa: E402
from tpde.errors import Corrupt  # noqa: E402
from tpde.files.tensor_writer import TensorWriter  # noqa: E402
from tpde.format.constants import DTYPES  # noqa: E402
from tpde.format.container import TensorSpec  # noqa: E402
from tpde.frameworks import to_torch, torch_shape  # noqa: E402
from tpde.io.sinks import BytesSink  # noqa: E402
from tpde.loading import checkpoint_files as checkpoints  # noqa: E402
from tpde.loading.checkpoint_files import Checkpoint  # noqa: E402
from tpde.weights.launch import upload  # noqa: E402
from tpde.weights.packed_tensor import PackedTensor  # noqa: E402
from tpde.weights.resident import Resident  # noqa: E402
from tpde.weights.source import ALIGN  # noqa: E402
from tpde.weights.span import Span, joined  # noqa: E402

CPU = torch.device("cpu")
ROWS, WIDTH = 24, 2000  # words: 5.9 chunks of 8192
PACKED = [case for case in CASES if case.code is not None]


def _weight(case: Case, dtype: str, patch: pytest.MonkeyPatch) -> tuple[PackedTensor, bytes]:
    pack_everything(patch)
    spec = TensorSpec(dtype, (ROWS, WIDTH * 8 // DTYPES[dtype].bits * DTYPES[dtype].word_bytes))
    data = fill(case.contents[0] if case.name == "constant" else "normal", spec)
    sink = BytesSink()
    writer = TensorWriter(spec, sink, 0, threads=1, codec=case.codec, may_pack=True, background=None)
    writer.write(np.frombuffer(data, np.uint8))
    size = writer.finish().size
    source = Resident(torch.frombuffer(sink.data, dtype=torch.uint8)[:size].clone(), "w")
    assert source.header.codec == case.code
    return PackedTensor(source), data


def _bytes(tensor: Any) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


class Decoded:
    """The chunks that are decoded."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.chunks: list[int] = []
        decode = BlobReader.decode

        def noted(reader: Any, first: int, last: int, *rest: Any) -> None:
            self.chunks += range(first, last + 1)
            decode(reader, first, last, *rest)

        patch.setattr(BlobReader, "decode", noted)


@pytest.mark.parametrize("dtype", sorted(set(DTYPES) - {"F6_E2M3", "F6_E3M2"}))
@pytest.mark.parametrize("case", PACKED, ids=lambda case: case.name)
def test_bits(case: Case, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows from the start, to the end, within a chunk, over several, along chunks, none and all."""
    weight, data = _weight(case, dtype, monkeypatch)
    row, chunk = len(data) // ROWS, weight.sources[0].header.chunk_words * DTYPES[dtype].word_bytes
    size = weight.dtype.itemsize
    cuts = [(0, row), (0, 8 * row), (8 * row, 16 * row), (16 * row, 24 * row), (row, row + size)]
    cuts += [(23 * row, 24 * row), (chunk, 2 * chunk), (chunk - size, chunk + size), (0, len(data))]
    cuts += [(0, 0), (chunk, chunk), (row, row), (len(data), len(data))]
    for begin, end in cuts:
        span = weight.span(begin, end)
        assert span.nbytes == end - begin
        assert span.whole == (span.nbytes == len(data))
        found = span.decoded()
        assert _bytes(found) == data[begin:end], (begin, end)
        assert found.data_ptr() % size == 0
        assert found.storage_offset() % ALIGN == begin % ALIGN, "an address is as round as in the weight"
        out = torch.empty(span.nbytes // weight.dtype.itemsize, dtype=weight.dtype)
        span.decode_to(out)
        assert _bytes(out) == data[begin:end], (begin, end)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F8_E4M3", "F32"])
def test_a_cast(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, data = _weight(PACKED[0], dtype, monkeypatch)
    size, begin, end = weight.dtype.itemsize, 5 * WIDTH + 3, 19 * WIDTH + 7
    plain = torch.from_numpy(np.frombuffer(data, np.uint8).copy()).view(weight.dtype)
    for wanted in (torch.float32, torch.bfloat16, torch.float64):
        out = torch.empty(end - begin, dtype=wanted)
        weight.span(begin * size, end * size).decode_to(out)
        assert _bytes(out) == _bytes(plain[begin:end].to(wanted))


@pytest.mark.parametrize("size", [1, 16384, 40_000, 1 << 30])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_decoded(size: int, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chunks that hold the span, each once, whether straight to where they go or in pieces."""
    weight, data = _weight(PACKED[0], "BF16", monkeypatch)
    plain = torch.frombuffer(bytearray(data), dtype=torch.bfloat16)
    seen, row = Decoded(monkeypatch), len(data) // ROWS
    monkeypatch.setattr(Span, "pieces", functools.partialmethod(Span.pieces, size))
    for begin, end in ((0, len(data)), (8 * row, 16 * row), (row + 6, 8 * row), (row, row)):
        span = weight.span(begin, end)
        pieces = list(span.pieces())
        assert joined(pieces) == [span] * (end > begin)
        assert all(it.end % 16384 == 0 for it in pieces[:-1])
        assert all(it.nbytes < size + 16384 for it in pieces)
        seen.chunks.clear()
        out = torch.empty((end - begin) // 2, dtype=dtype)
        span.decode_to(out)
        assert _bytes(out) == _bytes(plain[begin // 2 : end // 2].to(dtype))
        assert seen.chunks == list(range(begin // 16384, -(-end // 16384)) if end > begin else [])


def test_damage_is_told_by_spans_that_need_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, data = _weight(PACKED[0], "BF16", monkeypatch)
    source, out = weight.sources[0], torch.empty(len(data) // 2, dtype=torch.bfloat16)
    chunk, size = 3, source.header.chunk_words * 2
    reader = source.host_reader()
    source.blob[int(reader.offsets[chunk]) + 40] ^= 0x10
    for begin, end in ((0, chunk * size), ((chunk + 1) * size, len(data))):
        assert _bytes(weight.span(begin, end).decoded()) == data[begin:end]
    for begin, end in (
        (0, len(data)),
        (chunk * size, chunk * size + 2),
        (chunk * size - 2, chunk * size + 2),
    ):
        span = weight.span(begin, end)
        for decode in (span.decoded, lambda span=span: span.decode_to(out[: span.nbytes // 2])):
            with pytest.raises(Corrupt) as caught:
                decode()
            assert (caught.value.tensor, caught.value.chunk) == ("w", chunk)


@pytest.mark.parametrize("room", [0, 100, 40_000, 1 << 20])
def test_a_span_has_the_room_that_is_asked_for(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what its chunks need, if that is more: the allocator is to give memory that it has."""
    weight, data = _weight(PACKED[0], "BF16", monkeypatch)
    for begin, end in ((0, 600), (20_000, 20_600), (16_384, 50_000), (0, len(data))):
        first, last = begin // 16384, -(-end // 16384)
        held = weight.span(begin, end).decoded(room).untyped_storage().nbytes()
        assert held == room or room < held <= (last - first) * 16384 + 1024
        assert _bytes(weight.span(begin, end).decoded(room)) == data[begin:end]
    held = weight.decoded(room).untyped_storage().nbytes()
    assert held == max(room, -(-len(data) // 512) * 512)


def test_what_is_decoded_in_inference_mode_is_ordinary(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be kept, and be used while gradients are recorded."""
    weight, _ = _weight(PACKED[0], "BF16", monkeypatch)
    with torch.inference_mode():
        found = [weight.decoded(), weight.span(512, 1024).decoded(), upload(np.zeros(3, np.uint8), CPU)]
    assert not any(it.is_inference() for it in found)


def test_of_a_weight_of_several_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a span cuts: the start of one, its end, all of it, what lies around an end."""
    weight, data = _weight(PACKED[0], "BF16", monkeypatch)
    three = PackedTensor([*weight.sources] * 3, (3, ROWS, len(data) // 2 // ROWS))
    whole, size = data * 3, len(data)
    ends = [0, 2, 16_384, size - 2, size, size + 2, 2 * size - 512, 2 * size, 2 * size + 4, 3 * size]
    for begin, end in ((a, b) for a in ends for b in ends if a <= b):
        span = three.span(begin, end)
        assert span.whole == (end - begin == 3 * size)
        assert _bytes(span.decoded()) == whole[begin:end]
        for dtype in (torch.bfloat16, torch.float32):
            out = torch.empty((end - begin) // 2, dtype=dtype)
            span.decode_to(out)
            plain = torch.frombuffer(bytearray(whole[begin:end]) or bytearray(2), dtype=torch.bfloat16)
            assert _bytes(out) == _bytes(plain[: out.numel()].to(dtype))


def test_only_a_whole_weight_is_decoded_straight_to_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """To a round address of the device that it is on; all else by way of pieces."""
    meta, ways = torch.device("meta"), list[str]()
    monkeypatch.setattr(Span, "pieces", lambda self: ways.append("pieces") or [])
    monkeypatch.setattr(Span, "_decode_on_host", lambda self, out: ways.append("host"))

    def way(begin: int, end: int, out: Any, at: int = 0, device: Any = meta) -> str:
        tensor: Any = SimpleNamespace(
            nbytes=4096, device=device, dtype=torch.bfloat16, decode_into=lambda _: ways.append("whole")
        )
        ways.clear()
        with monkeypatch.context() as addresses:
            addresses.setattr(torch.Tensor, "data_ptr", lambda _: at)
            Span(tensor, begin, end).decode_to(out)
        (found,) = ways
        return found

    there, here = (torch.empty(2048, dtype=torch.bfloat16, device=it) for it in (meta, CPU))
    assert way(0, 4096, there) == way(0, 4096, there, at=1024) == "whole"
    assert way(0, 4096, there, at=256) == "pieces"
    assert way(0, 2048, there[:1024]) == way(2048, 4096, there[:1024]) == "pieces"
    assert way(0, 4096, there.float()) == "pieces"
    assert way(0, 4096, here) == way(0, 4096, there, device=CPU) == "pieces"
    assert way(0, 4096, here, device=CPU) == way(0, 2048, here[:1024], device=CPU) == "host"


def test_pieces_of_large_weights_are_small() -> None:
    """Of up to 32 MiB, which `malloc` keeps for the next."""
    chunk = 8192
    header = SimpleNamespace(
        word_bytes=2,
        chunk_of=lambda word: word // chunk,
        chunk_range=lambda a, b: (a * chunk, (b + 1) * chunk),
    )
    size = 1 << 28
    weight: Any = SimpleNamespace(parts=[(SimpleNamespace(nbytes=size, header=header), 0)], nbytes=size)
    pieces = list(Span(weight, 512, size).pieces())
    assert joined(pieces) == [Span(weight, 512, size)]
    assert all(1 << 20 < it.nbytes <= 32 << 20 for it in pieces)


def test_joined() -> None:
    weight, other = "a weight", "another"
    parts: list[Span[Any]] = [
        Span(weight, 0, 4),
        Span(weight, 4, 4),
        Span(weight, 4, 9),
        Span(other, 9, 12),
        Span(other, 0, 0),
        Span(weight, 12, 16),
        Span(weight, 0, 2),
    ]
    expected = [Span(weight, 0, 9), Span(other, 9, 12), Span(weight, 12, 16), Span(weight, 0, 2)]
    assert joined(parts) == expected


# ---- of a file ----

DTYPES_CUT = ["BF16", "F16", "F32", "F64", "F8_E4M3", "F8_E5M2", "I64", "U8", "C64", "BOOL", "F4"]


@pytest.fixture
def fused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Fused weights of a file: three matrices of 100 rows, and four experts of two of 96 rows."""
    pack_everything(monkeypatch)

    def make(dtype: str) -> tuple[Checkpoint, dict[str, Any]]:
        width = 240 * 8 // DTYPES[dtype].bits * DTYPES[dtype].word_bytes
        specs = {"qkv": TensorSpec(dtype, (300, width)), "experts": TensorSpec(dtype, (4, 192, width))}
        plain = {
            name: to_torch(np.frombuffer(bytearray(fill("normal", spec)), np.uint8), spec)
            for name, spec in specs.items()
        }
        packed_torch.save_file(plain, tmp_path / "a.safetensors")
        found = Checkpoint([tmp_path / "a.safetensors"])
        assert set(found.packed) == set(plain)
        return found, plain

    return make


@pytest.mark.parametrize("dtype", DTYPES_CUT)
@pytest.mark.parametrize("small", [True, False])
def test_cut_out_of_a_file(dtype: str, small: bool, fused: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As conversions cut: in three, in experts, in gates and ups."""
    monkeypatch.setattr("tpde.loading.runs.STRIP_BYTES", 1)
    monkeypatch.setattr(checkpoints, "SMALL_BYTES", 1 << 30 if small else 0)
    if not hasattr(torch, "float4_e2m1fn_x2") and dtype == "F4":
        pytest.skip("this PyTorch has no F4")
    checkpoint, plain = fused(dtype)
    with checkpoint:
        qkv, experts = (checkpoint.packed[name].run for name in ("qkv", "experts"))
        assert tuple(qkv.shape) == torch_shape(checkpoint.packed["qkv"].spec)
        cuts = [
            (torch.chunk(qkv, 3), plain["qkv"].view(torch.uint8).chunk(3)),
            (torch.split(qkv, [0, 299, 1]), plain["qkv"].view(torch.uint8).split([0, 299, 1])),
            (torch.unbind(experts), plain["experts"].view(torch.uint8).unbind()),
            (torch.chunk(experts, 2, dim=1), plain["experts"].view(torch.uint8).chunk(2, dim=1)),
            ((experts,), (plain["experts"].view(torch.uint8),)),
        ]
        for made, expected in cuts:
            found = checkpoint.decode(made, CPU)
            for run, tensor, want in zip(made, found, expected, strict=True):
                assert tensor.dtype is plain["qkv"].dtype
                assert tensor.shape == run.shape
                assert tensor.is_contiguous()
                assert _bytes(tensor) == _bytes(want)


def test_of_what_is_cut_off_nothing_is_read(fused: Any) -> None:
    """Damage in the last third does not matter to the first."""
    checkpoint, plain = fused("BF16")
    stored = checkpoint.packed["qkv"]
    with checkpoint:
        path = stored.extent.source.name
        data = bytearray(Path(path).read_bytes())
        data[stored.extent.offset + stored.extent.size - 5000] ^= 1
        Path(path).write_bytes(data)
        first, _, last = torch.chunk(stored.run, 3)
        (found,) = checkpoint.decode([first], CPU)
        assert _bytes(found) == _bytes(plain["qkv"][:100])
        with pytest.raises(Corrupt, match="`qkv`"):
            checkpoint.decode([last], CPU)
