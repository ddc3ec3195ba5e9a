"""Sections 1 to 4 of docs/delta.md in plain Python: slow, readable, in the document's order.

Written from the document alone, to test the C core against. Words are lists of integers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tpde.codec.reference import Table, align, split
from tpde.errors import Corrupt, Truncated

# ---------------------------------------------------------------------------------------------
# 1. Steps


class Step(NamedTuple):
    """How a word changes (1.1)."""

    kind: int
    size: int


def step_between(base: int, target: int, bits: int, rotate: int) -> Step:
    """Give the kind and the size of a change between two different words (1.1)."""
    if rotate:
        half = 1 << (bits - 1)
        d = target % half - base % half
        if (base ^ target) & half:
            return Step(2, d) if d >= 0 else Step(3, -d - 1)
    else:
        d = (target - base) % (1 << bits)
        d -= (d >> (bits - 1)) << bits
    return Step(0, d - 1) if d > 0 else Step(1, -d - 1)


def take_step(base: int, step: Step, bits: int, rotate: int) -> int:
    """Change a word (1.1)."""
    d = (step.size + 1, -step.size - 1, step.size, -step.size - 1)[step.kind]
    if not rotate:
        return (base + d) % (1 << bits)
    half = 1 << (bits - 1)
    return (base & half ^ (half if step.kind >= 2 else 0)) | (base % half + d) % half


def bucket_of(x: int) -> tuple[int, int]:
    """Give a number's bucket and how many extra bits it has (1.2)."""
    if x < 2:
        return x, 0
    k = x.bit_length() - 1
    return 2 * k + (x >> (k - 1) & 1), k - 1


def extra_bits(bucket: int) -> int:
    """Give how many extra bits the numbers of a bucket have (1.2)."""
    return max(0, bucket // 2 - 1)


def number_of(bucket: int, extra: int) -> int:
    """Invert `bucket_of`, given the extra bits."""
    return bucket if bucket < 2 else (2 + (bucket & 1)) << (bucket // 2 - 1) | extra


# ---------------------------------------------------------------------------------------------
# 2. Models

MAX_CLASSES = 16  # delta.md 2.1
TOKEN_BITS = 14  # delta.md 1.3


@dataclass
class Model:
    """How changes are coded (2.1)."""

    word_bytes: int
    rotate: int
    folded: int
    first: list[int]
    tables: list[Table]

    @classmethod
    def parse(cls, data: bytes) -> Model:
        """Parse and check a model that takes all of the data."""
        if len(data) < 4 or len(data) < align(4 + data[2], 4):
            raise Truncated(f"a model of {len(data)} bytes ends inside its header")
        word_bytes, rotate, classes, folded = data[:4]
        if word_bytes not in (1, 2, 4, 8) or rotate > 1 or folded > 1:
            raise Corrupt(f"a model's header is {data[:4].hex(' ')}")
        if not 1 <= classes <= MAX_CLASSES:
            raise Corrupt(f"a model has {classes} classes, needs 1 to {MAX_CLASSES}")
        first, at = list(data[4 : 4 + classes]), align(4 + classes, 4)
        if first[0] or any(a >= b for a, b in itertools.pairwise(first)):
            raise Corrupt(f"a model's classes begin at {first}")
        if any(data[4 + classes : at]):
            raise Corrupt("padding of a model must be zero")
        tables = []
        for _ in range(classes):
            table, at = Table.parse(data, at)
            if table.kind != 3 or not table.escape_bits:
                raise Corrupt("a table of a model is not of kind 3, or has no escape")
            tables.append(table)
        if at != len(data):
            raise Corrupt(f"a model of {len(data)} bytes, its tables end at {at}")
        return cls(word_bytes, rotate, folded, first, tables)

    def serialize(self) -> bytes:
        """Give the model's bytes."""
        head = bytes([self.word_bytes, self.rotate, len(self.first), self.folded, *self.first])
        return head.ljust(align(len(head), 4), b"\0") + b"".join(t.serialize() for t in self.tables)

    def class_of(self, word: int) -> int:
        """Give a word's class (2.3)."""
        symbol = split(word.to_bytes(self.word_bytes, "little"), self.word_bytes, self.rotate)[-1][0]
        return sum(first <= symbol for first in self.first) - 1


# ---------------------------------------------------------------------------------------------
# 3. Chunks

CHUNK_WORDS = 65536  # delta.md 3.1


def places(model: Model, base: Sequence[int]) -> list[tuple[int, int]]:
    """Give the class and the position of each of a chunk's words, in the order of places (3.2)."""
    return sorted((model.class_of(word), i) for i, word in enumerate(base))


def _low_first(value: int, count: int) -> str:
    return "".join(str(value >> i & 1) for i in range(count))


def encode_chunk(model: Model, base: Sequence[int], target: Sequence[int]) -> tuple[bytes, int]:
    """Encode a chunk; returns its bytes and how many changes it has (3.3, 3.4)."""
    bits, order = 8 * model.word_bytes, places(model, base)
    out, start, changes = "", 0, 0
    for place, (_, i) in enumerate(order):
        if base[i] == target[i]:
            continue
        kind, size = step_between(base[i], target[i], bits, model.rotate)
        gap_bucket, gap_extra = bucket_of(place - start)
        size_bucket, size_extra = bucket_of(size)
        coded = 0 if model.folded and kind == 1 else kind
        out += model.tables[order[start][0]].encode(gap_bucket << 9 | coded << 7 | size_bucket)
        out += _low_first(place - start, gap_extra) + _low_first(size, size_extra)
        if model.folded and kind < 2:
            out += str(kind)
        start, changes = place + 1, changes + 1
    out += "0" * (-len(out) % 8)
    return bytes(int(out[i : i + 8][::-1], 2) for i in range(0, len(out), 8)), changes


class _Bits:
    """The bits of a chunk."""

    def __init__(self, data: bytes) -> None:
        self._bits, self.at = "".join(_low_first(byte, 8) for byte in data), 0

    def number(self, count: int) -> int:
        """Take a number, least significant bit first."""
        self.at += count
        if self.at > len(self._bits):
            raise Corrupt(f"a chunk of {len(self._bits)} bits needs at least {self.at}")
        return int("0" + self._bits[self.at - count : self.at][::-1], 2)

    def token(self, table: Table) -> int:
        """Take a codeword, and what follows an escape."""
        for length in range(1, table.max_bits + 1):
            word = self._bits[self.at : self.at + length]
            if (value := table.value_of.get(word)) is not None:
                self.at += length
                return value if value >= 0 else self.number(TOKEN_BITS)
        raise Corrupt(f"a chunk of {len(self._bits)} bits ends within a codeword at {self.at}")

    def end(self) -> None:
        """Check that what is left is less than a byte (3.5)."""
        if len(self._bits) - self.at >= 8:
            raise Corrupt(f"a chunk of {len(self._bits)} bits, its changes end at {self.at}")


def decode_chunk(model: Model, base: Sequence[int], data: bytes, changes: int) -> list[int]:
    """Decode a chunk: the target's words (3)."""
    order, bits, out, start = places(model, base), _Bits(data), list(base), 0
    if changes > len(order):
        raise Corrupt(f"{changes} changes of {len(order)} words")
    for _ in range(changes):
        if start == len(order):
            raise Corrupt("a change beyond the last word")
        token = bits.token(model.tables[order[start][0]])
        gap_bucket, kind, size_bucket = token >> 9, token >> 7 & 3, token & 127
        gap = number_of(gap_bucket, bits.number(extra_bits(gap_bucket)))
        size = number_of(size_bucket, bits.number(extra_bits(size_bucket)))
        if model.folded and kind == 0:
            kind = bits.number(1)
        if start + gap >= len(order):
            raise Corrupt("a change beyond the last word")
        i = order[start + gap][1]
        out[i] = take_step(base[i], Step(kind, size), 8 * model.word_bytes, model.rotate)
        start += gap + 1
    bits.end()
    return out


def words_of(data: bytes, word_bytes: int) -> list[int]:
    """Give a tensor's words."""
    return [int.from_bytes(data[i : i + word_bytes], "little") for i in range(0, len(data), word_bytes)]


def encode(model: Model, base: bytes, target: bytes) -> list[tuple[bytes, int]]:
    """Encode a tensor: its chunks, and how many changes each has."""
    old, new = words_of(base, model.word_bytes), words_of(target, model.word_bytes)
    return [encode_chunk(model, old[at:end], new[at:end]) for at, end in _chunks(len(old))]


def decode(model: Model, base: bytes, chunks: Sequence[tuple[bytes, int]]) -> bytes:
    """Decode a tensor from its chunks, and how many changes each has."""
    old = words_of(base, model.word_bytes)
    out = []
    for (at, end), (data, changes) in zip(_chunks(len(old)), chunks, strict=True):
        out += decode_chunk(model, old[at:end], data, changes)
    return b"".join(word.to_bytes(model.word_bytes, "little") for word in out)


def _chunks(words: int) -> Iterator[tuple[int, int]]:
    for at in range(0, words, CHUNK_WORDS):
        yield at, min(at + CHUNK_WORDS, words)


# ---------------------------------------------------------------------------------------------
# 4. Fingerprints and checks

GOLDEN = 0x9E3779B97F4A7C15  # delta.md 4
MASK = (1 << 64) - 1


def fingerprint(data: bytes) -> bytes:
    """Give the fingerprint of a tensor's bytes (4)."""
    a = b = 0
    data = data.ljust(align(len(data), 8), b"\0")
    for i in range(len(data) // 8):
        x, k = int.from_bytes(data[8 * i : 8 * i + 8], "little"), (i + 1) * GOLDEN & MASK
        y, z = x ^ k, x + k & MASK
        a += (y & 0xFFFFFFFF) * (y >> 32)
        b += (z & 0xFFFFFFFF) * (z >> 32)
    return (a & MASK).to_bytes(8, "little") + (b & MASK).to_bytes(8, "little")


def _mix(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def check_of(model: Model, base: bytes, target: bytes) -> int:
    """Give the check of a tensor's changes (4)."""
    total = 0
    words = zip(words_of(base, model.word_bytes), words_of(target, model.word_bytes), strict=True)
    for i, (old, new) in enumerate(words):
        if old != new:
            total += _mix((_mix((old + (i + 1) * GOLDEN) & MASK) + new) & MASK)
    return total & MASK
