"""Rows of matrices that deltas change, on a GPU: those of the base, in which words are replaced.

A change is coded in the order of the base's exponents, so that a row cannot be decoded without the 65,536
words of its chunk. What differs is kept beside it instead, in the order of memory: a byte for how far it is
from one word to the next, and mostly one for the difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from tpde.weights.active_delta import ActiveDelta
from tpde.weights.launch import capturing
from tpde.weights.source import RowsDecoder

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FAR = 255  # of a gap in a byte
_SCRATCH = 1 << 20  # changes that are looked up at a time: each takes some 40 bytes meanwhile


def different_words(old: Tensor, new: Tensor, word_bytes: int, first: int) -> tuple[Tensor, Tensor]:
    """The numbers of words that differ, the first word being number `first`, and by what.

    Parameters
    ----------
    old, new : torch.Tensor
        uint8, of one size, at addresses that are multiples of the word's size.
    word_bytes, first : int
        Bytes of a word, and the number of the first one.
    """
    before, after = (it.view(_WORDS[word_bytes]) for it in (old, new))
    at = (before != after).nonzero().view(-1)
    return at + first, after[at] - before[at]


class RowChanges:
    """The words of a matrix that differ from another one, by rows.

    Parameters
    ----------
    shape : sequence of int
        Rows and columns.
    differences : iterable of (torch.Tensor, torch.Tensor)
        Numbers of words in ascending order, int64, and differences, to be added modulo the words' size.
    """

    def __init__(self, shape: Sequence[int], differences: Iterable[tuple[Tensor, Tensor]]) -> None:
        rows, self._width = shape
        at, steps = (torch.cat(it) for it in zip(*differences, strict=True))
        self._word = steps.dtype
        row, column = at // self._width, at % self._width
        # From the word before in its row, or from before its first one: 1 at least.
        gaps = torch.diff(column, prepend=column.new_zeros(1))
        first = torch.diff(row, prepend=row.new_full((1,), -1)) > 0
        gaps = torch.where(first, column + 1, gaps)
        # What does not fit a byte is gone in several steps, at all but the last of which nothing differs.
        more = (gaps - 1) // _FAR
        ends = torch.cumsum(more + 1, 0) - 1
        total = int(ends[-1]) + 1 if ends.numel() else 0
        self._gaps = torch.full((total,), _FAR, dtype=torch.uint8, device=at.device)
        self._gaps[ends] = (gaps - _FAR * more).to(torch.uint8)
        small = self._word is not torch.uint8 and bool(((steps >= -128) & (steps < 128)).all())
        self._steps = torch.zeros(total, dtype=torch.int8 if small else self._word, device=at.device)
        self._steps[ends] = steps.to(self._steps.dtype)
        counts = torch.zeros(rows, dtype=torch.int64, device=at.device).index_add_(0, row, more + 1)
        self._most = int(counts.max()) if rows else 0
        self._starts = torch.zeros(rows + 1, dtype=torch.int64, device=at.device)
        torch.cumsum(counts, 0, out=self._starts[1:])

    @property
    def nbytes(self) -> int:
        """Bytes that it takes on its device."""
        return sum(it.numel() * it.element_size() for it in (self._gaps, self._steps, self._starts))

    def replace(self, rows: Tensor, ids: Tensor) -> None:
        """Replace words in rows that were looked up.

        Parameters
        ----------
        rows : torch.Tensor
            Of shape `(*ids.shape, columns)`, contiguous.
        ids : torch.Tensor
            Their numbers.
        """
        if not self._most:
            return
        flat = ids.reshape(-1).to(torch.int64)
        words = rows.view(flat.numel(), self._width).view(self._word)
        step = max(_SCRATCH // self._most, 1)
        for begin in range(0, flat.numel(), step):
            self._replace(words[begin : begin + step], flat[begin : begin + step])

    def _replace(self, words: Tensor, ids: Tensor) -> None:
        first = self._starts[ids]
        each = torch.arange(self._most, device=ids.device)
        there = each < (self._starts[ids + 1] - first).unsqueeze(1)
        at = (first.unsqueeze(1) + each).clamp_(max=self._gaps.numel() - 1)
        # Where a row has fewer changes than the most that one has, a column beyond the last takes the rest.
        columns = torch.cumsum(self._gaps[at], 1, dtype=torch.int64) - 1
        columns = torch.where(there, columns, self._width)
        room = torch.zeros((words.shape[0], self._width + 1), dtype=words.dtype, device=words.device)
        room[:, : self._width] = words
        changed = room.gather(1, columns) + self._steps[at].to(words.dtype)
        words.copy_(room.scatter_(1, columns, changed)[:, : self._width])


class ChangedRows:
    """Rebuilds rows of a matrix under the name that is chosen.

    Parameters
    ----------
    base : callable
        What rebuilds rows of the base.
    named : mapping of str to (callable, RowChanges or None)
        For each name, what rebuilds the rows that it is on, and what differs.
    active_delta : ActiveDelta
        Which of them is chosen.
    """

    def __init__(
        self,
        base: RowsDecoder,
        named: Mapping[str, tuple[RowsDecoder, RowChanges | None]],
        active_delta: ActiveDelta,
    ) -> None:
        self._base, self._named, self._active_delta = base, named, active_delta

    def __call__(self, ids: Tensor) -> Tensor:
        """Rows `ids`: see `RowReader`."""
        if capturing(ids.device):
            self._active_delta.recorded = True
        name = self._active_delta.now()
        reader, changes = (self._base, None) if name is None else self._named.get(name, (self._base, None))
        rows = reader(ids)
        if changes is not None:
            changes.replace(rows, ids)
        return rows
