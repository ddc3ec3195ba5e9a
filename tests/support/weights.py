"""Weights in every layout that the packer chooses, as items of kernels that decode them."""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np

from support.contents import FLOATS
from support.packed import Packed, pack
from tpde.cuda import items
from tpde.format.container import TensorSpec

LEAST_SHARED = 99 << 10  # what a block may have where it is least
WARPS = 24  # that cards with so little shall hold
# Weights whose blobs, as the packer writes them, tell how large tables and coded planes are.
LAYOUTS = ("BF16", "BF16 small", "F16", "F32", "BF16 in F32", "F64", "F8_E4M3", "F8_E5M2", "I8")


def item(packed: Packed) -> items.Item:
    """Give what a kernel decodes; it lies nowhere."""
    tables = items.lookup_tables(packed.header, packed.section)
    assert tables is not None
    return items.Item(packed.header, tables, 0, 0, 0)


@functools.cache
def weights(layout: str) -> Packed:
    """Weights of rows that differ in scale, as gpu-decode.md measures them: 512 chunks, or one if small."""
    draw = np.random.default_rng(5)
    shape = (4, 1024) if layout == "BF16 small" else (1024, 4096)
    rows = draw.standard_normal(shape) * (0.02 * np.exp(0.3 * draw.standard_normal((shape[0], 1))))
    dtype, values = layout.split(maxsplit=1)[0], rows.astype(np.float32)
    if layout == "BF16 in F32":
        dtype, values = "F32", (values.view(np.uint32) & 0xFFFF0000).view(np.float32)
    elif layout == "F64":
        values = rows
    elif layout.startswith("F8"):  # each 128x128 block's absolute maximum scaled to the largest value
        largest = float(ml_dtypes.finfo(FLOATS[layout]).max)
        blocks = values.reshape(shape[0] // 128, 128, shape[1] // 128, 128)
        values = (blocks / (np.abs(blocks).max(axis=(1, 3), keepdims=True) / largest)).reshape(shape)
    elif layout == "I8":  # each row's absolute maximum scaled to 127
        values = np.rint(values / (np.abs(values).max(axis=1, keepdims=True) / 127)).astype(np.int8)
    packed = pack(TensorSpec(dtype, shape), values.astype(FLOATS.get(dtype, np.int8)).tobytes())
    assert packed is not None
    return packed
