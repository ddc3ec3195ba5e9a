"""Host memory that a CUDA device copies from: locked in place, in an arena, and read ahead."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.packed import pack

torch = pytest.importorskip("torch", reason="needs torch")

from tpde.errors import UnsupportedDevice  # noqa: E402
from tpde.format.container import TensorSpec  # noqa: E402
from tpde.host.disk import ReadAhead  # noqa: E402
from tpde.host.page_lock import STEP, CudaPageLock, steps  # noqa: E402
from tpde.host.pinned import HostMemory  # noqa: E402
from tpde.io.sources import Extent, FileSource  # noqa: E402
from tpde.streaming.cuda_device import CudaDevice  # noqa: E402
from tpde.streaming.pieces import Piece  # noqa: E402
from tpde.streaming.streamed_source import Streamed  # noqa: E402
from tpde.streaming.streamer import Streamer  # noqa: E402
from tpde.weights.rows import RowReader  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
MIB = 1 << 20
SIZE = 200 * MIB + 777


@pytest.fixture(scope="module")
def data() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, SIZE, np.uint8)


@pytest.fixture
def source(tmp_path: Path, data: np.ndarray) -> Iterator[FileSource]:
    with (tmp_path / "blobs").open("wb") as file:
        file.write(data.data)
        os.fsync(file.fileno())
    made = FileSource(tmp_path / "blobs")
    yield made
    made.close()


@pytest.fixture(autouse=True)
def free_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TPDE_HOST_MEMORY", raising=False)
    torch.cuda.init()


def lock_in(mode: str, extents: list[Extent], step: int = STEP) -> HostMemory:
    """Memory of a mode, complete; skips where locking in place is refused, which is not an error."""
    memory = HostMemory(extents, CudaPageLock(0, step), mode=mode)
    try:
        memory.complete()
    except UnsupportedDevice as error:
        memory.close()
        if mode != "mapped":
            raise
        pytest.skip(f"{error}")
    return memory


def extents(source: FileSource) -> list[Extent]:
    places = [(5000, 3 * MIB), (5000 + 3 * MIB, 70 * MIB), (100 * MIB, SIZE - 100 * MIB)]
    return [Extent(source, at, size, f"t{i}") for i, (at, size) in enumerate(places)]


def queue_copy(address: int, size: int, stream: Any) -> torch.Tensor:
    from cuda.bindings import driver

    out = torch.empty(size, dtype=torch.uint8, device="cuda:0")
    for at, part in steps(address, size):
        (code,) = driver.cuMemcpyHtoDAsync(out.data_ptr() + at, address + at, part, stream.cuda_stream)
        assert int(code) == 0, code
    return out


def check(memory: HostMemory, extent: Extent, data: np.ndarray) -> None:
    out = queue_copy(memory.address(extent), extent.size, torch.cuda.current_stream())
    assert np.array_equal(out.cpu().numpy(), data[extent.offset : extent.offset + extent.size])


@pytest.mark.parametrize("mode", ["mapped", "arena", "pageable"])
def test_copies(mode: str, source: FileSource, data: np.ndarray) -> None:
    wanted = extents(source)
    memory = lock_in(mode, wanted)
    assert memory.kind == mode
    packed = sum(it.size for it in wanted)
    if mode == "pageable":
        assert memory.locked_bytes == 0
    else:
        assert packed <= memory.locked_bytes <= packed + 64 * MIB
    for extent in (*wanted, Extent(source, 3 * MIB - 5, 10 * MIB, "across two")):
        check(memory, extent, data)
    memory.close()
    again = lock_in(mode, wanted)  # nothing is locked twice
    check(again, wanted[0], data)
    again.close()


def test_by_itself(source: FileSource, data: np.ndarray) -> None:
    """Whatever this machine refuses, a mode is found; two memories over one file do not mind each other."""
    one, two = (HostMemory(it, CudaPageLock(0)) for it in (extents(source), extents(source)[1:]))
    assert one.kind == two.kind != "pageable"
    one.close()
    check(two, extents(source)[2], data)
    two.close()


def test_pieces_that_reach_over_what_was_locked_at_once(
    source: FileSource, data: np.ndarray, tmp_path: Path
) -> None:
    """As a streamer copies them: the driver refuses such a copy as one."""
    extent = Extent(source, 0, 9 * MIB + 5, "all")
    memory = lock_in("arena", [extent], MIB)
    device = CudaDevice(torch.device("cuda", 0), 16 * MIB, step=MIB)
    for offset in (0, 700_000, 3 * MIB - 8):
        size = 5 * MIB + 16
        piece = Piece(Extent(source, offset, size, "piece"), memory, ())
        device.copy(0, memory.request(piece.extent).wait(), piece).synchronize()
        assert np.array_equal(device.memory[:size].cpu().numpy(), data[offset : offset + size])
    device.close()
    memory.close()


@pytest.mark.parametrize("mode", ["mapped", "arena"])
def test_kernels_read_it_in_place(mode: str, tmp_path: Path) -> None:
    rows, columns = 3000, 512
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    packed = pack(TensorSpec("BF16", (rows, columns)), values.view(torch.uint8).numpy().tobytes())
    assert packed is not None
    (tmp_path / "blobs").write_bytes(bytes(256) + packed.blob.tobytes())
    source = FileSource(tmp_path / "blobs")
    extent = Extent(source, 256, packed.blob.size, "embedding")
    memory, device = lock_in(mode, [extent], MIB), torch.device("cuda", 0)
    streamer = Streamer(CudaDevice(device, 4 * MIB), 4, MIB)
    streamer.own(memory, source)
    reader = RowReader(Streamed(extent, streamer, device, memory))
    assert reader._rows is not None, "read by the kernel, not by the CPU"
    ids = torch.tensor([[5, 2999, 0], [7, 7, 1234]], device=device)
    found = reader(ids).view(torch.int16).cpu()
    assert torch.equal(found, values[ids.cpu()].view(torch.int16))
    assert not streamer.ring.copied_bytes
    torch.cuda.synchronize()
    streamer.close()


@pytest.mark.parametrize("how", ["truncated", "removed", "replaced"])
@pytest.mark.parametrize("mode", ["mapped", "arena"])
def test_the_file_changes_while_open(mode: str, how: str, source: FileSource, data: np.ndarray) -> None:
    memory = lock_in(mode, extents(source))
    if how == "truncated":
        os.truncate(source.name, 0)
    elif how == "removed":
        os.unlink(source.name)
    else:
        Path(source.name + ".new").write_bytes(bytes(SIZE))
        os.replace(source.name + ".new", source.name)
    for extent in extents(source):
        check(memory, extent, data)
    memory.close()


def anonymous() -> int:
    """Bytes of memory that this process does not share with the page cache."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text("ascii").splitlines()
    except OSError as error:
        pytest.skip(f"memory is not told: {error}")
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Anonymous:"))


@pytest.mark.parametrize("mode", ["mapped", "arena"])
def test_private_memory(mode: str, source: FileSource, data: np.ndarray) -> None:
    whole = [Extent(source, 0, SIZE, "all")]
    lock_in(mode, whole).close()  # what the driver allocates the first time
    before = anonymous()
    memory = lock_in(mode, whole)
    grown = anonymous() - before
    assert memory.private_bytes - 32 * MIB <= grown <= memory.private_bytes + 32 * MIB
    memory.close()
    assert anonymous() - before <= 32 * MIB


@pytest.mark.parametrize("buffers", [1, 4])
def test_read_ahead(buffers: int, source: FileSource, data: np.ndarray) -> None:
    """Buffers are read to again while copies from them are queued behind slow work."""
    piece = 8 * MIB
    feed = ReadAhead(buffers, piece, 4, CudaPageLock(0))
    assert feed.locked_bytes
    stream, out = torch.cuda.Stream(), []
    wanted = [Extent(source, at, min(piece - 5000, SIZE - at), "x") for at in range(0, SIZE, piece - 5000)]
    tickets = [feed.request(extent) for extent in wanted]
    for ticket, extent in zip(tickets, wanted, strict=True):
        address = ticket.wait()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(2_000_000)
            out.append(queue_copy(address, extent.size, stream))
            event = torch.cuda.Event()
            event.record()
        ticket.copied(event)
    stream.synchronize()
    for tensor, extent in zip(out, wanted, strict=True):
        expected = data[extent.offset : extent.offset + extent.size]
        assert np.array_equal(tensor.cpu().numpy(), expected), extent.offset
    feed.close()
