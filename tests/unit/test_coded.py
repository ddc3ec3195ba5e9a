"""Sparse changes that stay coded: pieces of them, and rows of what they are on."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from support.backends import MadeBackend, MadeKernel
from support.contents import rng
from support.emulated import kernel_on_cpu, on_cpu  # noqa: F401

from tpde.codec.delta import CHUNK_WORDS, ChangeModel
from tpde.codec.delta_planner import plan

torch = pytest.importorskip("torch", reason="needs torch")

from tpde.weights import coded  # noqa: E402
from tpde.weights.changed_rows import RowChanges, different_words  # noqa: E402
from tpde.weights.coded import CodedChange, CodedPiece, Coding, changing  # noqa: E402


def changed(words: int, share: float, *seed: Any) -> tuple[np.ndarray, np.ndarray, CodedChange]:
    draw = rng("coded", words, share, *seed)
    old = (draw.standard_normal(words).astype(np.float32).view(np.uint32) >> 16).astype("<u2")
    new = old.copy()
    at = draw.random(words) < share
    new[at] += draw.integers(1, 4, int(at.sum())).astype("<u2")
    before, after = old.view(np.uint8), new.view(np.uint8)
    model = ChangeModel(plan([(before, after)], 2, 1), encode=True)
    sparse = model.encode(before, after)
    assert sparse is not None
    return before, after, CodedChange.on(torch.device("cpu"), Coding(model), sparse)


@pytest.mark.parametrize("words", [5, CHUNK_WORDS, 3 * CHUNK_WORDS + 7])
@pytest.mark.parametrize("most", [1, 2000, 1 << 30])
def test_pieces_are_all_of_it(words: int, most: int) -> None:
    old, new, change = changed(words, 0.02)
    whole = CodedPiece.whole(change, old.size, 64)
    pieces = list(whole.cut(most))
    assert [it.first for it in pieces] == [0, *(it.last for it in pieces[:-1])]
    assert pieces[-1].last == change.changes.size
    assert sum(it.words for it in pieces) == words
    assert (
        sum(it.changes for it in pieces) == whole.changes == int((old.view("<u2") != new.view("<u2")).sum())
    )
    assert all(it.changes <= most or it.last == it.first + 1 for it in pieces)
    assert len(pieces) == (1 if most > 1 << 20 else len(pieces))
    out = torch.zeros(64 + old.size + 64, dtype=torch.uint8)
    out[64:-64] = torch.from_numpy(old)
    for decode in changing(pieces, torch.device("cpu")):
        decode(out)
    assert np.array_equal(out[64:-64].numpy(), new)
    assert not out[:64].any()
    assert not out[-64:].any()


@pytest.mark.usefixtures("on_cpu")
def test_words_beneath_are_counted_once_a_stream(launch_on: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another stream does not wait for what the first one counted."""
    old, new, change = changed(CHUNK_WORDS + 9, 0.02)
    (decode,) = changing([CodedPiece.whole(change, old.size, 0)], torch.device("cpu"))
    now, launched = 0, list[int]()

    def on_any_stream(*which: Any) -> MadeKernel:
        made = kernel_on_cpu(*which)

        def run(size: tuple[int, ...], stream: int, *given: Any) -> None:
            if which[1] == "survey":
                launched.append(stream)
            made.launch(*size)(0, *given)

        return MadeKernel(lambda *size: functools.partial(run, size))

    launch_on(MadeBackend(on_any_stream, kind="cpu"))
    monkeypatch.setattr(coded, "stream_of", lambda where: now)
    for now in (5, 5, 7, 5, 7):  # noqa: B007 - `stream_of` reads it
        out = torch.from_numpy(old.copy())
        decode(out)
        assert np.array_equal(out.numpy(), new)
    assert launched == [5, 7]


def test_a_part_in_host_memory() -> None:
    old, new, change = changed(4 * CHUNK_WORDS + 100, 0.01)
    begin, end = 2 * CHUNK_WORDS * 2, 4 * CHUNK_WORDS * 2
    part = old[begin:end].copy()
    change.apply_on_host(part, 2)
    assert np.array_equal(part, new[begin:end])
    last = old[end:].copy()
    change.apply_on_host(last, 4)
    assert np.array_equal(last, new[end:])


def test_bytes_that_stay_are_the_same_change() -> None:
    _, _, change = changed(1000, 0.1)
    assert change.moved(lambda it: it) is change
    assert change.moved(torch.clone) is not change
    assert change.nbytes == change.data.numel() + 2 * (24 + 64 + 4)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("scratch", [1, 1 << 22])
@pytest.mark.parametrize("far", [1, 1000])
def test_rows(dtype: Any, scratch: int, far: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a width that takes several steps from one word to the next, cut in the middle of a row."""
    monkeypatch.setattr("tpde.weights.changed_rows._SCRATCH", scratch)
    draw, width = torch.Generator().manual_seed(3), 1111
    least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    old = torch.randint(least, most, (50, width), generator=draw, dtype=dtype)
    new = old.clone()
    new[torch.rand(old.shape, generator=draw) < 0.002] += far if dtype.itemsize > 1 else 1
    new[3, 255] += 1
    new[3, 510] -= 1
    new[5, 256] -= 1
    new[7] = old[7]  # a row without changes, and one of which all is another
    new[9] = old[9] + 1
    new[49] = old[49]
    new[49, width - 1] += 1
    cut, flat = 20 * width + 5, [it.view(-1) for it in (old, new)]
    found = [
        different_words(*(it[part].view(torch.uint8) for it in flat), dtype.itemsize, part.start or 0)
        for part in (slice(cut), slice(cut, None))
    ]
    changes = RowChanges((50, width), found)
    differ = int((old != new).sum())
    each = 2 if far < 128 else 1 + dtype.itemsize
    assert each * differ + 8 * 51 <= changes.nbytes <= each * (differ + 5 * 50) + 8 * 51
    some = torch.tensor([[9, 7, 9], [49, 0, 20]]), torch.tensor(9), torch.empty(0).int()
    for ids in (torch.arange(50), *some):
        rows = old[ids.long()].clone()
        changes.replace(rows, ids)
        assert torch.equal(rows, new[ids.long()])


def test_a_difference_that_has_no_positive_one() -> None:
    """Of a flipped sign: it is 2^15 modulo 2^16."""
    old = torch.full((2, 8), 5, dtype=torch.int16)
    new = old.clone()
    new[1, 3] ^= -(1 << 15)
    flat = [it.view(-1).view(torch.uint8) for it in (old, new)]
    rows = old.clone()
    RowChanges((2, 8), [different_words(*flat, 2, 0)]).replace(rows, torch.arange(2))
    assert torch.equal(rows, new)


def test_no_row_changes() -> None:
    old = torch.zeros(4, 8, dtype=torch.int16)
    flat = old.view(-1).view(torch.uint8)
    changes = RowChanges((4, 8), [different_words(flat, flat, 2, 0)])
    rows = old.clone()
    changes.replace(rows, torch.arange(4))
    assert torch.equal(rows, old)
