"""Rows of packed matrices, constants, and decoders of weights that lie together, on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from support.backends import MadeBackend  # noqa: E402
from support.contents import fill  # noqa: E402
from support.kernels import Card, OnCard, memory  # noqa: E402
from support.models import assert_same_bits  # noqa: E402
from support.packed import pack  # noqa: E402

from tpde.codec.blob import BlobReader, digest, write_constant  # noqa: E402
from tpde.cuda import decode  # noqa: E402
from tpde.errors import Corrupt, InvalidInput  # noqa: E402
from tpde.format.container import TensorSpec  # noqa: E402
from tpde.io.sinks import BytesSink  # noqa: E402
from tpde.io.sources import BytesSource  # noqa: E402
from tpde.nn import pack_tensor  # noqa: E402
from tpde.weights import rows as rows_of  # noqa: E402
from tpde.weights.decoder import Materializer, repeat  # noqa: E402
from tpde.weights.resident import Resident  # noqa: E402
from tpde.weights.rows import RowReader  # noqa: E402

ROWS, COLUMNS = 3000, 48
WEIGHT = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)


@pytest.fixture(scope="module")
def source() -> Any:
    made = pack_tensor(WEIGHT, "w")
    assert made is not None
    return made.sources[0]


@pytest.mark.parametrize("bad", [-1, ROWS, ROWS + 1, 1 << 40])
def test_rows_that_are_not_there_are_refused(source: Any, bad: int) -> None:
    reader = RowReader(source)
    assert_same_bits(reader(torch.tensor([0, ROWS - 1])), WEIGHT[[0, ROWS - 1]])
    with pytest.raises(IndexError, match=f"row {bad} of `w`, which has {ROWS}"):
        reader(torch.tensor([0, bad, 5]))


def test_only_chunks_that_hold_rows_are_decoded(source: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first and the last row, and two neighbours: not what lies between."""
    asked: list[tuple[int, int]] = []
    real = type(source).decode_on_host

    def noted(self: Any, begin: int, end: int, out: Any) -> None:
        asked.append((begin // (2 * COLUMNS), end // (2 * COLUMNS)))
        real(self, begin, end, out)

    monkeypatch.setattr(type(source), "decode_on_host", noted)
    ids = torch.tensor([ROWS - 1, 0, 1500, 1501, 0])
    assert_same_bits(RowReader(source)(ids), WEIGHT[ids])
    assert asked == [(0, 1), (1500, 1502), (ROWS - 1, ROWS)]


@pytest.mark.parametrize("dtype", ["BF16", "F32", "I64", "U8", "F64"])
def test_constants_are_filled_with_all_of_their_bits(dtype: str) -> None:
    """The first one is set, which is a sign for PyTorch's integers."""
    size = {"BF16": 2, "F32": 4, "I64": 8, "U8": 1, "F64": 8}[dtype]
    word = bytes(range(0xF1, 0xF1 + size))
    spec = TensorSpec(dtype, (16, 32))
    sink = BytesSink()
    count = write_constant(spec, word, digest(word * 512), sink, 0)
    source = Resident(torch.frombuffer(bytearray(sink.data[:count]), dtype=torch.uint8), "c")
    out = torch.zeros(spec.nbytes, dtype=torch.uint8)
    repeat(source, out)
    assert out.numpy().tobytes() == word * 512
    rows = RowReader(source)(torch.tensor([3, 1]))
    assert rows.view(torch.uint8).numpy().tobytes() == word * 64
    with pytest.raises(IndexError, match="row 16"):
        RowReader(source)(torch.tensor([16]))


def test_weights_that_are_decoded_together_are_on_one_device(source: Any) -> None:
    for device in (torch.device("cpu", 0), torch.device("meta")):
        with pytest.raises(InvalidInput, match="`w` is on cpu, the weights decoded with it on"):
            Materializer([(source, 0)], device)
    out = torch.zeros(2 * source.nbytes, dtype=torch.uint8)
    Materializer([(source, source.nbytes), (source, 0)], torch.device("cpu"))(out)
    assert np.array_equal(
        out.numpy().view(np.uint16), np.tile(WEIGHT.view(torch.int16).numpy().view(np.uint16).ravel(), 2)
    )


def test_indices_are_integers_where_the_matrix_is(source: Any) -> None:
    reader = RowReader(source)
    for ids in (torch.zeros(3), torch.zeros(3, dtype=torch.int16), torch.zeros(3, dtype=torch.bool)):
        with pytest.raises(RuntimeError, match="integers of 32 or 64 bits"):
            reader(ids)
    with pytest.raises(RuntimeError, match=r"asked for by torch\.int64 on meta"):
        reader(torch.zeros(3, dtype=torch.int64, device="meta"))
    for ids in (torch.zeros(0, dtype=torch.int64), torch.zeros((2, 0), dtype=torch.int32)):
        assert_same_bits(reader(ids), WEIGHT[ids.long()])


def test_each_run_of_rows_is_decoded_once(source: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows whose chunks touch are one run: also those of which one ends where the other's chunk begins."""
    words = source.header.chunk_words // COLUMNS  # whole rows of a chunk
    asked: list[tuple[int, int]] = []
    real = type(source).decode_on_host

    def noted(self: Any, begin: int, end: int, out: Any) -> None:
        asked.append((begin // (2 * COLUMNS), end // (2 * COLUMNS)))
        real(self, begin, end, out)

    monkeypatch.setattr(type(source), "decode_on_host", noted)
    for ids, runs in (
        ([0, words // 2], [(0, words // 2 + 1)]),
        ([0, words + 5], [(0, words + 6)]),
        ([0, 2 * words + 5], [(0, 1), (2 * words + 5, 2 * words + 6)]),
        ([words + 1, 2 * words + 5, 0], [(0, 2 * words + 6)]),
    ):
        asked.clear()
        assert_same_bits(RowReader(source)(torch.tensor(ids)), WEIGHT[ids])
        assert asked == runs


# ---- on a device, whose kernel is simulated ----


class Kernel:
    """Looks rows up at the addresses that it is given, and compares checksums of their chunks if asked to."""

    descriptors = np.zeros(0, np.uint8)
    blob: Any
    events: list[Any]
    row_bytes: int

    def __init__(self, item: Any, index: int) -> None:
        assert index == 0

    def launch(
        self, descriptors: int, status: int, stream: int, ids: int, count: int, out: int, check: bool
    ) -> None:
        reader = BlobReader(BytesSource(self.blob.numpy(), "w"), 0, self.blob.numel())
        header, size = reader.header, self.row_bytes
        chunks = list[int]()
        for number, row in enumerate(memory(ids, 8 * count).view("<i8").tolist()):
            first, last = (header.chunk_of(it // 2) for it in (row * size, (row + 1) * size - 2))
            chunks += range(first, last + 1)
            begin, end = (2 * it for it in header.chunk_range(first, last))
            words = np.zeros(end - begin, np.uint8)
            try:
                reader.decode(first, last, words)
            except Corrupt as error:
                if check:
                    memory(status, 16).view("<u4")[:] = [1, 0, error.chunk, 0]
            if out:
                memory(out + number * size, size)[:] = words[row * size - begin :][:size]
        self.events.append(("looked up" if out else "verified", check, sorted(set(chunks))))


@pytest.fixture
def on_card(monkeypatch: pytest.MonkeyPatch, launch_on: Any) -> Any:
    """What makes a reader on a device, and what happens there."""
    card, events = Card(monkeypatch, launch_on), list[Any]()
    monkeypatch.setattr(decode, "Rows", Kernel)
    monkeypatch.setattr(Kernel, "events", events, raising=False)
    monkeypatch.setattr(rows_of, "capturing", lambda _: card.recording)
    zeros = torch.zeros

    def locked(*size: Any, pin_memory: bool = False, **options: Any) -> Any:
        if pin_memory:
            events.append("locked")
        return zeros(*size, **options)

    monkeypatch.setattr(torch, "zeros", locked)

    class Stream:
        def synchronize(self) -> None:
            events.append("waited")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream())

    def make(weight: Any, *, settled: bool = True) -> Any:
        made = pack_tensor(weight, "w")
        assert made is not None
        packed: Any = OnCard(made.sources[0].blob, "w", card)
        packed.settled = settled
        packed.watched = []
        packed.watch = packed.watched.append
        monkeypatch.setattr(Kernel, "blob", packed.blob, raising=False)
        monkeypatch.setattr(Kernel, "row_bytes", weight.shape[1] * 2, raising=False)
        reader = RowReader(packed)
        reader.device = torch.device("cpu")  # where tensors are made
        return reader, events, card

    return make


def normal(*shape: int) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)


@pytest.mark.parametrize("shape", [(3000, 48), (700, 64), (7, 20_000), (1, 30_000), (90, 8192)])
def test_a_device_verifies_all_chunks_at_the_first_use(shape: tuple[int, int], on_card: Any) -> None:
    weight = normal(*shape)
    reader, events, _ = on_card(weight)
    last = shape[0] - 1
    wide = torch.tensor([[last, 0], [0, 0], [last, last]])
    for ids in (wide, wide.to(torch.int32), wide[:, 0], wide[::2, 1].to(torch.int32), wide.t()):
        assert_same_bits(reader(ids), weight[ids.long()])
    chunks = reader.packed.header.chunks
    assert events[:2] == [("verified", True, list(range(chunks))), "waited"]
    assert [it[:2] for it in events[2:]] == [("looked up", False)] * 5


def test_a_device_tells_of_damage_until_it_is_mended(on_card: Any) -> None:
    weight = normal(3000, 48)
    reader, events, _ = on_card(weight)
    blob = reader.packed.blob
    blob[reader.packed.header.blob_bytes - 3000] ^= 8
    for _ in range(2):
        with pytest.raises(Corrupt, match="`w`, chunk 17"):
            reader(torch.tensor([0]))
    assert [it for it in events if it[0] == "looked up"] == []
    blob[reader.packed.header.blob_bytes - 3000] ^= 8
    assert_same_bits(reader(torch.tensor([0])), weight[:1])
    assert events.count("waited") == 3


def test_while_a_graph_is_recorded_rows_are_checked_and_nobody_waits(on_card: Any) -> None:
    weight = normal(300, 48)
    reader, events, card = on_card(weight)
    card.recording = True
    assert_same_bits(reader(torch.tensor([5])), weight[[5]])
    assert [it[:2] for it in events] == [("looked up", True)]
    card.recording = False
    reader(torch.tensor([5]))
    assert [it[:2] if it != "waited" else it for it in events[1:]] == [
        ("verified", True),
        "waited",
        ("looked up", False),
    ]
    card.recording = True
    reader(torch.tensor([5]))
    assert events[-1][:2] == ("looked up", False)


@pytest.mark.parametrize("settled", [False, True])
def test_rows_of_the_hosts_memory_are_checked_each_time(settled: bool, on_card: Any) -> None:
    """Reports are locked memory then: nobody waits for them."""
    reader, events, _ = on_card(normal(300, 48), settled=settled)
    assert ("locked" in events) != settled
    for _ in range(2):
        reader(torch.tensor([5]))
    assert [it[1] for it in events if it[0] == "looked up"] == [not settled] * 2
    assert reader.packed.watched == [reader, reader]


@pytest.mark.parametrize("codec", ["zstd", "constant"])
def test_what_no_kernel_reads_is_looked_up_without(
    codec: str, monkeypatch: pytest.MonkeyPatch, launch_on: Any
) -> None:
    card, spec = Card(monkeypatch, launch_on), TensorSpec("BF16", (300, 48))
    launch_on(MadeBackend())
    data = b"\xf1\xf2" * (300 * 48) if codec == "constant" else fill("normal", spec)
    sink = BytesSink()
    if codec == "constant":
        size = write_constant(spec, data[:2], digest(data), sink, 0)
        blob = np.frombuffer(bytearray(sink.data[:size]), np.uint8)
    else:
        packed = pack(spec, data, "zstd")
        assert packed is not None
        blob = packed.blob.copy()
    reader = RowReader(OnCard(torch.from_numpy(blob), "w", card))
    reader.device = torch.device("cpu")  # where tensors are made
    weight = torch.frombuffer(bytearray(data), dtype=torch.bfloat16).view(300, 48)
    for ids in (torch.tensor([[299, 0, 299]]), torch.tensor([], dtype=torch.int32)):
        assert_same_bits(reader(ids), weight[ids.long()])
    with pytest.raises(IndexError, match="row 300"):
        reader(torch.tensor([300]))
