"""Calls of the core's C API for windows that cannot be are refused: matrices, heads, starts, parts."""

from __future__ import annotations

import numpy as np
import pytest
from support.core_calls import ARGUMENT, CALLS, KEEP, code_of, room

from tpde.codec import native


def test_matrices_that_have_no_windows() -> None:
    window = native.CoreWindow()
    assert native.core().tpde_window_sections(1, 1, 0, window) == 0
    assert native.core().tpde_window_sections(1, 1, 0, None) == ARGUMENT
    for given in (
        (0, 1, 0),
        (1, 0, 0),
        (1 << 27, 1, 0),
        (1, 1 << 27, 0),
        (1 << 20, 1 << 20, 0),
        (1, 1, 1 << 32),
    ):
        assert native.core().tpde_window_sections(*given, window) == ARGUMENT


def _kept(address: int) -> native.Bytes:
    """A copy of what lies at an address."""
    return next(it.copy() for it in KEEP if isinstance(it, np.ndarray) and int(it.ctypes.data) == address)


@pytest.mark.parametrize(("stripe", "change"), [(0, 1), (1, -1), (1, 1), (1, 1 << 40), (2, -1), (2, 1)])
def test_starts_that_are_not_those_of_the_entries(stripe: int, change: int) -> None:
    """Of a matrix of two stripes; a start between two others is found out by what is written."""
    for name, number in (("tpde_window_encode", 2), ("tpde_window_cut", 5)):
        arguments = list(CALLS[name])
        starts = _kept(arguments[number]).view(np.uint64)
        at = min(stripe, starts.size - 1)
        starts[at] = (int(starts[at]) + change) % (1 << 64)
        arguments[number] = starts.ctypes.data
        assert code_of(name, arguments) == ARGUMENT


def test_heads_that_cannot_be() -> None:
    for name, number in (("tpde_window_encode", 1), ("tpde_window_cut", 4)):
        arguments = list(CALLS[name])
        head = _kept(arguments[number])
        arguments[number] = head.ctypes.data
        assert code_of(name, arguments) == 0
        for at in (0, 12, 48, 63, 70, 128):
            before, head[at] = int(head[at]), 255
            assert code_of(name, arguments) == 9, at
            head[at] = before
        head[8] = 2
        assert code_of(name, arguments) == 11


@pytest.mark.parametrize(
    ("part", "code"),
    [((0, 20, 0, 70), 0), ((16, 4, 64, 6), 0), ((8, 12, 0, 70), ARGUMENT), ((0, 20, 32, 38), ARGUMENT)],
)
def test_parts_begin_where_stripes_and_pairs_of_tiles_do(part: tuple[int, ...], code: int) -> None:
    arguments = list(CALLS["tpde_window_cut_plan"])
    arguments[2:6] = part
    arguments[6:8] = room(256), room(24)
    assert code_of("tpde_window_cut_plan", arguments) == code
