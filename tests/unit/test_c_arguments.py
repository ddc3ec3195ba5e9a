"""Calls of the core's C API that cannot be are refused: a null pointer for each argument, and numbers."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from support.core_calls import ARGUMENT, CALLS, NEW, OLD, code_of, room

from tpde.codec import delta_planner, native, prefix_codes

NAMES = list(CALLS)
POINTERS = [
    (name, i) for name in NAMES for i, it in enumerate(CALLS[name]) if not isinstance(it, int) or it > 1 << 32
]


def test_the_calls_are_right() -> None:
    planner = delta_planner.Planner(2, 1)
    for name in NAMES:
        arguments = list(CALLS[name])
        if "_plan_" in name:
            arguments[0] = planner._handle
        assert code_of(name, arguments) == 0, name
    assert sum(name == "tpde_encode" for name, _ in POINTERS) == 7
    assert sum(name == "tpde_delta_apply" for name, _ in POINTERS) == 5
    assert sum(name == "tpde_delta_list" for name, _ in POINTERS) == 8


@pytest.mark.parametrize(("name", "number"), POINTERS)
def test_null_pointers_are_refused(name: str, number: int) -> None:
    arguments = list(CALLS[name])
    arguments[number] = None
    assert code_of(name, arguments) == ARGUMENT


@pytest.mark.parametrize(
    ("name", "number", "value"),
    [
        ("tpde_plan", 2, 0),
        ("tpde_plan", 2, 1501),
        ("tpde_plan", 3, 0),
        ("tpde_plan", 3, 5),
        ("tpde_decode", 2, 4),
        ("tpde_decode", 2, 1),
        ("tpde_decode", 3, 4),
        ("tpde_decode", 3, 2),  # the output is of three
        ("tpde_decode", 10, 0),
        ("tpde_encode", 2, 4),
        ("tpde_encode", 2, 1),
        ("tpde_encode", 3, 4),
        ("tpde_encode", 4, 8),  # no multiple of the unit
        ("tpde_encode", 4, 1 << 36),
        ("tpde_encode", 11, 0),
        ("tpde_delta_plan_survey", 3, 65537),
        ("tpde_delta_plan_count", 3, 65537),
        ("tpde_delta_plan_classes", 1, 0),
        ("tpde_delta_plan_model", 1, 0),
        ("tpde_delta_encode", 3, 1 << 59),
        ("tpde_delta_encode", 11, 0),
        ("tpde_delta_apply", 6, 1 << 59),
        ("tpde_delta_apply", 8, 0),
        ("tpde_delta_list", 6, 1 << 59),
        ("tpde_delta_list", 10, 0),
        ("tpde_window_plan", 1, 0),
        ("tpde_window_plan", 2, 0),
        ("tpde_window_plan", 1, 1 << 27),
        ("tpde_window_plan", 5, 0),
        ("tpde_window_choose", 0, 0),
        ("tpde_window_choose", 1, 1 << 27),
        ("tpde_window_encode", 4, 1 << 12),
        ("tpde_window_encode", 5, 0),
        ("tpde_window_check", 3, 0),
        ("tpde_window_decode", 2, 11),
        ("tpde_window_decode", 2, 21),
        ("tpde_window_decode", 3, 11),
        ("tpde_window_decode", 5, 1398),
        ("tpde_window_decode", 6, 0),
        ("tpde_window_cut_plan", 2, 8),
        ("tpde_window_cut_plan", 3, 3),
        ("tpde_window_cut_plan", 3, 0),
        ("tpde_window_cut_plan", 3, 5),
        ("tpde_window_cut_plan", 4, 32),
        ("tpde_window_cut_plan", 4, 128),
        ("tpde_window_cut_plan", 5, 0),
        ("tpde_window_cut_plan", 5, 5),
        ("tpde_window_cut_plan", 5, 1 << 63),
        ("tpde_window_cut_plan", 8, 0),
        ("tpde_window_cut", 2, 0),
        ("tpde_window_cut", 2, 8),
        ("tpde_window_cut", 3, 0),
        ("tpde_window_cut", 3, 128),
        ("tpde_window_cut", 7, 1 << 12),
        ("tpde_window_cut", 8, 0),
    ],
)
def test_numbers_that_cannot_be_are_refused(name: str, number: int, value: int) -> None:
    arguments = list(CALLS[name])
    arguments[number] = value
    assert code_of(name, arguments) == ARGUMENT


def test_chunks_too_large_for_lanes_are_refused() -> None:
    layout = native.CoreLayout(words=65536, segment_words=65536, chunk_words=65536, word_bytes=2, unit_log2=4)
    codec, words = prefix_codes.PrefixCodec(layout, b""), np.zeros(1 << 17, np.uint8)
    encode = [codec._handle, words.ctypes.data, 0, 1, 0, room(1 << 18), 1 << 18]
    encode += [ctypes.c_uint64(), room(12), ctypes.c_uint32(), ctypes.c_uint32(), 1]
    assert code_of("tpde_encode", encode) == ARGUMENT
    decode = [codec._handle, room(12), 0, 1, words.ctypes.data, 0, words.size, words.size]
    assert code_of("tpde_decode", [*decode, room(1 << 17), 1 << 17, 1]) == ARGUMENT


def test_samples_of_4096_chunks_are_refused() -> None:
    words = 4096 * 512
    layout = native.CoreLayout(words=words, segment_words=words, chunk_words=512, word_bytes=1, unit_log2=4)
    sample = np.zeros(words, np.uint8)
    rest = [4, room(20480), ctypes.c_uint32(), ctypes.c_uint64()]
    assert code_of("tpde_plan", [layout, sample.ctypes.data, words, *rest]) == ARGUMENT
    assert code_of("tpde_plan", [layout, sample.ctypes.data, words - 1, *rest]) == 0


@pytest.mark.parametrize(
    "given", [(3, 0, 1), (0, 0, 1), (16, 0, 1), (2, -1, 1), (2, 2, 1), (2, 1, 0), (2, 1, 17)]
)
def test_plans_of_changes_that_cannot_be(given: tuple[int, int, int]) -> None:
    assert not native.core().tpde_delta_plan_new(*given)


def test_classes_are_chosen_before_tokens_are_counted() -> None:
    planner = delta_planner.Planner(2, 1)
    planner.survey(OLD, NEW)
    planner.choose()
    planner.count(OLD, NEW)
    assert code_of("tpde_delta_plan_classes", [planner._handle, 1]) == ARGUMENT


def test_plans_that_are_added_are_of_one_kind_and_have_room() -> None:
    planner = delta_planner.Planner(2, 1)
    for other in (planner, delta_planner.Planner(2, 0), delta_planner.Planner(4, 1)):
        assert code_of("tpde_delta_plan_add", [planner._handle, other._handle]) == ARGUMENT
    classes = delta_planner.Planner(2, 1)
    draw = np.arange(40_000, dtype=np.uint16)
    classes.survey((draw % 40 + 60 << 7).view(np.uint8), (draw % 40 + 60 << 7 | draw % 5 % 2).view(np.uint8))
    classes.choose(1 << 30)
    assert code_of("tpde_delta_plan_add", [planner._handle, classes._handle]) == ARGUMENT
    assert not native.core().tpde_delta_plan_fork(None)


def test_nothing_is_closed_counted_and_split() -> None:
    core, wrong = native.core(), native.CoreLayout(words=1, word_bytes=3)
    for close in (core.tpde_codec_close, core.tpde_delta_model_close, core.tpde_delta_plan_free):
        close(None)
    for layout in (None, wrong):
        assert core.tpde_chunk_count(layout) == core.tpde_encode_bound(layout, 1, 1) == 0
        assert core.tpde_split(layout, room(8), 1, room(8), 1) == ARGUMENT
        assert core.tpde_merge(layout, room(8), 1, 1, room(8)) == ARGUMENT
        error = native.Error()
        assert core.tpde_index_check(layout, room(12), 0, 1, 1, error) == error.code == ARGUMENT
