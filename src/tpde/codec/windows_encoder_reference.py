"""Sections 6 and 7 of docs/windows.md in plain Python: what an encoder chooses, and how blobs are cut.

Written from the document alone, as `windows_reference`, which has the sections before.
"""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np

from tpde.codec.reference import align
from tpde.codec.windows_reference import (
    CHUNK_COLUMNS,
    MAX_BASE,
    PADDING,
    PAIR_COLUMNS,
    POWERS,
    STRIPE_ROWS,
    TABLE_SIZE,
    ZERO,
    Blob,
    Coded,
    Words,
    at_place,
    encode_word,
    entries_of,
    parse,
    read_body,
    write_body,
)

# ---------------------------------------------------------------------------------------------
# 6. Choosing


def choose_record(row: Words, flags: int) -> int:
    """Choose a row's window: its record (6.1)."""
    exponents = row >> 7 & 255
    counts = np.bincount(exponents, minlength=264)
    step, width = 2 if counts[0] else 1, 8
    if flags & ZERO:
        counts[:2], width = 0, 6
    return max(range(0, 2 * MAX_BASE + 2, step), key=lambda x: int(counts[x : x + width].sum()))


def choose_table(xors: Counter[int]) -> bytes:
    """Choose the table (6.2)."""
    others = sorted(set(range(1, 128)) - set(POWERS), key=lambda x: (-xors[x], x))
    return bytes(sorted([*POWERS, *others[: TABLE_SIZE - len(POWERS)]]))


def say(table: bytes) -> dict[int, tuple[int, ...]]:
    """Give the entries that say each XOR (6.3)."""
    said: dict[int, tuple[int, ...]] = {}
    for size in range(1, len(POWERS) + 1):
        for indices in itertools.combinations(range(TABLE_SIZE), size):
            x = 0
            for index in indices:
                x ^= table[index]
            if x:
                said.setdefault(x, indices)
        if len(said) == 127:
            break
    return said


def encode(words: Words) -> bytes:
    """Encode a matrix (6.4)."""
    with_flag, without = _encode_with(words, ZERO), _encode_with(words, 0)
    count = [sum(map(len, blob.entries)) for blob in (with_flag, without)]
    return (with_flag if count[0] < count[1] else without).serialize()


def _encode_with(words: Words, flags: int) -> Blob:
    rows, columns = words.shape
    chosen = bytes(choose_record(row, flags) for row in words)
    records = chosen.ljust(align(rows, STRIPE_ROWS), b"\0")
    # A row has few different words of many: each is coded once.
    coded = [{int(word): encode_word(int(word), chosen[r], flags) for word in np.unique(row)}
             for r, row in enumerate(words)]  # fmt: skip
    xors: Counter[int] = Counter()
    for r, row in enumerate(words):
        for word, count in zip(*np.unique(row, return_counts=True), strict=True):
            if xor := coded[r][int(word)].xor:
                xors[xor] += int(count)
    table = choose_table(xors)
    said = say(table)
    blob = Blob(rows, columns, flags, table, records, [], [])
    for stripe, chunk, pairs in blob.chunks():
        places = []
        for place in range(1024 * pairs):
            row, column = at_place(place)
            row, column = row + STRIPE_ROWS * stripe, column + CHUNK_COLUMNS * chunk
            there = row < rows and column < columns
            places.append(coded[row][int(words[row, column])] if there else PADDING)
        blob.entries.append(entries_of(places, said))
        blob.bodies.append(write_body(pairs, places))
    return blob


# ---------------------------------------------------------------------------------------------
# 7. Cutting


def cut(data: bytes, first_row: int, end_row: int, first_column: int, end_column: int) -> bytes:
    """Cut a part out of a blob (7)."""
    blob = parse(data)
    for first, end, size, unit in (
        (first_row, end_row, blob.rows, STRIPE_ROWS),
        (first_column, end_column, blob.columns, PAIR_COLUMNS),
    ):
        if not 0 <= first < end <= size or first % unit or (end % unit and end != size):
            raise ValueError(f"{first} to {end} of {size} cannot be cut out, only at multiples of {unit}")
    coded = {(s, c): i for i, (s, c, _) in enumerate(blob.chunks())}
    widths = {(s, c): pairs for s, c, pairs in blob.chunks()}
    records = blob.records[first_row : align(end_row, STRIPE_ROWS)]
    part = Blob(end_row - first_row, end_column - first_column, blob.flags, blob.table, records, [], [])
    for stripe, chunk, pairs in part.chunks():
        entries, places = list[int](), list[Coded]()
        for pair in range(pairs):
            whole = first_column // PAIR_COLUMNS + 4 * chunk + pair
            source, number = (stripe + first_row // STRIPE_ROWS, whole // 4), whole % 4
            i = coded[source]
            inside = (it for it in blob.entries[i] if it >> 10 & 3 == number)
            entries += [entry & ~(3 << 10) | pair << 10 for entry in inside]
            places += read_body(widths[source], blob.bodies[i])[1024 * number : 1024 * number + 1024]
        part.entries.append(entries)
        part.bodies.append(write_body(pairs, places))
    return part.serialize()
