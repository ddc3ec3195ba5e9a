"""Packing a tensor as `tpde pack` does, into one array."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tpde.codec import selection as planning
from tpde.codec.blob import BlobWriter
from tpde.codec.selection import CodecName
from tpde.format.blob_header import BlobHeader, parse_blob_header
from tpde.format.container import TensorSpec
from tpde.io.sinks import BytesSink


class Packed(NamedTuple):
    """A blob, its header and table section, and what it was made of."""

    blob: np.ndarray
    header: BlobHeader
    section: bytes
    data: bytes


def opened(blob: np.ndarray, data: bytes) -> Packed:
    """Give a blob with its header parsed."""
    header = parse_blob_header(bytes(blob[:8192]), blob.size)
    return Packed(blob, header, blob[header.tables_at : header.index_at].tobytes(), data)


def pack(spec: TensorSpec, data: bytes, codec: CodecName = "prefix", threads: int = 4) -> Packed | None:
    """Pack a tensor as `tpde pack` does, however little it shrinks; None if it would stay plain."""
    raw = np.frombuffer(data, np.uint8)
    sample = np.concatenate([raw[a:b] for a, b in planning.sample_ranges(spec)])
    plan = planning.plan_tensor(spec, sample, codec)
    if plan is None:
        return None
    sink = BytesSink()
    writer = BlobWriter(plan, sink, 0, threads)
    writer.write(raw)
    size = writer.finish(bytes(16))
    return opened(np.frombuffer(bytes(sink.data[:size]), np.uint8), data)
