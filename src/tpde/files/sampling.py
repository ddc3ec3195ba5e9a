"""A look at each tensor of a file: what it is, how it is stored, and the words of a sample."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tpde.codec.registry import codec_of
from tpde.codec.selection import sample_ranges
from tpde.files.forward_order import forward_order
from tpde.files.reader import PackedFile
from tpde.files.tensor_reader import BlobTensor, StoredTensor
from tpde.format.container import TensorSpec

PLAIN = "plain"
# Tensors that are counted at a time: one by one takes many times as long.
_BATCH, _BATCH_BYTES = 1024, 1 << 20
_NOTHING = memoryview(b"")


@dataclass
class Look:
    """What there is to know of a tensor, and the words of its sample."""

    __slots__ = ("codec", "name", "spec", "stored_bytes", "words")

    name: str
    spec: TensorSpec
    stored_bytes: int
    codec: str
    words: memoryview


def looks_at(opened: PackedFile, sample: bool) -> Iterator[list[Look]]:
    """Tensors in the order of a forward pass, so many at a time that their samples stay small."""
    batch, whole, held = list[Look](), list[Look](), 0
    specs = opened.specs
    for name in forward_order(specs):
        spec = specs[name]
        ranges = sample_ranges(spec) if sample and spec.nbytes else []
        if len(ranges) <= 1 and opened.is_plain(name):
            look = Look(name, spec, spec.nbytes, PLAIN, _NOTHING)
            if ranges:
                whole.append(look)
        else:
            tensor = opened.tensor(name)
            codec = codec_of(tensor.blob.header).name if isinstance(tensor, BlobTensor) else PLAIN
            words = _read_sample(tensor, ranges) if ranges else _NOTHING
            look = Look(name, spec, tensor.stored_bytes, codec, words)
        held += sum([end - begin for begin, end in ranges])
        batch.append(look)
        if len(batch) == _BATCH or held >= _BATCH_BYTES:
            _read_whole(opened, whole)
            yield batch
            batch, whole, held = [], [], 0
    _read_whole(opened, whole)
    yield batch


def _read_whole(opened: PackedFile, looks: list[Look]) -> None:
    """Read tensors that are stored as they are, and are their own samples."""
    for it, words in zip(looks, opened.read_plain([it.name for it in looks]), strict=True):
        it.words = words


def _read_sample(tensor: StoredTensor, ranges: list[tuple[int, int]]) -> memoryview:
    words, at = np.empty(sum(end - begin for begin, end in ranges), np.uint8), 0
    for begin, end in ranges:
        tensor.read(begin, end, words[at : at + end - begin])
        at += end - begin
    return words.data
