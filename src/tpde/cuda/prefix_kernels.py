"""Kernels for weights in prefix codes, compiled ahead, while the weights are read."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np

from tpde.codec.blob import BlobWriter
from tpde.codec.native import Bytes
from tpde.codec.selection import plan_tensor
from tpde.cuda import digest, encode
from tpde.cuda.backend import Backend
from tpde.cuda.compiling import Asked, compile_all, submit
from tpde.cuda.decode import WorkList
from tpde.cuda.items import Item, lookup_tables
from tpde.format.blob_header import MAX_FIXED_BYTES, parse_blob_header
from tpde.format.container import TensorSpec
from tpde.io.sinks import BytesSink

_SHAPE = 256, 1024  # of the sample: 32 chunks
_MOST_MORE = 16  # eighths that a tensor's largest chunk may take beside the usual


def compile_ahead(dtype: str, device: int, *, packing: bool) -> None:
    """Compile in another thread what a trained model's weights of a dtype take.

    That is what such numbers have that are drawn at random, and then what those have of which one chunk takes
    more, as one of a synthetic 8 B model's 130 tensors. Of what other weights take, and other dtypes than
    `BF16`, `F16` and `F32`, nothing is compiled before they are decoded. Whatever fails fails again there.

    Parameters
    ----------
    dtype : str
        Its name in safetensors.
    device : int
        The device's number.
    packing : bool
        The device packs them, too.
    """
    submit(_compile, (dtype, packing), device)


@functools.cache
def _compile(backend: Backend, dtype: str, packing: bool, device: int) -> None:
    spec, data = TensorSpec(dtype, _SHAPE), _weights(dtype)
    if data is None:
        return
    usual = _item(spec, data)
    asked = WorkList([usual], device).asked()
    rarer = _of_larger_chunks(usual, asked, device)
    if packing:
        asked.append(Asked(digest.SOURCE, "sums", {}))
        asked.insert(0, Asked(encode.SOURCE, "measure", encode.usual(spec)))  # packing comes first
    compile_all(backend, asked + rarer, device)


def _of_larger_chunks(item: Item, asked: list[Asked], device: int) -> list[Asked]:
    """What decodes the same with one chunk so large that it takes other kernels; none if there are none."""
    usual = item.header.max_stream_bytes
    for more in range(1, _MOST_MORE + 1):
        header = replace(item.header, max_stream_bytes=usual + usual * more // 8)
        found = WorkList([item._replace(header=header)], device).asked()
        if found != asked:
            return found
    return []


def _weights(dtype: str) -> Bytes | None:
    """Random weights with a trained model's statistics, as bytes."""
    drawn = 0.02 * np.random.default_rng(0).standard_normal(_SHAPE[0] * _SHAPE[1], np.float32)
    if dtype == "F32":
        return drawn.view(np.uint8)
    if dtype == "F16":
        return drawn.astype(np.float16).view(np.uint8)
    if dtype == "BF16":
        return (drawn.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return None


def _item(spec: TensorSpec, data: Bytes) -> Item:
    """What decodes a tensor, packed, at no address."""
    plan = plan_tensor(spec, data, "prefix")
    assert plan is not None
    sink = BytesSink(data.size)
    writer = BlobWriter(plan, sink, 0, 1)
    writer.write(data)
    size = writer.finish(bytes(16))
    tables = lookup_tables(plan.header, plan.section)
    assert tables is not None
    return Item(parse_blob_header(bytes(sink.data[:MAX_FIXED_BYTES]), size), tables, 0, 0, 0)
