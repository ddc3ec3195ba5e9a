"""Streaming on a CUDA device: bits, events, threads, rows over the bus, damage."""

from __future__ import annotations

import copy
import gc
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.models import NAMES, VOCAB, assert_same_bits, make, outputs, torch
from support.packed import pack
from support.simulated import MemoryFeed
from support.streamed import stream_model, write_blobs

from tpde.errors import Corrupt, UnsupportedDevice
from tpde.format.container import TensorSpec
from tpde.io.sources import Extent, FileSource
from tpde.nn import pack_module
from tpde.streaming.cuda_device import CudaDevice
from tpde.streaming.retained import Retained
from tpde.streaming.streamed_source import Streamed
from tpde.streaming.streamer import StreamedUnit, Streamer
from tpde.weights.resident import Resident
from tpde.weights.rows import RowReader

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
]
DEVICE = torch.device("cuda", 0)
ROOM = 256 << 10


class PinnedFeed(MemoryFeed):
    """Files' bytes in page-locked memory."""

    def whole(self, extent: Extent) -> np.ndarray:
        found = self._whole.get(extent.source.name)
        if found is None:
            memory = torch.empty(extent.source.size, dtype=torch.uint8, pin_memory=True)
            found = self._whole[extent.source.name] = memory.numpy()
            extent.source.read_into(0, found.data)
        return found

    def device_address(self, extent: Extent) -> int | None:
        return self.wait(extent)


class Fixture:
    """A file of packed tensors on page-locked memory, and a streamer over it."""

    def __init__(
        self, folder: Path, tensors: list[tuple[TensorSpec, bytes]], places: int = 4, keep: int = 0
    ) -> None:
        extents, at = [], 0
        with (folder / "blobs").open("wb") as file:
            for spec, data in tensors:
                packed = pack(spec, data)
                assert packed is not None
                file.seek(at)
                file.write(packed.blob.tobytes())
                extents.append((at, packed.blob.size))
                at += -(-packed.blob.size // 256) * 256
        self.data = [data for _, data in tensors]
        self.source, self.feed = FileSource(folder / "blobs"), PinnedFeed()
        self.device = CudaDevice(DEVICE, places * ROOM + keep)
        self.streamer = Streamer(self.device, places, ROOM, Retained(places * ROOM, keep, self.source.size))
        self.streamer.own(self.feed, self.source)
        self.tensors = [
            Streamed(Extent(self.source, at, size, f"t{i}"), self.streamer, DEVICE, self.feed)
            for i, (at, size) in enumerate(extents)
        ]

    def unit(self, *numbers: int) -> tuple[StreamedUnit, list[tuple[int, bytes]], int]:
        """A unit of some tensors, where they go, and how large the buffer must be."""
        items, expected, at = [], [], 0
        for i in numbers:
            items.append((self.tensors[i], at))
            expected.append((at, self.data[i]))
            at += -(-len(self.data[i]) // 512) * 512
        return self.streamer.unit(items), expected, at

    def __enter__(self) -> Fixture:
        return self

    def __exit__(self, *error: object) -> None:
        torch.cuda.synchronize()
        self.streamer.close()


def normal(words: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> bytes:
    values = torch.randn(words, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return bytes(values.view(torch.uint8).numpy().tobytes())


def bf16(*sizes: int) -> list[tuple[TensorSpec, bytes]]:
    return [(TensorSpec("BF16", (size,)), normal(size, i)) for i, size in enumerate(sizes)]


def check(out: Any, expected: list[tuple[int, bytes]]) -> None:
    found = out.cpu().numpy()
    for at, data in expected:
        assert found[at : at + len(data)].tobytes() == data


SIZES = (300_000, 1_000_000, 5_000, 700_000, 400_000)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("BF16", torch.bfloat16), ("F16", torch.float16), ("F32", torch.float32), ("F8_E4M3", None)],
)
def test_every_dtype(name: str, dtype: torch.dtype | None, tmp_path: Path) -> None:
    words = 700_003
    data = normal(words, 1, torch.float8_e4m3fn if dtype is None else dtype)
    with Fixture(tmp_path, [(TensorSpec(name, (words,)), data)]) as made:
        unit, expected, size = made.unit(0)
        assert len(unit.pieces) > 1
        for _ in range(2):
            out = torch.full((size,), 0xA5, dtype=torch.uint8, device=DEVICE)
            unit(out)
            check(out, expected)


@pytest.mark.parametrize("keep", [0, 4 * ROOM])
@pytest.mark.parametrize("places", [2, 5])
def test_any_order(places: int, keep: int, tmp_path: Path) -> None:
    draw = random.Random(places)
    with Fixture(tmp_path, bf16(*SIZES), places, keep) as made:
        units = [made.unit(0, 1), made.unit(2, 3), made.unit(4)]
        out = torch.empty(max(size for _, _, size in units), dtype=torch.uint8, device=DEVICE)
        for _ in range(40):
            unit, expected, _ = draw.choice(units)
            unit(out)
            check(out, expected)


def test_closing_frees_the_places(tmp_path: Path) -> None:
    room = 64 << 20
    with Fixture(tmp_path, bf16(1000), keep=room) as made:
        made.unit(0)
        there = torch.cuda.memory_allocated()
    assert torch.cuda.memory_allocated() <= there - room


def test_chunks(tmp_path: Path) -> None:
    with Fixture(tmp_path, bf16(1_000_000)) as made:
        (tensor,), (data,) = made.tensors, made.data
        blob = torch.from_numpy(made.feed.whole(tensor.extent)[: tensor.extent.size].copy()).to(DEVICE)
        resident = Resident(blob, "t0")
        last = tensor.header.chunks - 1
        for packed in (tensor, resident):
            for first, stop in ((0, 0), (3, 57), (last, last), (0, last)):
                begin, end = (2 * it for it in tensor.header.chunk_range(first, stop))
                out = torch.full((512 + end - begin,), 0xA5, dtype=torch.uint8, device=DEVICE)
                for _ in range(2):
                    packed.chunks(first, stop, 512)(out)
                found = out.cpu().numpy().tobytes()
                assert found == b"\xa5" * 512 + data[begin:end]


def test_rows_are_read_over_the_bus(tmp_path: Path) -> None:
    rows, columns = 3000, 512
    data = normal(rows * columns, 3)
    with Fixture(tmp_path, [(TensorSpec("BF16", (rows, columns)), data)]) as made:
        reader = RowReader(made.tensors[0])
        assert reader._rows is not None, "read by the kernel, not by the CPU"
        ids = torch.tensor([[5, 2999, 0], [7, 7, 1234]], device=DEVICE)
        whole = torch.frombuffer(bytearray(data), dtype=torch.bfloat16).view(rows, columns)
        assert_same_bits(reader(ids), whole[ids.cpu()])
        assert not made.streamer.ring.copied_bytes


@pytest.mark.parametrize("name", NAMES)
def test_logits(name: str, tmp_path: Path) -> None:
    plain = make(name, device="cuda")
    with torch.no_grad():
        expected = outputs(name, plain, 2, "cuda")
    recorded = outputs(name, plain, 2, "cuda")
    model = pack_module(copy.deepcopy(plain), min_bytes=1024)
    source, extents = write_blobs(model, tmp_path / "blobs")
    feed, device = PinnedFeed(), CudaDevice(DEVICE, 4 * ROOM)
    streamer = Streamer(device, 4, ROOM)
    streamer.own(feed, source)
    stream_model(model, extents, streamer, feed, DEVICE)
    with torch.no_grad():
        for run in range(3):
            assert_same_bits(outputs(name, model, 2, "cuda"), expected, f"run {run}")
    assert_same_bits(outputs(name, model, 2, "cuda"), recorded, "with autograd")
    found: list[Any] = []

    def other() -> None:
        with torch.no_grad():
            found.append(outputs(name, model, 2, "cuda"))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert_same_bits(found[0], expected, "in another thread")
    assert streamer.ring.copied_bytes
    if name == "llama":
        ids = torch.randint(2, VOCAB, (1, 5), device="cuda")
        with torch.no_grad():
            both = [torch.compile(it, backend="aot_eager")(ids).logits for it in (model, plain)]
            again = torch.compile(model)(ids).logits
        assert_same_bits(*both, "compiled")
        assert torch.isfinite(again).all(), "Inductor's own kernels round differently"
    torch.cuda.synchronize()
    streamer.close()


def test_graphs_are_refused(tmp_path: Path) -> None:
    with Fixture(tmp_path, bf16(5000)) as made:
        unit, _, size = made.unit(0)
        out = torch.empty(size, dtype=torch.uint8, device=DEVICE)
        unit(out)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(UnsupportedDevice, match="CUDA graph"), torch.cuda.graph(graph):
            unit(out)
        torch.cuda.synchronize()
        unit(out)


def test_damage(tmp_path: Path) -> None:
    with Fixture(tmp_path, bf16(*SIZES)) as made:
        unit, expected, size = made.unit(1)
        memory = made.feed.whole(made.tensors[1].extent)
        at = made.tensors[1].extent.offset + int(made.tensors[1].offsets[9]) + 50
        out = torch.empty(size, dtype=torch.uint8, device=DEVICE)
        memory[at] ^= 4
        with pytest.raises(Corrupt, match="chunk 9: its checksum does not match") as caught:
            unit(out)
        assert (caught.value.tensor, caught.value.chunk) == ("t1", 9)
        memory[at] ^= 4
        unit(out)
        check(out, expected)


def test_damage_after_the_first_use(tmp_path: Path) -> None:
    """Nobody waits for it, but whoever asks is told."""
    with Fixture(tmp_path, bf16(*SIZES)) as made:
        made.streamer.ring.prefetch = False  # what was copied ahead would be sound
        unit, expected, size = made.unit(1)
        memory = made.feed.whole(made.tensors[1].extent)
        at = made.tensors[1].extent.offset + int(made.tensors[1].offsets[9]) + 50
        out = torch.empty(size, dtype=torch.uint8, device=DEVICE)
        unit(out)
        made.streamer.check()
        memory[at] ^= 4
        unit(out)
        with pytest.raises(Corrupt, match=r"chunk 9: .* was damaged since it was first read"):
            made.streamer.check()
        made.streamer.check()
        memory[at] ^= 4
        unit(out)
        made.streamer.check()
        check(out, expected)


def test_damaged_rows_after_the_first_use(tmp_path: Path) -> None:
    rows, columns = 3000, 512
    data = normal(rows * columns, 3)
    with Fixture(tmp_path, [(TensorSpec("BF16", (rows, columns)), data)]) as made:
        reader, tensor = RowReader(made.tensors[0]), made.tensors[0]
        ids = torch.tensor([5, 2999, 0], device=DEVICE)
        reader(ids)
        made.streamer.check()
        at = tensor.extent.offset + int(tensor.offsets[-2]) + 50  # of the last chunk, which has row 2999
        made.feed.whole(tensor.extent)[at] ^= 4
        reader(ids[:1])
        made.streamer.check()
        reader(ids)
        with pytest.raises(Corrupt, match="`t0`, chunk"):
            made.streamer.check()
        reader(ids)
        torch.cuda.synchronize()
        with pytest.raises(Corrupt, match="`t0`, chunk"):
            reader(ids)


def test_recording_while_another_thread_fills(tmp_path: Path) -> None:
    from tpde.streaming.trace import start_trace

    with Fixture(tmp_path, bf16(*SIZES)) as made:
        units = [made.unit(0, 1), made.unit(2, 3), made.unit(4)]
        out = torch.empty(max(size for _, _, size in units), dtype=torch.uint8, device=DEVICE)
        begun, failed, stop = threading.Event(), list[BaseException](), threading.Event()

        def fill() -> None:
            try:
                while not stop.is_set():
                    for unit, _, _ in units:
                        unit(out)
                    begun.set()
            except BaseException as error:
                failed.append(error)
                begun.set()

        thread = threading.Thread(target=fill)
        thread.start()
        assert begun.wait(60)
        traces = []
        for _ in range(20):
            traces.append(start_trace(DEVICE))
            made.streamer.record(traces[-1])
        copied = made.streamer.ring.copied_pieces
        while made.streamer.ring.copied_pieces < copied + 20 and not failed:
            begun.clear()
            assert begun.wait(60)
        stop.set()
        thread.join()
        assert not failed
        assert traces[-1].spans()


def test_closing_gives_the_ring_back(tmp_path: Path) -> None:
    torch.cuda.synchronize()
    gc.collect()  # other tests' leftovers
    before = torch.cuda.memory_allocated()
    with Fixture(tmp_path, bf16(*SIZES)) as made:
        unit, _, size = made.unit(0, 1)
        unit(torch.empty(size, dtype=torch.uint8, device=DEVICE))
    del made, unit
    gc.collect()
    assert torch.cuda.memory_allocated() == before
