"""Blobs from files to devices, in bounded host memory."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from tpde.errors import OutOfMemory, Truncated
from tpde.files.thread_count import default_threads
from tpde.io.sources import Extent
from tpde.memory.device_memory import free_bytes, gib, require

PIECE_BYTES = 8 << 20  # of a read: fewer and larger reads are no faster from the page cache
GROUP_BYTES = 256 << 20  # that are complete, and used, while others are read
READERS = 8  # threads: from the page cache to a GPU four moved 23 GB/s, eight 34
_SMALL = 1 << 20  # larger allocations come out of the caching allocator's large blocks


def read_extents(
    extents: Sequence[Extent],
    device: torch.device,
    use: Callable[[int, torch.Tensor], None] = lambda i, tensor: None,
    *,
    make_reader: Callable[[torch.device], Reader] | None = None,
    group_bytes: int = GROUP_BYTES,
) -> list[torch.Tensor]:
    """Read extents into one uint8 tensor each, in memory of its own.

    Parameters
    ----------
    extents : sequence of Extent
        Read in the order of files and offsets, whatever theirs.
    device : torch.device
        CPU or CUDA. Host memory beside the tensors is at most 128 MiB, pinned for CUDA.
    use : callable, optional
        Called with the number of each extent and its tensor, which is complete, while others are read; in
        this thread, in the order of reading.
    make_reader : callable, optional
        Makes what reads them: `Reader` by default.
    group_bytes : int
        Extents are complete when at least so many bytes are.

    Returns
    -------
    list of torch.Tensor
        In the order of `extents`; complete when this returns.

    Raises
    ------
    Truncated
        If a file ends before an extent does.
    OutOfMemory
        If the device has too little free memory.
    """
    _check(extents)
    tensors = _allocate([extent.size for extent in extents], device)
    with (make_reader or Reader)(device) as reader:
        begun = [
            (group, reader.begin([tensors[i] for i in group], [extents[i] for i in group]))
            for group in _groups(extents, group_bytes)
        ]
        for group, reading in begun:
            reading.wait()
            for i in group:
                use(i, tensors[i])
    return tensors


def read_in_turn(
    groups: Iterable[Sequence[Extent]],
    device: torch.device,
    use: Callable[[Sequence[torch.Tensor]], None],
) -> None:
    """Read groups of extents, each when what was made of the one before has been used.

    Parameters
    ----------
    groups : iterable of sequence of Extent
        Memory is taken for one at a time.
    device : torch.device
        See `read_extents`.
    use : callable
        Called with the tensors of each group, in this thread. What it does not keep is free for the next.

    Raises
    ------
    Truncated, OutOfMemory
        See `read_extents`.
    """
    with Reader(device) as reader:
        for extents in groups:
            _check(extents)
            tensors = _allocate([extent.size for extent in extents], device)
            reader.begin(tensors, extents).wait()
            use(tensors)
            del tensors


def _groups(extents: Sequence[Extent], least: int) -> Iterator[list[int]]:
    """Numbers of extents in the order of files and offsets, a few at a time."""
    group: list[int] = []
    size = 0
    for i in _in_order(extents):
        group.append(i)
        size += extents[i].size
        if size >= least:
            yield group
            group, size = [], 0
    if group:
        yield group


def _in_order(extents: Sequence[Extent]) -> list[int]:
    """Numbers of extents in the order of files and offsets."""
    return sorted(range(len(extents)), key=lambda i: (extents[i].source.name, extents[i].offset))


def _check(extents: Sequence[Extent]) -> None:
    """Refuse extents that end after their files do.

    Raises
    ------
    Truncated
        Naming the first.
    """
    for extent in extents:
        if extent.offset + extent.size > extent.source.size:
            raise Truncated(
                f"`{extent.source.name}` has {extent.source.size} bytes, but `{extent.name}` ends at "
                f"{extent.offset + extent.size}",
                hint="the file is incomplete, fetch the rest",
                where=extent.source.name,
                found=extent.source.size,
                needed=extent.offset + extent.size,
            )


class Reader:
    """Reads extents into tensors on a few threads; what was asked for first is read first.

    Leaving its context leaves no thread behind, however that happens: each finishes the piece that it is at.

    Parameters
    ----------
    device : torch.device
        Of all tensors, CPU or CUDA. Host memory beside them, pinned for CUDA, is two pieces a thread: at most
        128 MiB by default.
    piece : int
        Bytes of a read, at most.
    threads : int, optional
        By default as many as are of use.
    """

    def __init__(self, device: torch.device, *, piece: int = PIECE_BYTES, threads: int | None = None) -> None:
        self._device, self._piece = device, piece
        self._threads = min(READERS, default_threads()) if threads is None else threads
        self._pool = ThreadPoolExecutor(self._threads, "tpde-read")
        self._begun: weakref.WeakSet[_Work] = weakref.WeakSet()  # and their tensors
        self._lanes = threading.local()

    def begin(self, tensors: Sequence[torch.Tensor], extents: Sequence[Extent]) -> Reading:
        """Read extents into tensors of their sizes, once all that was begun before is being read.

        Their memory may still be in use by what the current stream was given so far.
        """
        work = _Work(tensors, extents, self._piece)
        main = None if self._device.type == "cpu" else torch.cuda.current_stream(self._device)
        self._begun.add(work)

        def read() -> None:
            try:
                if main is None:
                    _to_host(work)
                else:
                    self._lane().read(work, main)
            except BaseException:
                work.stop()  # nobody wants the rest
                raise

        return Reading(work, [self._pool.submit(read) for _ in range(min(self._threads, len(work)))])

    def _lane(self) -> _Lane:
        """What the calling thread reads with."""
        if not hasattr(self._lanes, "own"):
            self._lanes.own = _Lane(self._device, self._piece)
        own: _Lane = self._lanes.own
        return own

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *exc: object) -> None:
        for work in self._begun:
            work.stop()
        self._pool.shutdown(cancel_futures=True)


class Reading:
    """Extents that are being read."""

    def __init__(self, work: _Work, jobs: Sequence[Future[None]]) -> None:
        self._work, self._jobs = work, jobs

    def wait(self) -> None:
        """Wait until the tensors are complete.

        Raises
        ------
        Truncated
            If a file ends before an extent does.
        """
        for job in self._jobs:
            job.result()
        self._work.tensors.clear()  # the caller may give them back


class _Work:
    """Pieces of extents, handed to whichever thread asks next: the number of the extent, where, how many."""

    def __init__(self, tensors: Sequence[torch.Tensor], extents: Sequence[Extent], piece: int) -> None:
        self.tensors, self.extents = list(tensors), extents
        self._pieces = [
            (i, at, min(piece, extents[i].size - at))
            for i in _in_order(extents)
            for at in range(0, extents[i].size, piece)
        ]
        self._next, self._lock = 0, threading.Lock()

    def __len__(self) -> int:
        return len(self._pieces)

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        while True:
            with self._lock:
                at, self._next = self._next, self._next + 1
            if at >= len(self._pieces):
                return
            yield self._pieces[at]

    def stop(self) -> None:
        with self._lock:
            self._next = len(self._pieces)


def _allocate(sizes: Sequence[int], device: torch.device) -> list[torch.Tensor]:
    """One tensor for each size; on a GPU without the rounding of separate allocations.

    The caching allocator asks the driver for multiples of 2 or 20 MiB: on average 1 MiB more than each
    tensor needs, 3 % of an 8 B model's packed weights. One large block that is freed at once is cut up
    without waste.
    """
    whole = sum(-(-size // 512) * 512 for size in sizes if size > _SMALL)
    try:
        if device.type == "cuda" and whole:
            with contextlib.suppress(torch.cuda.OutOfMemoryError):  # memory in pieces may do
                torch.empty(whole, dtype=torch.uint8, device=device)
        with torch.inference_mode(False):
            return [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
    except torch.cuda.OutOfMemoryError:
        require(sum(sizes), device, "the packed weights")
        raise OutOfMemory(
            f"the packed weights need {gib(sum(sizes))} on {device}; {gib(free_bytes(device))} are free, "
            "but not in one piece",
            hint="load the model before others, or set `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`",
            where=str(device),
            needed=sum(sizes),
        ) from None
    except RuntimeError as error:
        if device.type != "cpu" or "allocate" not in str(error):
            raise
        raise OutOfMemory(
            f"the packed weights need {gib(sum(sizes))} of host memory, and the system refused",
            hint="free some, or use a machine with more",
            needed=sum(sizes),
        ) from None


def _to_host(work: _Work) -> None:
    for i, at, size in work:
        it, out = work.extents[i], work.tensors[i][at : at + size].numpy()
        it.source.read_into(it.offset + at, out.data)


class _Lane:
    """Copies what a thread reads: into two pinned buffers in turn, and from there on a stream of its own."""

    def __init__(self, device: torch.device, piece: int) -> None:
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._buffers = [
                torch.empty(piece, dtype=torch.uint8, device="cpu", pin_memory=True) for _ in range(2)
            ]
            self._copied = [torch.cuda.Event() for _ in self._buffers]  # type: ignore[no-untyped-call]

    def read(self, work: _Work, main: torch.cuda.Stream) -> None:
        """Read pieces until there are no more, and wait for the last copy."""
        with torch.cuda.device(main.device):
            self._stream.wait_stream(main)  # the tensors' memory may still be in use there
            turn = 0
            try:
                for i, at, size in work:
                    it, buffer, copied = work.extents[i], self._buffers[turn], self._copied[turn]
                    copied.synchronize()  # returns at once the first time
                    it.source.read_into(it.offset + at, buffer[:size].numpy().data)
                    with torch.cuda.stream(self._stream):
                        work.tensors[i][at : at + size].copy_(buffer[:size], non_blocking=True)
                    copied.record(self._stream)
                    turn = 1 - turn
            finally:
                self._stream.synchronize()
