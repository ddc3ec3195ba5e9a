"""Of products of many rows of x: their kernel, and when it is taken; and of launches in other threads."""

from __future__ import annotations

from ...mutant import mutant

_KERNEL = "cuda/kernels/window_many.cu"
_TESTS = "unit/test_many_products.py"

MUTANTS = (
    mutant(
        "threads-without-a-context",
        "cuda/backend.py",
        "        if not _thread.entered:\n            self._enter()\n",
        "",
        "backward passes fail whose first launch in PyTorch's thread is a packed layer's",
        "unit/test_cuda_compile.py",
    ),
    mutant(
        "many-rows-of-what-is-not-there",
        _KERNEL,
        "wait_on(filled + 8 * stage, parity);\n          registers_are_set();",
        "registers_are_set();",
        "x is multiplied before it has come",
        _TESTS,
    ),
    mutant(
        "many-rows-of-what-is-written-over",
        _KERNEL,
        "wait_on(emptied + 8 * stage, parity);  // the first",
        "// the first",
        "x comes where the piece before is still multiplied",
        _TESTS,
    ),
    mutant(
        "many-rows-left-early",
        _KERNEL,
        "wait_for_products<1>();  // those",
        "wait_for_products<2>();  // those",
        "a piece of x is left while it is multiplied",
        _TESTS,
    ),
    mutant(
        "many-rows-before-the-chunk",
        _KERNEL,
        "wait_for_copies<1>();",
        "wait_for_copies<2>();",
        "half a chunk is read before it has come",
        _TESTS,
    ),
    mutant(
        "many-rows-with-escapes-of-others",
        _KERNEL,
        "wipe_entries(plane, m, now, a, b, half, lane);",
        "if (half) wipe_entries(plane, m, now, a, b, half, lane);",
        "escapes stay for the chunks that follow",
        _TESTS,
    ),
    mutant(
        "many-rows-with-half-the-escapes",
        _KERNEL,
        "if (p == 2) {",
        "if (p == 2 && i + 1 < m.chunks) {",
        "a tile's first half chunk has no escapes but in the first tile",
        _TESTS,
    ),
    mutant(
        "many-rows-turned-wrongly",
        _KERNEL,
        "half = lane / 8 % 2 ^ k / 4 % 2;",
        "half = lane / 8 % 2;",
        "halves of ended sums trade places",
        _TESTS,
    ),
    mutant(
        "many-rows-behind-the-last",
        _KERNEL,
        "if (k < n) *(uint4*)",
        "*(uint4*)",
        "rows of y are written that nobody asked for",
        _TESTS,
    ),
    mutant(
        "many-rows-of-the-first-tile",
        "cuda/kernels/window_halves.cuh",
        "load_16(x + (of * NB + row) * x_stride",
        "load_16(x + row * x_stride",
        "rows of x after the first 256 are those before",
        _TESTS,
    ),
    mutant(
        "many-rows-of-short-columns",
        "cuda/many_rows.py",
        "if most_rows_of(have, window) < MOST_ROWS or count > MOST:",
        "if count > MOST:",
        "GPUs without `wgmma` are given it",
        _TESTS,
    ),
    mutant(
        "many-rows-in-any-room",
        "cuda/many_rows.py",
        "<= min(2 * words, _MOST_ROOM):",
        "<= 2 * words:",
        "x takes more memory than plans have for decoded weights",
        _TESTS,
    ),
    mutant(
        "waves-of-tiles-not-counted",
        "cuda/many_rows.py",
        "(-(-tiles // have.multiprocessors) * _COLUMN",
        "(tiles / have.multiprocessors * _COLUMN",
        "multiprocessors idle in the last turn, and decoding is faster",
        _TESTS,
    ),
    mutant(
        "rows-of-x-left-out",
        "cuda/window_launches.py",
        "steps_by(last, left, MOST_ROWS))",
        "steps_by(last, left))",
        "rows of x after the first 128 are those before",
        _TESTS,
    ),
    mutant(
        "decoded-rows-are-multiplied",
        "cuda/window_products.py",
        "            return count <= self.most_rows\n",
        "            return True\n",
        "GPUs without `wgmma` multiply 128 rows, 16 at a time, where decoding is faster",
        _TESTS,
    ),
)
