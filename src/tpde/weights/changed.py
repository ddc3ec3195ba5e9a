"""A source on another one: what deltas make of it, each when it is chosen. No bytes move for that."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from tpde.codec.delta import CHUNK_WORDS
from tpde.codec.native import Bytes
from tpde.codec.registry import Codec, Gpu
from tpde.errors import PackedWeight
from tpde.format.blob_header import align
from tpde.weights.active_delta import ALWAYS, UNNAMED, ActiveDelta
from tpde.weights.changed_rows import ChangedRows, RowChanges, different_words
from tpde.weights.coded import CodedChange, CodedPiece, by_kernels, changing
from tpde.weights.launch import capturing
from tpde.weights.pack_source import packed_again
from tpde.weights.packed_tensor import PackedTensor
from tpde.weights.rows import RowReader
from tpde.weights.source import Decoder, RowsDecoder, Source, decoder, require_on
from tpde.weights.span import Span

_STRIP_BYTES = 64 << 20  # of a matrix, compared at a time


class Variant(NamedTuple):
    """A tensor as one of the names has it.

    Attributes
    ----------
    start : Source
        What it is decoded from: the base, or a source of its own.
    changes : tuple of CodedChange
        What changed in it since, one after the other.
    """

    start: Source
    changes: tuple[CodedChange, ...] = ()


class Changed(Source):
    """A source, and what some names make of it: one of these is decoded, or the base.

    Parameters
    ----------
    base : Source
        What all of them are on the device of.
    variants : mapping of str to Variant
        By name; what is not named is as the base has it.
    active_delta : ActiveDelta
        Which of them is decoded.

    Attributes
    ----------
    base : Source
        As above.
    active_delta : ActiveDelta
        As above.
    """

    lead = 2  # has all others decoded that are decoded with it
    active_delta: ActiveDelta

    def __init__(self, base: Source, variants: Mapping[str, Variant], active_delta: ActiveDelta) -> None:
        self.base, self.variants, self.active_delta = base, dict(variants), active_delta
        self.name, self.header, self.version = base.name, base.header, base.version + 1
        self.settled, self._section = base.settled, base._section
        self._row_bytes = 0  # of what rows are rebuilt with

    @property
    def device(self) -> torch.device:
        """Where the tensor is rebuilt."""
        return self.base.device

    @property
    def codec(self) -> Codec:
        """That of the base, but that nothing on a GPU decodes it alone."""
        return self.base.codec._replace(gpu=Gpu.NONE)

    @property
    def packed_bytes(self) -> int:
        """Bytes of the base, and of all variants."""
        return self.base.packed_bytes + self.delta_bytes

    @property
    def delta_bytes(self) -> int:
        """Bytes of all variants, on a GPU with what rows of them are rebuilt with."""
        own = sum(it.start.packed_bytes for it in self.variants.values() if it.start is not self.base)
        coded = sum(change.nbytes for it in self.variants.values() for change in it.changes)
        return own + coded + self._row_bytes

    def now(self) -> Variant:
        """What is decoded."""
        name = self.active_delta.now()
        found = None if name is None else self.variants.get(name)
        return Variant(self.base) if found is None else found

    def starts(self) -> list[Source]:
        """All that it is decoded from, each once."""
        own = [it.start for it in self.variants.values() if it.start is not self.base]
        return [self.base, *own]

    # ---- its bytes ----

    @property
    def blob(self) -> Tensor:
        """A blob of what is decoded now, packed for it where changes are on top: see `Source.blob`."""
        now = self.now()
        if not now.changes:
            return now.start.blob
        return packed_again(self)

    @property
    def memory(self) -> Tensor:
        """That of the base."""
        return self.base.memory

    def check(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Raise what `apply` would."""
        for source in self.starts():
            source.check(fn)

    def apply(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Take the same bytes where a function moves them: see `Source.apply`."""
        self.check(fn)
        moved = {
            name: Variant(it.start, tuple(change.moved(fn) for change in it.changes))
            for name, it in self.variants.items()
        }
        before = [source.version for source in self.starts()]
        try:
            for source in self.starts():
                source.apply(fn)
        finally:  # some may be elsewhere by now
            if moved != self.variants or before != [source.version for source in self.starts()]:
                self.variants = moved
                self.version += 1

    def check_load(self, other: Source) -> None:
        """Raise what `load` would: deltas to choose from are on this blob, and on no other."""
        if self.active_delta is not ALWAYS:
            raise PackedWeight(
                f"`{self.name}` is a base with deltas on it, and another packed weight would be loaded "
                "beneath them",
                hint="load the model again without them, or call `tpde.unpack_module(model)` first",
                where=self.name,
            )
        self.base.check_load(other)

    def load(self, other: Source, *, assign: bool = False) -> None:
        """Take another blob, with nothing on it: see `Source.load`."""
        self.check_load(other)
        self.base.load(other, assign=assign)
        self.variants = {}
        self.version += 1

    def stored(self) -> Tensor:
        """A blob of what is decoded now."""
        now = self.now()
        return self.blob if now.changes else now.start.stored()

    def clone(self, copy: Callable[[Tensor], Tensor] = torch.clone) -> Source:
        """What is decoded now, in memory of its own, which goes by no name any longer."""
        now = self.now()
        start = now.start.clone(copy)
        if not now.changes:
            return start
        changes = tuple(it.moved(copy) for it in now.changes)
        return Changed(start, {UNNAMED: Variant(start, changes)}, ALWAYS)

    def require_restorable(self) -> None:
        """Refuse to be turned into a plain weight that stays, if what it is decoded from does."""
        self.now().start.require_restorable()

    # ---- decoding ----

    def together(self, items: Sequence[tuple[Source, int]]) -> Decoder:
        """What rebuilds sources, and then what changed in them since."""
        return ChangedDecoder(items)

    def chunks(self, first: int, last: int, offset: int) -> Decoder:
        """What rebuilds some chunks."""
        size = self.header.word_bytes
        begin, end = (it * size for it in self.header.chunk_range(first, last))

        def decode(out: Tensor) -> None:
            out[offset : offset + end - begin].copy_(part_of(self.now(), begin, end))

        return decode

    def decode_on_host(self, begin: int, end: int, out: Bytes) -> None:
        """Decode bytes `begin` to `end` of what is decoded now: see `Source.decode_on_host`."""
        now, step = self.now(), CHUNK_WORDS * self.header.word_bytes
        low, high = _around(begin, end, self.nbytes, step)
        if (low, high) == (begin, end) or not now.changes:
            room, low, high = out, begin, end
        else:
            room = torch.empty(high - low, dtype=torch.uint8, device="cpu").numpy()
        now.start.decode_on_host(low, high, room)
        for change in now.changes:
            change.apply_on_host(room, low // step)
        if room is not out:
            out[:] = room[begin - low : end - low]

    def row_reader(self) -> RowsDecoder:
        """What rebuilds rows: on a GPU those of the base, in which words are then replaced."""
        if not by_kernels(self.device):
            return RowReader(self)
        base, readers = self.base.row_reader(), dict[str, tuple[RowsDecoder, RowChanges | None]]()
        for name, it in self.variants.items():
            reader = base if it.start is self.base else it.start.row_reader()
            readers[name] = reader, RowChanges(self.shape, self._differences(it)) if it.changes else None
        self._row_bytes = sum(changes.nbytes for _, changes in readers.values() if changes is not None)
        return ChangedRows(base, readers, self.active_delta)

    def _differences(self, variant: Variant) -> Iterator[tuple[Tensor, Tensor]]:
        """Where a variant differs from what it is decoded from, strip by strip."""
        strip = align(_STRIP_BYTES, CHUNK_WORDS * self.header.word_bytes)
        for begin in range(0, self.nbytes, strip):
            end = min(begin + strip, self.nbytes)
            old, new = (part_of(it, begin, end) for it in (Variant(variant.start), variant))
            yield different_words(old, new, self.header.word_bytes, begin // self.header.word_bytes)

    def item(self, offset: int, chunks: object = None) -> None:
        """None: no kernel decodes a base and what is on it."""
        return


def _around(begin: int, end: int, nbytes: int, step: int) -> tuple[int, int]:
    """The whole chunks of a change that hold some bytes of a tensor."""
    return begin // step * step, min(align(end, step), nbytes)


def part_of(variant: Variant, begin: int, end: int) -> Tensor:
    """Bytes `begin` to `end` of a variant, in memory of their own."""
    start, word = variant.start, variant.start.header.word_bytes
    if not variant.changes:
        return Span(PackedTensor(start), begin, end).decoded()
    step = CHUNK_WORDS * word
    low, high = _around(begin, end, start.nbytes, step)
    found = Span(PackedTensor(start), low, high).decoded()
    first, last = low // step, -(-high // step)
    for change in variant.changes:
        for decode in changing([CodedPiece(change, first, last, 0, (high - low) // word)], start.device):
            decode(found)
    return found[begin - low : end - low]


class ChangedDecoder:
    """Rebuilds sources into one buffer, some of them with deltas on them, by the name that is chosen.

    Parameters
    ----------
    items : sequence of (Source, int)
        Each with its byte offset in the buffer.

    Notes
    -----
    For each name, all that a call needs is on the device from now on.
    """

    def __init__(self, items: Sequence[tuple[Source, int]]) -> None:
        # A base may be `Changed` itself, by another one: the decoder of all bases sees to that.
        self._active_delta = next(it.active_delta for it, _ in items if isinstance(it, Changed))
        mine = [it for it, _ in items if isinstance(it, Changed) and it.active_delta is self._active_delta]
        self._device = mine[0].device
        require_on(self._device, (start for it in mine for start in it.starts()))
        bases = [(self._as(it, None).start, at) for it, at in items]
        self._base = decoder(bases)
        self._named: dict[str, tuple[Decoder, list[Decoder]]] = {}
        for name in sorted({name for it in mine for name in it.variants}):
            found = [(self._as(it, name), at) for it, at in items]
            starts = [(it.start, at) for it, at in found]
            changes = [change for pieces in _rounds(found) for change in changing(pieces, self._device)]
            self._named[name] = self._base if starts == bases else decoder(starts), changes

    def _as(self, source: Source, name: str | None) -> Variant:
        """What a source is under a name."""
        if not isinstance(source, Changed) or source.active_delta is not self._active_delta:
            return Variant(source)
        found = None if name is None else source.variants.get(name)
        return Variant(source.base) if found is None else found

    def __call__(self, out: Tensor) -> None:
        """Decode everything into a buffer, on the current stream."""
        name = self._active_delta.now()
        if capturing(self._device):
            self._active_delta.recorded = True
        found = None if name is None else self._named.get(name)
        if found is None:
            self._base(out)
            return
        found[0](out)
        for change in found[1]:
            change(out)


def _rounds(items: Iterable[tuple[Variant, int]]) -> Iterator[list[CodedPiece]]:
    """The first changes of all tensors, then the second ones, and so on."""
    each = [
        [CodedPiece.whole(change, it.start.nbytes, at) for change in it.changes]
        for it, at in items
        if it.changes
    ]
    for found in zip_longest(*each):
        yield [piece for piece in found if piece is not None]
