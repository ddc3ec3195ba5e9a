"""Deltas on a GPU: launches of the kernels of `kernels/delta.cu` (docs/delta.md, sections 1 to 4).

Nothing here allocates on the device: callers put `DeltaBatch.items`, `DeltaBatch.whose` and a model's image
there, and pass addresses. Launches go to the caller's stream and synchronize nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tpde.codec.delta import MAX_CLASSES, ChangeModel, chunk_count
from tpde.codec.native import Bytes
from tpde.cuda.backend import Kernel, current
from tpde.format.delta_head import Numbers

SOURCE = "delta.cu"
THREADS = 256
AHEAD = 24  # bytes that `decode` may read beyond the last payload
CHANGED = 0xFFFFFFFF  # the size of a chunk whose words have changed since they were counted
_READERS = 32  # threads of a block of `decode`: few, so that few chunks use many processors

_ITEM = np.dtype([(name, "<u8") for name in ("base", "target", "words", "first")])
_MODEL = np.dtype(
    [
        ("classes", "<u4"),
        ("folded", "<u4"),
        ("first", "u1", MAX_CLASSES),
        ("at", "<u4", MAX_CLASSES),
        ("bits", "<u4", MAX_CLASSES),
        ("escape", "<u4", MAX_CLASSES),
    ]
)


def prepare(device: int) -> None:
    """Compile and load a kernel, for the errors that there may be.

    Raises
    ------
    MissingDependency, UnsupportedDevice, CompileError
        If the kernels cannot run.
    """
    current().kernel(SOURCE, "survey", {"WORD": 1, "ROTATE": 0, "THREADS": THREADS}, device)


def most_bytes(word_bytes: int) -> int:
    """Bytes that a change takes at most: 12 bits, 14 after an escape, 14 of its gap, its size's, and one."""
    return 5 + word_bytes


def model_image(model: ChangeModel, *, encode: bool) -> Bytes:
    """A model as the kernels take it, at a multiple of 16: with its tables for encoding, or for decoding."""
    head, tables = np.zeros(1, _MODEL), model.tables()
    entries = [it.encode if encode else it.decode for it in tables]
    head["classes"], head["folded"] = model.classes, model.folded
    head["first"][0, : model.classes] = np.frombuffer(model.data, np.uint8, model.classes, 4)
    head["at"][0, : model.classes] = np.cumsum([0, *(it.size for it in entries[:-1])])
    head["bits"][0, : model.classes] = [it.bits for it in tables]
    head["escape"][0, : model.classes] = [it.escape for it in tables]
    return np.concatenate([head.view(np.uint8), *(it.view(np.uint8) for it in entries)])


class Pair(NamedTuple):
    """Addresses of a tensor's words in both states, 0 if one is not needed, and how many there are."""

    base: int
    target: int
    words: int


class Lists(NamedTuple):
    """Addresses of what there is for each chunk: a number, or where something begins."""

    counts: int  # u32: changes
    starts: int  # u64: changes of the chunks before


class Changes(NamedTuple):
    """Addresses of two lists of all changes: u16, places or positions in chunks; words, steps or new ones."""

    places: int
    words: int


class DeltaBatch:
    """Tensors of one kind of words, which launches take together.

    Parameters
    ----------
    pairs : sequence of Pair
        The tensors.
    word_bytes, rotate : int
        Their kind of words (format.md 2.1).
    device : int
        The device's number.

    Attributes
    ----------
    items, whose : ndarray
        What the caller puts on the device, at multiples of 16.
    chunks : int
        How many the tensors have, one after the other.
    """

    def __init__(self, pairs: Sequence[Pair], word_bytes: int, rotate: int, device: int) -> None:
        counts = [chunk_count(it.words) for it in pairs]
        rows = np.zeros(len(pairs), _ITEM)
        for name in Pair._fields:
            rows[name] = [getattr(it, name) for it in pairs]
        rows["first"] = np.cumsum([0, *counts])[:-1]
        self.items: Bytes = rows.view(np.uint8)
        self.whose: Numbers = np.repeat(np.arange(len(pairs), dtype=np.uint32), counts)
        self.chunks = int(self.whose.size)
        self._defines = {"WORD": word_bytes, "ROTATE": rotate, "THREADS": THREADS}
        self._device = device

    def prepare(self, name: str) -> Kernel:
        """Compile and load a kernel that is launched later."""
        return current().kernel(SOURCE, name, self._defines, self._device)

    def _launch(self, name: str, stream: int, *addresses: int) -> None:
        if self.chunks:
            self.prepare(name).launch(self.chunks, THREADS, 0)(stream, *addresses)

    def survey(self, items: int, whose: int, model: int, sums: int, totals: int, stream: int) -> None:
        """Add up fingerprints of bases, and count the words of each class.

        Parameters
        ----------
        items, whose : int
            Addresses of the attributes.
        model : int
            Address of a model's image, or 0: nothing is counted.
        sums : int
            Address of four uint64 zeros for each tensor: the first two become its fingerprint.
        totals : int
            Address of `MAX_CLASSES` uint32 zeros for each chunk. They stay so with a model of one class.
        stream : int
            The stream's handle.
        """
        self._launch("survey", stream, items, whose, model, sums, totals)

    def prints(self, items: int, whose: int, sums: int, counts: int, varied: int, stream: int) -> None:
        """Add up fingerprints of both states, and compare these.

        Parameters
        ----------
        items, whose : int
            Addresses of the attributes.
        sums : int
            Address of four uint64 zeros for each tensor: they become both fingerprints, the base's first.
        counts : int
            Address of an uint32 zero for each chunk, which becomes the number of its changes.
        varied : int
            Address of an uint32 zero for each tensor, which becomes 1 if not all words of its target are
            the same.
        stream : int
            The stream's handle.
        """
        self._launch("prints", stream, items, whose, sums, counts, varied)

    def encode(
        self,
        items: int,
        whose: int,
        model: int,
        lists: Lists,
        places: int,
        scratch: int,
        out: int,
        sizes: int,
        checks: int,
        stream: int,
    ) -> None:
        """Encode what changed.

        Parameters
        ----------
        items, whose : int
            Addresses of the attributes.
        model : int
            Address of a model's image for encoding.
        lists : Lists
            The changes of each chunk, as `prints` counted them.
        places : int
            Address of an uint64 for each chunk: where its bytes go, in units of 4 bytes from `out` on.
            There are zeros, `most_bytes` for each change.
        scratch : int
            Address of room for two uint32 for each change.
        out : int
            Where bytes go.
        sizes : int
            Address of an uint32 zero for each chunk, which becomes the bytes that are used, or `CHANGED`.
        checks : int
            Address of an uint64 zero for each tensor, which becomes the check of its changes under a model of
            one class.
        stream : int
            The stream's handle.
        """
        self._launch("encode", stream, items, whose, model, *lists, places, scratch, out, sizes, checks)

    def gather(self, out: int, places: int, sizes: int, offsets: int, to: int, stream: int) -> None:
        """Copy what `encode` wrote, chunk after chunk, to their uint64 `offsets` from `to` on."""
        self._launch("gather", stream, out, places, sizes, offsets, to)

    def decode(
        self,
        items: int,
        whose: int,
        model: int,
        totals: int,
        lists: Lists,
        data: tuple[int, int, int],
        found: Changes,
        good: int,
        bad: int,
        stream: int,
    ) -> None:
        """Read places and steps of what changed.

        Parameters
        ----------
        items, whose : int
            Addresses of the attributes.
        model : int
            Address of a model's image for decoding.
        totals : int
            What `survey` counted.
        lists : Lists
            The changes of each chunk.
        data : tuple of int
            Addresses of the bytes, with `AHEAD` more after them; of an uint64 for each chunk, where its bytes
            begin; and of an uint32 for each, how many there are.
        found : Changes
            Room for places, and for steps.
        good : int
            Address of an uint32 zero for each chunk, which becomes the number of its changes if it is whole.
        bad : int
            Address of an uint32 zero for each tensor, which becomes 1 if one of its chunks is damaged.
        stream : int
            The stream's handle.
        """
        addresses = items, whose, model, totals, *lists, *data, *found, good, bad, self.chunks
        kernel, blocks = self.prepare("decode"), -(-self.chunks // _READERS)
        kernel.launch(blocks, _READERS, 0)(stream, *addresses)

    def locate(
        self,
        items: int,
        whose: int,
        model: int,
        good: int,
        starts: int,
        unsorted: Changes,
        found: Changes,
        sums: int,
        checks: int,
        bad: int,
        stream: int,
    ) -> None:
        """Find where changes are, and what the words there become; nothing of it is written to the tensors.

        Parameters
        ----------
        items, whose, model, good, bad : int
            As `decode` takes and leaves them.
        starts : int
            As in `Lists`.
        unsorted : Changes
            What `decode` found, which is used up.
        found : Changes
            Room for as many: they have what was found in the order of memory.
        sums : int
            Address of four uint64 for each tensor: what changes add to its fingerprint is added to the last
            two.
        checks : int
            As `encode` takes it, or 0.
        stream : int
            The stream's handle.
        """
        found_there = *found, sums, checks, bad
        self._launch("locate", stream, items, whose, model, good, starts, *unsorted, *found_there)

    def write(self, items: int, whose: int, lists: Lists, found: Changes, stream: int) -> None:
        """Write the changes that `locate` found."""
        self._launch("write", stream, items, whose, *lists, *found)
