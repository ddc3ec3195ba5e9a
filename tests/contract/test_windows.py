"""Windows of the core: any matrix, as the slow codec of docs/windows.md has it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.windows import MATRICES, weights

from tpde.codec import window_cut, window_plan, windows, windows_encoder_reference
from tpde.codec import windows_reference as reference
from tpde.codec.windows import FLAG_ZERO, Words

SHAPES = [(1, 1), (1, 300), (3, 64), (16, 256), (17, 65), (15, 255), (31, 257), (40, 520)]
every_content = pytest.mark.parametrize("content", MATRICES)


def _same(found: Words, needed: Words) -> None:
    assert found.shape == needed.shape
    assert np.array_equal(found, needed)


@every_content
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_matrix_comes_back_and_as_the_document_says(content: str, shape: tuple[int, int]) -> None:
    words = MATRICES[content](*shape)
    blob = window_plan.encode(words)
    assert blob.tobytes() == windows_encoder_reference.encode(words)
    found = windows.validate(blob)
    assert (found.rows, found.columns, found.nbytes) == (*shape, blob.size)
    _same(windows.decode(blob), words)
    _same(reference.decode(blob.tobytes()), words)


@every_content
def test_threads_change_no_byte(content: str) -> None:
    words = MATRICES[content](701, 601)
    one = window_plan.encode(words)
    _same(windows.decode(one), words)
    for threads in (2, 3, 7):
        assert np.array_equal(window_plan.encode(words, threads), one)
        _same(windows.decode(one, threads=threads), words)
        windows.validate(one, threads)
        part = window_cut.cut(one, (16, 608), (192, 601), threads=threads)
        assert np.array_equal(part, window_cut.cut(one, (16, 608), (192, 601)))


@settings(max_examples=150)
@given(st.data())
def test_any_matrix(data: st.DataObject) -> None:
    """Few words again and again, so that there are windows, and any others among them."""
    rows, columns = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 600))
    some = np.array(data.draw(st.lists(st.integers(0, 65535), min_size=1, max_size=40)), np.uint16)
    draw = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    words = draw.choice(some, (rows, columns), p=draw.dirichlet(np.full(some.size, 0.3)))
    blob = window_plan.encode(words, data.draw(st.integers(1, 3)))
    windows.validate(blob)
    _same(windows.decode(blob), words)
    first = data.draw(st.integers(0, rows))
    end = data.draw(st.integers(first, rows))
    _same(windows.decode(blob, first, end), words[first:end])
    if rows * columns < 3000:
        assert blob.tobytes() == windows_encoder_reference.encode(words)


@settings(max_examples=40)
@given(st.binary(min_size=2, max_size=400), st.integers(1, 200))
def test_any_bytes(data: bytes, columns: int) -> None:
    words = np.frombuffer(data[: len(data) // 2 * 2], np.uint16)
    words = words[: words.size // columns * columns].reshape(-1, columns)
    if words.size:
        blob = window_plan.encode(words)
        _same(windows.decode(blob), words)
        assert blob.tobytes() == windows_encoder_reference.encode(words)


@every_content
def test_parts_are_what_their_words_are(content: str) -> None:
    words = MATRICES[content](70, 523)
    blob = window_plan.encode(words)
    for rows in ((0, 70), (0, 16), (16, 48), (32, 70), (64, 70)):
        for columns in ((0, 523), (0, 64), (64, 523), (192, 320), (256, 512), (64, 448), (512, 523)):
            part = window_cut.cut(blob, rows, columns)
            windows.validate(part)
            _same(windows.decode(part), words[slice(*rows), slice(*columns)])
    part = window_cut.cut(blob, (16, 70), (64, 523))
    assert part.tobytes() == windows_encoder_reference.cut(blob.tobytes(), 16, 70, 64, 523)
    _same(windows.decode(window_cut.cut_rows(blob, 16, 32)), words[16:32])
    _same(windows.decode(window_cut.cut_columns(blob, 128, 523)), words[:, 128:])


def test_parts_of_parts_are_parts() -> None:
    blob = window_plan.encode(weights(96, 900))
    twice = window_cut.cut(window_cut.cut(blob, (16, 96), (128, 900)), (32, 64), (64, 640))
    assert np.array_equal(twice, window_cut.cut(blob, (48, 80), (192, 768)))
    whole = window_cut.cut(blob, (0, 96), (0, 900))
    assert np.array_equal(whole, blob)


def test_rows_are_decoded_alone() -> None:
    words = weights(50, 300)
    blob = window_plan.encode(words)
    for first in range(51):
        for end in (first, *range(first + 1, 51, 7), 50):
            _same(windows.decode(blob, first, end, threads=2), words[first:end])


def test_zeros_have_a_pair_of_their_own_where_that_pays() -> None:
    assert windows.validate(window_plan.encode(MATRICES["pruned"](64, 256))).flags == FLAG_ZERO
    assert windows.validate(window_plan.encode(MATRICES["weights"](64, 256))).flags == 0
    assert windows.validate(window_plan.encode(MATRICES["zeros"](64, 256))).flags == 0


def test_weights_take_as_much_as_the_document_says() -> None:
    for columns, most in ((4096, 11.25), (384, 11.28)):
        words = weights(4 << 20 >> columns.bit_length() - 1, columns)
        plan = window_plan.WindowPlan(words)
        assert 8 * plan.nbytes / words.size < most


def test_what_is_not_there_decodes_to_finite_numbers() -> None:
    """A blob of one row and column, taken for one of all that its tiles have room for."""
    for record in range(250):
        for flags in (0, FLAG_ZERO):
            padding = reference.decode_word(reference.PADDING, record, flags)
            assert padding >> 7 == (record & 1 if flags else record)
            assert padding & 127 == 0
    blob = bytearray(window_plan.encode(np.array([[0x7FC1]], np.uint16)).tobytes())
    blob[24] = 64
    whole = windows.decode(bytes(blob))
    assert whole[0, 0] == 0x7FC1
    assert (whole[0, 1:] >> 7 <= 249).all()
