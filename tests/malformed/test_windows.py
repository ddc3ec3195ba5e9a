"""Windows that are cut anywhere, or of which bytes are changed: refused by name, or decoded alike."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from support.contents import rng
from support.guarded import guarded, room
from support.windows import MATRICES

from tpde.codec import window_cut, window_plan, windows, windows_encoder_reference
from tpde.codec import windows_reference as reference
from tpde.codec.native import Bytes
from tpde.errors import Corrupt, TpdeError, Truncated, UnsupportedVersion

WORDS = MATRICES["weights"](21, 70)
BLOB = window_plan.encode(WORDS)
FOUND = windows.validate(BLOB)


def _outcome(data: Bytes) -> type[TpdeError] | None:
    """What is said of a blob: the same by the slow codec, whatever the threads."""
    outcomes = set()
    for check in (windows.validate, lambda it: windows.validate(it, 3), _parsed):
        try:
            check(data)
        except TpdeError as error:
            outcomes.add(type(error))
        else:
            outcomes.add(None)
    (outcome,) = outcomes
    return outcome


def test_every_prefix_is_truncated() -> None:
    for size in range(BLOB.size):
        with pytest.raises(Truncated):
            windows.validate(BLOB[:size])
        if size % 50 < 2 or size < 130:
            for use in (windows.decode, lambda it: window_cut.cut_rows(it, 0, 16), _parsed):
                with pytest.raises(Truncated):
                    use(guarded(BLOB[:size]))


def _parsed(data: Bytes) -> None:
    reference.parse(data.tobytes())


@pytest.mark.parametrize("behind", [1, 128, 1408])
def test_bytes_behind_a_blob_are_refused(behind: int) -> None:
    with pytest.raises(Corrupt, match="bytes behind its last chunk"):
        windows.validate(np.append(BLOB, np.zeros(behind, np.uint8)))


def test_every_byte_before_the_bodies() -> None:
    draw, outcomes = rng("windows"), dict[object, int]()
    for at in range(FOUND.bodies_at):
        for change in (1, 0x80, int(draw.integers(1, 256))):
            damaged = guarded(BLOB)
            damaged[at] ^= change
            outcome = _outcome(damaged)
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
            if outcome is None:
                found = windows.decode(damaged)
                assert np.array_equal(found, reference.decode(damaged.tobytes()))
                windows.validate(window_cut.cut(damaged, (16, found.shape[0]), (64, found.shape[1])))
            else:
                with contextlib.suppress(TpdeError, ValueError):  # other rows than those there is room for
                    windows.decode(damaged, out=room(2 * WORDS.size).view("<u2").reshape(WORDS.shape))
    assert set(outcomes) == {None, Corrupt, Truncated, UnsupportedVersion}
    assert outcomes[Corrupt] > FOUND.bodies_at


def test_any_bodies_decode_alike() -> None:
    draw = rng("bodies")
    for content in ("weights", "pruned", "edges"):
        blob = window_plan.encode(MATRICES[content](19, 330))
        found = windows.validate(blob)
        for share in (0.001, 0.3, 1):
            damaged = guarded(blob)
            body = damaged[found.bodies_at :]
            places = draw.random(body.size) < share
            body[places] = draw.integers(0, 256, int(places.sum()))
            windows.validate(damaged)
            decoded = windows.decode(damaged)
            assert np.array_equal(decoded, reference.decode(damaged.tobytes()))
            part = window_cut.cut(damaged, (16, 19), (128, 330))
            assert np.array_equal(windows.decode(part), decoded[16:, 128:])


def _changed(at: int, *values: int) -> Bytes:
    damaged = BLOB.copy()
    damaged[at : at + len(values)] = values
    return damaged


@pytest.mark.parametrize(
    ("at", "values", "says"),
    [
        (7, (0x1B,), "no magic of windows"),
        (10, (2,), "flags that are not known"),
        (11, (1,), "flags that are not known"),
        (12, (1,), "reserved bytes"),
        (16, (0,), "rows, columns or entries out of range"),
        (24, (0,), "rows, columns or entries out of range"),
        (19, (16,), "rows, columns or entries out of range"),
        (27, (16,), "rows, columns or entries out of range"),
        (36, (1,), "rows, columns or entries out of range"),
        (18, (16, 0, 0, 0, 0, 0, 0, 0, 16), "rows, columns or entries out of range"),
        (47, (1,), "reserved bytes"),
        (127, (1,), "reserved bytes"),
        (48, (0,), "does not ascend from 1 to 127"),
        (63, (128,), "does not ascend from 1 to 127"),
        (48, (2, 2), "does not ascend from 1 to 127"),
        (48, tuple(range(3, 19)), "lacks a power of two"),
        (63, (127,), "lacks a power of two"),
        (128, (250,), "a row's window is out of range"),
        (128 + 20, (255,), "a row's window is out of range"),
        (128 + 21, (2,), "a row's window is out of range"),
        (FOUND.offsets_at - 1, (1,), "padding is not zero"),
        (FOUND.entries_at - 1, (1,), "padding is not zero"),
        (FOUND.bodies_at - 1, (1,), "padding is not zero"),
        (FOUND.offsets_at, (1,), "entries of no chunk"),
        (FOUND.offsets_at + 4, (255, 255), "a chunk's entries are out of range"),
        (FOUND.offsets_at + 8, (1,), "entries of no chunk"),
    ],
)
def test_what_cannot_be_is_named(at: int, values: tuple[int, ...], says: str) -> None:
    with pytest.raises(Corrupt, match=says):
        windows.validate(_changed(at, *values))
    with pytest.raises(Corrupt):
        reference.parse(_changed(at, *values).tobytes())


def test_the_highest_base_is_124() -> None:
    windows.validate(_changed(128, 249))
    assert FOUND.table[-1] == 64 or FOUND.table[-2] == 64


def _of_one(*entries: int, rows: int = 3, columns: int = 70) -> bytes:
    """Give a blob of one chunk with these entries."""
    blank = reference.parse(windows_encoder_reference.encode(np.zeros((rows, columns), np.uint16)))
    return blank._replace(entries=[list(entries)]).serialize()


def _entry(row: int, column: int, index: int = 0) -> int:
    return reference.place_of(row, column) | index << 12


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ((_entry(0, 1), _entry(0, 0)), "do not ascend"),
        ((_entry(0, 1), _entry(0, 1)), "do not ascend"),
        ((_entry(0, 1, 3), _entry(0, 1, 2)), "do not ascend"),
        ((_entry(2, 1, 15), _entry(1, 2)), "do not ascend"),
        ((_entry(3, 0),), "a word that is not there"),
        ((_entry(15, 0),), "a word that is not there"),
        ((_entry(0, 70),), "a word that is not there"),
        ((_entry(2, 127),), "a word that is not there"),
        ((_entry(2, 128),), "a word that is not there"),
        ((_entry(0, 255),), "a word that is not there"),
    ],
)
def test_entries_that_cannot_be(entries: tuple[int, ...], says: str) -> None:
    data = _of_one(*entries)
    for use in (windows.validate, windows.decode, lambda it: window_cut.cut_rows(it, 0, 3)):
        with pytest.raises(Corrupt, match=says) as caught:
            use(data)
        assert caught.value.chunk == 0
    with pytest.raises(Corrupt):
        reference.parse(data)


def test_sixteen_entries_of_one_place() -> None:
    data = _of_one(*(_entry(2, 69, i) for i in range(16)))
    assert windows.validate(data).entries == 16
    decoded = windows.decode(data)
    assert np.array_equal(decoded, reference.decode(data))
    assert decoded[2, 69] != 0


def test_chunks_that_share_entries_are_not_cut() -> None:
    """Where only those chunks are looked at that the part has, and offsets descend between them."""
    words = np.zeros((32, 512), np.uint16)
    words[:16, :256] = MATRICES["escapes"](16, 256)
    blob = window_plan.encode(words)
    found = windows.validate(blob)
    offsets = blob[found.offsets_at :][:20].view("<u4")
    assert offsets.tolist() == [0, *[found.entries] * 4]
    offsets[2] = 0
    with pytest.raises(Corrupt, match="entries are out of range"):
        windows.validate(blob)
    with pytest.raises(Corrupt, match="entries of more than one chunk"):
        window_cut.cut_columns(blob, 0, 256)
