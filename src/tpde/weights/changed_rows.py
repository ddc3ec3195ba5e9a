"""Rows of matrices that deltas change, on a GPU: those of the base, in which words are replaced.

A change is coded in the order of the base's exponents, so that a row cannot be decoded without the 65,536
words of its chunk. The words that differ are kept beside it instead: 4 bytes each of bf16.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from tpde.weights.choice import Choice
from tpde.weights.launch import capturing
from tpde.weights.source import RowsDecoder

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SCRATCH = 1 << 22  # words that are looked up at a time: each takes 19 bytes of bf16


def different_words(old: Tensor, new: Tensor, word_bytes: int, first: int) -> tuple[Tensor, Tensor]:
    """The numbers of words that differ, the first word being number `first`, and what they become.

    Parameters
    ----------
    old, new : torch.Tensor
        uint8, of one size, at addresses that are multiples of the word's size.
    word_bytes, first : int
        Bytes of a word, and the number of the first one.
    """
    before, after = (it.view(_WORDS[word_bytes]) for it in (old, new))
    at = (before != after).nonzero().view(-1)
    return at + first, after[at]


class RowChanges:
    """The words of a matrix that differ from another one, by rows.

    Parameters
    ----------
    shape : sequence of int
        Rows and columns.
    differences : iterable of (torch.Tensor, torch.Tensor)
        Numbers of words in ascending order, int64, and what they become.
    """

    def __init__(self, shape: Sequence[int], differences: Iterable[tuple[Tensor, Tensor]]) -> None:
        rows, self._width = shape
        narrow = torch.int16 if self._width < 1 << 15 else torch.int32
        columns, words, counts = [], [], []
        for at, found in differences:
            columns.append((at % self._width).to(narrow))
            words.append(found)
            counts.append(torch.bincount(at // self._width, minlength=rows))
        self._columns, self._words = torch.cat(columns), torch.cat(words)
        count = torch.stack(counts).sum(0)
        self._most = int(count.max()) if rows else 0
        self._starts = torch.zeros(rows + 1, dtype=torch.int64, device=count.device)
        torch.cumsum(count, 0, out=self._starts[1:])

    @property
    def nbytes(self) -> int:
        """Bytes that it takes on its device."""
        return sum(it.numel() * it.element_size() for it in (self._columns, self._words, self._starts))

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
        words = rows.view(flat.numel(), self._width).view(self._words.dtype)
        step = max(_SCRATCH // self._most, 1)
        for begin in range(0, flat.numel(), step):
            self._replace(words[begin : begin + step], flat[begin : begin + step])

    def _replace(self, words: Tensor, ids: Tensor) -> None:
        first = self._starts[ids]
        each = torch.arange(self._most, device=ids.device)
        there = each < (self._starts[ids + 1] - first).unsqueeze(1)
        at = (first.unsqueeze(1) + each).clamp_(max=self._words.numel() - 1)
        # Where a row has fewer changes than the most that one has, a column beyond the last takes the rest.
        columns = torch.where(there, self._columns[at].to(torch.int64), self._width)
        room = torch.empty((words.shape[0], self._width + 1), dtype=words.dtype, device=words.device)
        room[:, : self._width] = words
        words.copy_(room.scatter_(1, columns, self._words[at])[:, : self._width])


class ChangedRows:
    """Rebuilds rows of a matrix under the name that is chosen.

    Parameters
    ----------
    base : callable
        What rebuilds rows of the base.
    named : mapping of str to (callable, RowChanges or None)
        For each name, what rebuilds the rows that it is on, and what differs.
    choice : Choice
        Which of them is chosen.
    """

    def __init__(
        self,
        base: RowsDecoder,
        named: Mapping[str, tuple[RowsDecoder, RowChanges | None]],
        choice: Choice,
    ) -> None:
        self._base, self._named, self._choice = base, named, choice

    def __call__(self, ids: Tensor) -> Tensor:
        """Rows `ids`: see `RowReader`."""
        if capturing(ids.device):
            self._choice.recorded = True
        name = self._choice.now()
        reader, changes = (self._base, None) if name is None else self._named.get(name, (self._base, None))
        rows = reader(ids)
        if changes is not None:
            changes.replace(rows, ids)
        return rows
