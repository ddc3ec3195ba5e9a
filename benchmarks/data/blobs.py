"""Packed tensors: on the host as `tpde pack` stores them, and on a device, where they are decoded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.harness.gpu import stream
from benchmarks.harness.machine import cores
from tpde.codec.blob import BlobWriter
from tpde.codec.selection import plan_tensor, sample_ranges
from tpde.format.blob_header import BlobHeader, parse_blob_header
from tpde.format.container import TensorSpec
from tpde.io.sinks import BytesSink


class Blob(NamedTuple):
    """A packed tensor on the host."""

    header: BlobHeader
    section: bytes  # its tables
    data: np.ndarray[Any, np.dtype[np.uint8]]


def pack(spec: TensorSpec, data: np.ndarray[Any, np.dtype[np.uint8]], codec: Any = "auto") -> Blob:
    """Pack a tensor as `tpde pack` does, with all threads."""
    sample = np.concatenate([data[begin:end] for begin, end in sample_ranges(spec)])
    plan = plan_tensor(spec, sample, codec)
    if plan is None:
        raise SystemExit(f"error: {spec} would stay plain")
    sink = BytesSink(spec.nbytes + (1 << 20))
    writer = BlobWriter(plan, sink, 0, cores())
    writer.write(data)
    size = writer.finish(bytes(16))
    blob = np.frombuffer(bytes(sink.data[:size]), np.uint8)
    header = parse_blob_header(blob[:8192].tobytes(), blob.size)
    return Blob(header, blob[header.tables_at : header.index_at].tobytes(), blob)


def upload(data: np.ndarray[Any, Any]) -> Any:
    """Bytes on the device, at a multiple of 512; at least 16 of them, since nothing has no address."""
    import torch

    flat = np.zeros(max(data.nbytes, 16), np.uint8)
    flat[: data.nbytes] = data.reshape(-1).view(np.uint8)
    return torch.from_numpy(flat).cuda()


class Decoder:
    """Packed tensors on the device, decoded one behind the other into one buffer, in one launch.

    Parameters
    ----------
    blobs : sequence of Blob
        A blob that comes again gets memory of its own, so that no cache serves two.
    out : Tensor of uint8
        The buffer.
    check : bool
        Compare checksums.

    Attributes
    ----------
    blobs : list of Tensor
        The blobs' bytes on the device.
    """

    def __init__(self, blobs: Sequence[Blob], out: Any, *, check: bool = False) -> None:
        import torch

        from tpde.cuda.decode import WorkList
        from tpde.cuda.items import Item, lookup_tables

        self._out, self._check = out, check
        tables, images, items = {}, {}, []
        self.blobs, at = list[Any](), 0
        for blob in blobs:
            key = id(blob)
            if key not in tables:
                found = lookup_tables(blob.header, blob.section)
                assert found is not None
                tables[key], images[key] = found, upload(found.image)
            self.blobs.append(upload(blob.data))
            items.append(
                Item(blob.header, tables[key], self.blobs[-1].data_ptr(), images[key].data_ptr(), at)
            )
            at += blob.header.spec.nbytes
        self._images = images
        self._work = WorkList(items, torch.cuda.current_device())
        self._work.prepare()
        self._descriptors = upload(self._work.descriptors)
        self.status = torch.zeros(4, dtype=torch.int32, device="cuda")
        self.stored = sum(blob.header.blob_bytes for blob in blobs)

    def __call__(self) -> Any:
        """Launch on torch's current stream."""
        places = self._descriptors.data_ptr(), self.status.data_ptr(), stream(), self._out.data_ptr()
        self._work.launch(*places, self._check)
        return self._out
