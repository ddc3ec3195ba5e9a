"""Sparse changes to a tensor on a GPU: the chunk map that `kernels/scatter.cu` takes, and its launch.

Positions and new words lie in one buffer on the device, the *data*; the map says where. Callers put the data
and `ChunkMap.descriptors` there. A launch goes to the caller's stream and synchronizes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tpde.codec.native import Bytes
from tpde.cuda import compile as nvrtc
from tpde.cuda.device import facts

SOURCE = "scatter.cu"
THREADS = 256
EACH = 4  # as in the kernel
BLOCKS = 8  # of 256 threads fill a multiprocessor of 2048

RECORD = np.dtype(
    [
        ("positions", "<u8"),
        ("words", "<u8"),
        ("origin", "<u8"),
        ("changes", "<u4"),
        ("reserved", "<u4"),
    ]
)


class Chunk(NamedTuple):
    """Changes that lie together: so many positions and as many new words.

    Positions are 32-bit and count words from `origin`, so that a tensor may have any number of words.
    """

    positions: int  # byte offset in the data, a multiple of 4
    words: int  # byte offset in the data, a multiple of the word's size
    origin: int
    changes: int


class ChunkMap:
    """Chunks of changes to one tensor: one launch writes them all.

    Parameters
    ----------
    chunks : sequence of Chunk
        In any order. No two positions may name the same word.
    word_bytes : int
        Bytes of a word: 1, 2, 4 or 8.
    words : int
        Words of the tensor.
    data_bytes : int
        Size of the data.
    device : int
        The device's number.

    Attributes
    ----------
    descriptors : ndarray of uint8
        What the caller puts on the device, at a multiple of 16, for `launch`.

    Raises
    ------
    ValueError
        If a chunk does not lie in the data, or starts outside the tensor.
    """

    def __init__(
        self, chunks: Sequence[Chunk], *, word_bytes: int, words: int, data_bytes: int, device: int
    ) -> None:
        if word_bytes not in (1, 2, 4, 8):
            raise ValueError(f"words of {word_bytes} bytes; 1, 2, 4 or 8 are possible")
        for number, it in enumerate(chunks):
            if it.positions % 4 or it.words % word_bytes:
                raise ValueError(f"chunk {number}: positions and words are not aligned to their sizes")
            ends = it.positions + 4 * it.changes, it.words + word_bytes * it.changes
            if min(it.positions, it.words, it.origin, it.changes) < 0 or max(ends) > data_bytes:
                raise ValueError(f"chunk {number} ends at byte {max(ends)} of {data_bytes} of data")
            if it.origin > words or it.changes >= 1 << 32:
                raise ValueError(f"chunk {number}: {it.changes} changes from word {it.origin} of {words}")
        self._device, self._word_bytes, self._words = device, word_bytes, words
        self._chunks = len(chunks)
        # Tiles of the largest chunk: blocks find nothing to do in the smaller ones, and go on.
        self._tiles = -(-max((it.changes for it in chunks), default=0) // (THREADS * EACH))
        records = np.zeros(len(chunks), RECORD)
        for name in Chunk._fields:
            records[name] = [getattr(it, name) for it in chunks]
        self.descriptors: Bytes = records.view(np.uint8)

    def launch(
        self,
        descriptors: int,
        status: int,
        stream: int,
        data: int,
        out: int,
        first: int = 0,
        count: int | None = None,
    ) -> None:
        """Write the changes of all chunks, or of `count` chunks from `first` on.

        Parameters
        ----------
        descriptors : int
            Address of `descriptors` on the device.
        status : int
            Address of four uint32 on the device. They stay as they are, or if the first was 0 become 1, 0 and
            the number of a chunk with a position outside the tensor, lower half first. All other positions
            are written.
        stream : int
            The stream's handle.
        data : int
            Address of the data, a multiple of 16.
        out : int
            Address of the tensor, a multiple of the word's size.
        first, count : int
            Which chunks.
        """
        count = self._chunks - first if count is None else count
        if not 0 <= first <= first + count <= self._chunks:
            raise ValueError(f"chunks {first} to {first + count} of {self._chunks}")
        if not count * self._tiles:
            return
        defines = {"WORD": self._word_bytes, "THREADS": THREADS}
        nvrtc.launch(
            nvrtc.kernel(SOURCE, "scatter", defines, self._device),
            min(count * self._tiles, BLOCKS * facts(self._device).multiprocessors),
            THREADS,
            0,
            stream,
            np.uint64(descriptors),
            np.uint64(first),
            np.uint64(count),
            np.uint64(self._tiles),
            np.uint64(data),
            np.uint64(out),
            np.uint64(self._words),
            np.uint64(status),
        )
