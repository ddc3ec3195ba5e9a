"""The slow codec of docs/delta.md, and the document's own example."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpde.codec import delta_reference as reference
from tpde.codec.delta_reference import Model, Step
from tpde.codec.reference import Table
from tpde.errors import Corrupt, TpdeError

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "delta.md"
BASE = [0x3C01, 0x3F80, 0x3C02, 0x3F81, 0x3C03, 0x3C04, 0x3F82, 0x3C05]
TARGET = [0x3C01, 0x3F81, 0x3C02, 0x3F81, 0x3C02, 0x3C04, 0x3F82, 0x3C05]
TABLES = [Table.from_lengths(3, 1, 0, {1024: 1}, 1), Table.from_lengths(3, 1, 0, {0: 1}, 1)]
MODEL = Model(2, 1, 1, [0, 0x7C], TABLES)

kinds_of_words = st.sampled_from([(8, 0), (8, 1), (16, 0), (16, 1), (32, 0), (32, 1), (64, 0), (64, 1)])


def _shown(pattern: str) -> list[str]:
    return re.findall(pattern, DOCUMENT.read_text().partition("## 7.")[2])


def test_the_worked_example() -> None:
    model = bytes.fromhex("".join(_shown(r"`((?:[0-9a-f]{2} ){3}[0-9a-f]{2}|0[01] 0[04])`")))
    assert model == MODEL.serialize()
    data, changes = reference.encode_chunk(Model.parse(model), BASE, TARGET)
    assert (data, changes) == (bytes.fromhex("02"), 2)
    assert reference.decode_chunk(MODEL, BASE, data, changes) == TARGET
    prints = [bytes.fromhex(text) for text in _shown(r"`((?:[0-9a-f]{2} ){15}[0-9a-f]{2})`")]
    states = [b"".join(w.to_bytes(2, "little") for w in words) for words in (BASE, TARGET)]
    for state, needed in zip(states, prints, strict=True):
        assert reference.fingerprint(state) == needed
    (check,) = _shown(r"the check `([0-9a-f]{16})`")
    assert reference.check_of(MODEL, *states) == int(check, 16)


@given(kinds_of_words, st.data())
def test_every_pair_of_words_has_one_step(words: tuple[int, int], data: st.DataObject) -> None:
    bits, rotate = words
    edges = st.sampled_from([0, 1, (1 << bits) - 1, 1 << (bits - 1), (1 << (bits - 1)) - 1])
    word = edges | st.integers(0, (1 << bits) - 1)
    base, target = data.draw(word), data.draw(word)
    if base == target:
        return
    step = reference.step_between(base, target, bits, rotate)
    assert 0 <= step.size < 1 << bits
    assert reference.take_step(base, step, bits, rotate) == target


@given(st.integers(0, (1 << 64) - 1))
def test_numbers_come_back_from_buckets(x: int) -> None:
    bucket, extra = reference.bucket_of(x)
    assert bucket < 128
    assert extra == reference.extra_bits(bucket)
    assert reference.number_of(bucket, x & ((1 << extra) - 1)) == x


def test_buckets_are_in_order() -> None:
    found = [reference.bucket_of(x)[0] for x in range(1 << 16)]
    assert found == sorted(found)
    assert set(found) == set(range(32))


@pytest.mark.parametrize("kind", range(4))
@pytest.mark.parametrize("rotate", [0, 1])
def test_any_step_gives_a_word(kind: int, rotate: int) -> None:
    for base in (0, 0x7FFF, 0x8000, 0xFFFF):
        for size in (0, 1, 0x7FFF, 0xFFFF, (1 << 64) - 1):
            assert 0 <= reference.take_step(base, Step(kind, size), 16, rotate) < 1 << 16


@given(st.lists(st.tuples(st.integers(0, 65535), st.integers(0, 65535) | st.none()), max_size=60))
def test_chunks_come_back(pairs: list[tuple[int, int | None]]) -> None:
    base = [word for word, _ in pairs]
    target = [word if other is None else other for word, other in pairs]
    data, changes = reference.encode_chunk(MODEL, base, target)
    assert reference.decode_chunk(MODEL, base, data, changes) == target
    assert changes == sum(a != b for a, b in zip(base, target, strict=True))


@pytest.mark.parametrize(
    ("data", "changes"),
    [(b"", 1), (b"\x02", 9), (b"\x02\x00", 2), (b"\x0a\x00", 4), (b"\x01\xff\xff\xff", 1)],
    ids=["no bytes", "more changes than words", "a byte too many", "beyond the end", "a gap beyond the end"],
)
def test_chunks_that_cannot_be(data: bytes, changes: int) -> None:
    with pytest.raises(Corrupt):
        reference.decode_chunk(MODEL, BASE, data, changes)


def test_every_prefix_of_a_model_is_refused() -> None:
    whole = MODEL.serialize()
    for end in range(len(whole)):
        with pytest.raises(TpdeError):
            Model.parse(whole[:end])
    with pytest.raises(Corrupt):
        Model.parse(whole + bytes(4))


@pytest.mark.parametrize("at", [0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12, 15])
def test_models_that_cannot_be(at: int) -> None:
    data = bytearray(MODEL.serialize())
    data[at] = 0 if at in (5, 11) else 99
    with pytest.raises(TpdeError):
        Model.parse(bytes(data))


@given(st.binary(max_size=100), st.integers(0, 99), st.integers(1, 255))
def test_fingerprints_see_every_byte(data: bytes, at: int, flip: int) -> None:
    changed = bytearray(data)
    if at < len(data):
        changed[at] ^= flip
        assert reference.fingerprint(bytes(changed)) != reference.fingerprint(data)
