"""Tensors packed by kernels: what tests on a CPU and on a GPU share."""

from __future__ import annotations

from typing import NamedTuple

import ml_dtypes
import numpy as np

from support.contents import rng
from support.packed import Packed
from support.window_encoding import guards, room
from tpde.codec.blob import RECORD
from tpde.codec.native import Bytes
from tpde.cuda.encode import ALIGNMENT, EncodePlan, Found, PackEncoder
from tpde.format.container import TensorSpec


def spread(words: int) -> Bytes:
    """Give bf16 weights in runs of 8192 of very different scales, so that two tables pay."""
    draw = rng("spread", words)
    runs = -(-words // 8192)
    scale = np.where(np.arange(runs) % 2, 0.02, 3.0).astype(np.float32)[:, None]
    values = draw.standard_normal((runs, 8192), np.float32) * scale
    return values.reshape(-1)[:words].astype(ml_dtypes.bfloat16).view(np.uint8)


def uneven(words: int) -> Bytes:
    """Give bf16 weights of which one lane has any exponents: it takes far more bits than others."""
    draw = rng("uneven", words)
    values = (draw.standard_normal(words, np.float32) * 0.02).astype(ml_dtypes.bfloat16).view(np.uint16)
    lane = np.arange(words) % 256 // 8 == 5
    return np.where(lane, draw.integers(0, 1 << 16, words), values).astype(np.uint16).view(np.uint8)


def assert_same_blob(found: np.ndarray, expected: Packed) -> None:
    """Compare with the CPU's blob, and name what differs first."""
    header = expected.header
    assert found.size == expected.blob.size
    wrong = np.flatnonzero(found != expected.blob)
    if not wrong.size:
        return
    at = int(wrong[0])
    places = {"header": 0, "tables": header.tables_at, "index map": header.index_at}
    if at >= header.chunks_at:
        records = expected.blob[header.index_at :][: RECORD.itemsize * header.chunks].view(RECORD)
        starts = records["offset"].astype(np.int64) << header.unit_log2
        number = int(np.searchsorted(starts, at, "right")) - 1
        name, start = f"chunk {number}", int(starts[number])
    else:
        name, start = [it for it in places.items() if it[1] <= at][-1]
    raise AssertionError(
        f"{wrong.size} bytes differ, the first at {at - start} of the {name}: found {found[at]:#x}, "
        f"expected {expected.blob[at]:#x}"
    )


class Encoding(NamedTuple):
    """A tensor that was packed by kernels on the CPU, and all that was used."""

    encoder: PackEncoder
    words: np.ndarray
    scratch: np.ndarray
    chosen: EncodePlan
    found: Found
    blob: np.ndarray


def encoding_on_host(
    spec: TensorSpec, data: bytes | Bytes, first: int = 0, *, spread: bool = True
) -> Encoding | None:
    """Pack a tensor, which begins `first` bytes after a multiple of 16; None if the CPU shall."""
    memory = room(spec.nbytes + first, 16, 0xA5)
    words = memory[first:]
    words[:] = np.frombuffer(data, np.uint8)
    encoder = PackEncoder(words.ctypes.data, spec, 0, spread=spread)
    sample = room(encoder.sample_bytes, ALIGNMENT, 0xA5)
    encoder.gather(sample.ctypes.data, 0)
    assert (guards(sample) == 0xA5).all()
    chosen = encoder.choose(sample, "prefix")
    if chosen is None:
        return None
    scratch = room(chosen.scratch_bytes, ALIGNMENT, 0xA5)
    scratch[chosen.image_at : chosen.image_at + chosen.image.size] = chosen.image
    encoder.measure(chosen, scratch.ctypes.data, 0)
    assert (guards(scratch) == 0xA5).all()
    found = encoder.found(chosen, scratch[: chosen.found_bytes])
    blob = room(found.nbytes, ALIGNMENT, 0xA5)
    encoder.encode(chosen, scratch.ctypes.data, blob.ctypes.data, 0)
    assert (guards(scratch) == 0xA5).all()
    assert (guards(blob) == 0xA5).all()
    assert (blob[: found.header.chunks_at] == 0xA5).all()  # the head is the host's
    head = found.head(bytes(16))
    blob[: head.size] = head
    return Encoding(encoder, words, scratch, chosen, found, blob)
