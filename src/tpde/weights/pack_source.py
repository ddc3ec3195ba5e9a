"""Packing plain tensors in memory: what makes a source of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import xxhash
from torch import Tensor

from tpde.codec.blob import BlobWriter
from tpde.codec.selection import CodecName, TensorPlan, base_header
from tpde.errors import PackedWeight
from tpde.files.gpu_packing import packed_there
from tpde.files.tensor_writer import TensorWriter
from tpde.files.thread_count import check_threads
from tpde.format.blob_header import align
from tpde.format.constants import ALIGN_BLOB, CODEC_PREFIX
from tpde.frameworks import torch_bytes, torch_spec
from tpde.io.sinks import BytesSink
from tpde.weights.resident import Resident
from tpde.weights.source import Source, decoded

CODEC: CodecName = "prefix"  # GPUs decode it


def pack_sources(
    tensors: Iterable[tuple[str, Tensor]], threads: int | None = None
) -> Iterator[Resident | None]:
    """Pack tensors; the blobs are on their devices. Those of a GPU are packed there, some at a time.

    Parameters
    ----------
    tensors : iterable of (str, torch.Tensor)
        Each with what errors call it; contiguous, of a floating-point dtype. Asked for as they are needed.
    threads : int, optional
        Of the host, which encode what is there, and choose codes for what is on a GPU. By default one for
        each processor; the blobs do not depend on it.

    Yields
    ------
    Resident or None
        For each, in their order; None if it would not shrink.
    """
    for made in packed_there(tensors, CODEC, threads=threads):
        blob = made.blob
        one = Resident(blob, made.name) if blob is not None else _pack_on_host(*made[:2], threads)
        del made  # and its tensor, before others are packed
        yield one


def pack_source(tensor: Tensor, name: str, threads: int | None = None) -> Resident | None:
    """Pack a tensor: see `pack_sources`."""
    return next(pack_sources([(name, tensor)], threads))


def hold_raw(tensor: Tensor, name: str) -> Resident:
    """A contiguous tensor that would not shrink, in a blob of planes as they are, on its device."""
    plan = TensorPlan(base_header(torch_spec(name, tensor), CODEC_PREFIX), b"", 0)
    sink, data = BytesSink(tensor.nbytes + (1 << 16)), torch_bytes(tensor)
    writer = BlobWriter(plan, sink, 0, check_threads(None))
    writer.write(data)
    return _resident(sink, writer.finish(xxhash.xxh3_128_digest(data.data)), tensor, name)


def _pack_on_host(name: str, tensor: Tensor, threads: int | None) -> Resident | None:
    spec = torch_spec(name, tensor)
    sink = BytesSink(spec.nbytes + (1 << 16))
    writer = TensorWriter(
        spec,
        sink,
        0,
        threads=check_threads(threads),
        codec=CODEC,
        may_pack=True,
        background=None,
    )
    writer.write(torch_bytes(tensor))
    stored = writer.finish()
    if not stored.packed:
        return None
    return _resident(sink, stored.size, tensor, name)


def _resident(sink: BytesSink, size: int, like: Tensor, name: str) -> Resident:
    """A blob that was written, on the device of a tensor."""
    with torch.inference_mode(False):
        blob = torch.zeros(align(size, ALIGN_BLOB), dtype=torch.uint8, device="cpu")
        blob[:size] = torch.frombuffer(sink.data, dtype=torch.uint8)[:size]
        blob = blob.to(like.device)
    return Resident(blob, name)


def packed_again(source: Source) -> Tensor:
    """A blob of prefix codes, on the CPU, of what a source decodes to now.

    Raises
    ------
    PackedWeight
        If it would not shrink.
    """
    made = pack_source(decoded(source), source.name)
    if made is None:
        raise PackedWeight(
            f"`{source.name}` does not shrink with the values that it has now, and has no packed form",
            hint="call `tpde.unpack_module(model)` first, which gives it plain",
        )
    return made.blob.cpu()
