"""Tensors of a GPU packed where they lie, to the bytes that the CPU packs.

What the GPU does not pack is the CPU's: see `packed_there`. Where torch is missing, nothing imports this.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tpde.codec.native import Bytes
from tpde.codec.selection import MIN_BYTES, PREFIX_CHUNK_WORDS, SAMPLE_CHUNKS, CodecName
from tpde.cuda import backend
from tpde.cuda.digest import Bytestring, Digests
from tpde.cuda.encode import ALIGNMENT, PackEncoder
from tpde.errors import CompileError, MissingDependency, UnsupportedDevice
from tpde.files.thread_count import check_threads
from tpde.format.blob_header import align
from tpde.format.constants import ALIGN_BLOB
from tpde.format.container import TensorSpec
from tpde.frameworks import has_words, on_device, stream_of, torch_spec

log = logging.getLogger("tpde")

# Of tensors that are packed side by side, with their samples and tables: of small ones these are most of it.
# Beside them are their blobs, hashes on their way, a sixteenth, and what chunks take, 0.3 %.
BATCH_BYTES = 256 << 20
_TABLE_BYTES = 5 << 18  # of a tensor, at most: of F64, which has two planes of pairs; of BF16 three fifths


class Made(NamedTuple):
    """A tensor, and what has become of it.

    Attributes
    ----------
    name : str
        The tensor's.
    tensor : Tensor
        The same as was given.
    blob : Tensor or None
        Its blob and zeros up to a multiple of 256 bytes, on its device; None if the CPU is to pack it.
    """

    name: str
    tensor: Tensor
    blob: Tensor | None


def packed_there(
    tensors: Iterable[tuple[str, Tensor]],
    codec: CodecName,
    may_pack: Callable[[str], bool] = lambda name: True,
    threads: int | None = None,
) -> Iterator[Made]:
    """Pack those tensors that a GPU packs; all come out again, in their order.

    Tensors of one GPU that follow each other are packed together, up to 256 MiB at a time. They are
    the CPU's, which gives the same bytes, if they lie there, have fewer than 1024 bytes, do not shrink by
    prefix codes, or begin with the same word for a chunk; and if the kernels cannot run or the GPU has no
    memory for it: that is logged.

    Parameters
    ----------
    tensors : iterable of (str, Tensor)
        With their names; contiguous. Asked for as they are needed, and none is held once the next batch is.
    codec : {"auto", "prefix", "zstd"}
        As `plan_tensor` takes it.
    may_pack : callable
        Whether a tensor of a name may be packed.
    threads : int, optional
        How many choose codes on the host, for a tensor each; by default one for each processor.

    Raises
    ------
    InvalidArgument
        If there cannot be so many threads.
    """
    count = check_threads(threads)
    batch: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        takes = _takes(tensor)
        fits = not batch or (tensor.device == batch[0][1].device and size + takes <= BATCH_BYTES)
        if not fits:
            yield from _batch_made(batch, codec, may_pack, count)
            batch, size = [], 0
        batch.append((name, tensor))
        size += takes
    yield from _batch_made(batch, codec, may_pack, count)


def _takes(tensor: Tensor) -> int:
    """Bytes of a tensor, its sample and its tables."""
    sample = SAMPLE_CHUNKS * PREFIX_CHUNK_WORDS * tensor.element_size()
    return tensor.nbytes + min(tensor.nbytes, sample) + _TABLE_BYTES


def _batch_made(
    batch: list[tuple[str, Tensor]], codec: CodecName, may_pack: Callable[[str], bool], threads: int
) -> Iterator[Made]:
    """What becomes of tensors of one device; the list is emptied on the way."""
    there = [i for i, (name, tensor) in enumerate(batch) if is_there(tensor) and may_pack(name)]
    made: dict[int, Tensor | None] = {}
    if there:
        made = dict(zip(there, _pack_or_not([batch[i] for i in there], codec, threads), strict=True))
    batch.reverse()
    for i in range(len(batch)):
        yield Made(*batch.pop(), made.pop(i, None))


def is_there(tensor: Tensor) -> bool:
    """Whether a tensor is one that kernels read: its words lie one after the other on a GPU."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)  # others may have no bytes of their own
        and tensor.device.type == backend.current().kind
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg())
        and has_words(tensor)
        and tensor.nbytes >= MIN_BYTES
    )


def _pack_or_not(batch: Sequence[tuple[str, Tensor]], codec: CodecName, threads: int) -> list[Tensor | None]:
    """Blobs of tensors of one GPU; None, and a line of log, if something is missing there."""
    try:
        return _pack([(torch_spec(name, tensor), tensor) for name, tensor in batch], codec, threads)
    except (MissingDependency, UnsupportedDevice, CompileError, torch.cuda.OutOfMemoryError) as error:
        reason = str(error).splitlines()[0]
        first, more = batch[0][0], f" and {len(batch) - 1} more" if len(batch) > 1 else ""
        log.info("`%s`%s of %s: packed on the CPU (%s)", first, more, batch[0][1].device, reason)
        return [None] * len(batch)


def _pack(batch: Sequence[tuple[TensorSpec, Tensor]], codec: CodecName, threads: int) -> list[Tensor | None]:
    """The host waits for samples, for what chunks take, and for hashes."""
    device = batch[0][1].device
    blobs: list[Tensor | None] = [None] * len(batch)
    with on_device(device):
        stream = stream_of(device)
        encoders = [
            PackEncoder(tensor.data_ptr(), spec, device.index or 0, spread=False) for spec, tensor in batch
        ]
        samples = _Room([it.sample_bytes for it in encoders], device)
        for encoder, room in zip(encoders, samples.parts, strict=True):
            encoder.gather(room.data_ptr(), stream)
        read = samples.on_host()
        del samples
        with _Hashing([tensor for _, tensor in batch]) as hashing:
            with ThreadPoolExecutor(min(len(read), threads), "tpde-choose") as pool:
                plans = pool.map(lambda it, sample: it.choose(sample, codec), encoders, read)
                chosen = {i: plan for i, plan in enumerate(plans) if plan is not None}
            scratch = _Room([it.scratch_bytes for it in chosen.values()], device)
            for (i, plan), room in zip(chosen.items(), scratch.parts, strict=True):
                room[plan.image_at : plan.image_at + plan.image.size].copy_(torch.from_numpy(plan.image))
                encoders[i].measure(plan, room.data_ptr(), stream)
            said = scratch.first_on_host([it.found_bytes for it in chosen.values()])
            found = {i: encoders[i].found(chosen[i], data) for i, data in zip(chosen, said, strict=True)}
            made = {i: _empty_blob(it.nbytes, device) for i, it in found.items()}
            for (i, plan), room in zip(chosen.items(), scratch.parts, strict=True):
                encoders[i].encode(plan, room.data_ptr(), made[i].data_ptr(), stream)
            digests = hashing.results()
        for i, blob in made.items():
            head = found[i].head(digests[i]).copy()
            blob[: head.size].copy_(torch.from_numpy(head))
            blobs[i] = blob
    return blobs


def _empty_blob(nbytes: int, device: torch.device) -> Tensor:
    """Room for a blob, and zeros behind it."""
    with torch.inference_mode(False):
        blob = torch.empty(align(nbytes, ALIGN_BLOB), dtype=torch.uint8, device=device)
        blob[nbytes:].zero_()
    return blob


class _Room:
    """Memory on a device for several things, each at a multiple of 16 bytes.

    Attributes
    ----------
    parts : list of Tensor
        One for each size.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        starts = list(accumulate((align(size, ALIGNMENT) for size in sizes), initial=0))
        whole = torch.empty(max(starts[-1], ALIGNMENT), dtype=torch.uint8, device=device)
        self._whole, self._places = whole, list(zip(starts, sizes, strict=False))
        self.parts = [whole[at : at + size] for at, size in self._places]

    def on_host(self) -> list[Bytes]:
        """The parts, by one copy, which is waited for."""
        data = self._whole.cpu().numpy()
        return [data[at : at + size] for at, size in self._places]

    def first_on_host(self, sizes: Sequence[int]) -> list[Bytes]:
        """So many first bytes of each part, by one copy, which is waited for."""
        if not sizes:
            return []
        firsts = [part[:size] for part, size in zip(self.parts, sizes, strict=True)]
        data: Bytes = torch.cat(firsts).cpu().numpy()
        return np.split(data, list(accumulate(sizes))[:-1])


class _Hashing:
    """Hashes of tensors of a device, most of it beside what follows on the current stream."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        where = [Bytestring(it.data_ptr(), it.nbytes) for it in tensors]
        device = tensors[0].device
        self._digests = Digests(where, device.index or 0)
        self._items, self._scratch = _Room(
            [self._digests.items.size, self._digests.scratch_bytes], device
        ).parts
        self._items.copy_(torch.from_numpy(self._digests.items))
        self._digests.sums(self._scratch.data_ptr(), stream_of(device))
        self._join = _beside(device, self._chain)

    def _chain(self, stream: int) -> None:
        self._digests.chain(self._items.data_ptr(), self._scratch.data_ptr(), stream)

    def results(self) -> list[bytes]:
        """Wait for them."""
        self._join()
        return self._digests.results(self._scratch[: self._digests.found_bytes].cpu().numpy())

    def __enter__(self) -> _Hashing:
        return self

    def __exit__(self, *exc: object) -> None:
        self._join()  # what is freed now is used again on the current stream


def _beside(device: torch.device, launch: Callable[[int], None]) -> Callable[[], None]:
    """Launch on a stream beside the current one, after all that this was given so far.

    Returns
    -------
    callable
        Has the current stream wait for it.
    """
    if device.type != "cuda":  # which has no streams
        launch(0)
        return lambda: None
    main = torch.cuda.current_stream(device)
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(main)
    with torch.cuda.stream(side):
        launch(int(side.cuda_stream))
    return lambda: main.wait_stream(side)
