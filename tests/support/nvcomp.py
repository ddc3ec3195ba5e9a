"""nvCOMP's Python API as 5.x and 6.x have it, over host memory, and the merge kernel in NumPy."""

from __future__ import annotations

import ctypes
import types
from typing import Any

import numpy as np
import zstandard

from support.backends import MadeKernel
from tpde.codec import core_chunks, native
from tpde.codec.blob import RECORD
from tpde.codec.native import CoreLayout


def memory(address: int, size: int) -> np.ndarray:
    """Give the bytes at an address of this process."""
    return np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8)


def _span(holder: Any) -> np.ndarray:
    facts = holder.__cuda_array_interface__
    assert facts["version"] == 3
    assert facts["typestr"] == "|u1"
    return memory(facts["data"][0], facts["shape"][0])


class FakeNvcomp(types.ModuleType):
    """`nvidia.nvcomp` of a version; `calls` counts, `fail` makes the next decodes raise."""

    def __init__(self, version: str) -> None:
        super().__init__("nvidia.nvcomp")
        self.__version__ = version
        self.BitstreamKind = types.SimpleNamespace(RAW="raw")
        self.calls: list[int] = []
        self.fail = False
        self.options: list[dict[str, Any]] = []
        batches = version.startswith("6")
        module = self

        class Batch(list[Any]):
            pass

        def as_arrays(source: Any, offsets: Any = None, sizes: Any = None) -> Any:
            if not batches:
                assert offsets is None
                return [_span(holder) for holder in source]
            whole = _span(source)
            assert all(type(n) is int for n in [*offsets, *sizes])
            return Batch(whole[at : at + n] for at, n in zip(offsets, sizes, strict=True))

        class Codec:
            def __init__(self, **options: Any) -> None:
                module.options.append(options)

            def decode(self, srcs: Any, out: Any) -> Any:
                module.calls.append(len(srcs))
                if module.fail:
                    raise RuntimeError("nvCOMP Runtime failure: nvcompErrorCannotDecompress")
                assert isinstance(srcs, Batch) == batches
                targets = out if batches else [_span(holder) for holder in out]
                for frame, target in zip(srcs, targets, strict=True):
                    content = zstandard.ZstdDecompressor().decompress(frame.tobytes())
                    target[:] = np.frombuffer(content, np.uint8)
                return out

        self.as_arrays, self.Codec = as_arrays, Codec
        if batches:
            self.BatchArray = Batch


def merge_kernel(source: str, name: str, made: dict[str, int], device: int) -> MadeKernel:
    """Give the merge kernel, of 4096 or fewer words a chunk, on host memory."""
    assert (source, name, device) == ("merge.cu", "merge", 0)

    def launch(grid: int, block: int, shared: int) -> Any:
        assert (block, shared) == (128, 0)
        layout = CoreLayout(
            words=1,
            segment_words=1,
            chunk_words=4096,
            word_bytes=made["WORD"],
            rotate=made["ROTATE"],
            unit_log2=4,
        )
        return lambda stream, *given: merge(layout, grid, *(int(value) for value in given))

    return MadeKernel(launch)


def merge(
    layout: native.CoreLayout,
    chunks: int,
    header: int,
    blob: int,
    first: int,
    base: int,
    planes: int,
    out: int,
    status: int,
) -> None:
    """Do what merge.cu does, chunk by chunk, with its arguments."""
    words, segment_words, blob_bytes, count, index_at = np.frombuffer(memory(header, 40), "<u8").tolist()
    chunk_words, per, unit, number = np.frombuffer(memory(header + 40, 16), "<u4").tolist()
    slots = np.frombuffer(memory(header + 64, 8 * (count + 1)), "<u8").tolist()
    records = memory(blob + index_at, 12 * count).view(RECORD)
    b = layout.word_bytes
    for k in range(first, first + chunks):
        segment, inside = divmod(k, per)
        word = segment * segment_words + inside * chunk_words
        n = min(chunk_words, (segment + 1) * segment_words - word, words - word)
        at, slot, gathered = int(records["offset"][k]) << unit, slots[k], np.empty((b, n), np.uint8)
        for p in range(b):
            mode = int(records["modes"][k]) >> (2 * p) & 3
            if mode == 1:
                gathered[p] = records["fill"][k]
            elif mode == 2:
                gathered[p] = memory(planes + (slot - base) * chunk_words, n)
                slot += 1
            else:
                gathered[p] = memory(blob + at, n)
                at += -(-n // 16) * 16
        assert slot == slots[k + 1]
        assert at <= blob_bytes
        target = memory(out + word * b, n * b)
        core_chunks.merge(layout, gathered, target)
        if core_chunks.checksum(target) != records["checksum"][k] and not memory(status, 16).any():
            memory(status, 16)[:] = np.array([1, number, k & 0xFFFFFFFF, k >> 32], "<u4").view(np.uint8)
