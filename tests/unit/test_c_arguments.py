"""Calls of the core's C API that cannot be are refused: a null pointer for each argument, and numbers."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from support.craft import DATA, SPEC, TABLE
from support.deltas import pair
from support.windows import weights

from tpde.codec import delta, delta_planner, native, prefix_codes, window_plan, windows
from tpde.codec.selection import base_header, core_layout
from tpde.format.constants import CODEC_PREFIX

ARGUMENT = 1  # `TPDE_E_ARGUMENT`
WORDS = np.frombuffer(DATA, np.uint8)
SECTION = np.frombuffer(TABLE.serialize().ljust(16, b"\0"), np.uint8)
OLD, NEW = pair("BF16", "normal", "some", 400)
MATRIX = weights(20, 70)
KEEP: list[Any] = []  # what addresses are of


def _room(size: int) -> int:
    KEEP.append(np.zeros(size, np.uint8))
    return int(KEEP[-1].ctypes.data)


def _layout() -> native.CoreLayout:
    layout = core_layout(base_header(SPEC, CODEC_PREFIX, 512))
    layout.tables, layout.first_table[1], layout.table_count[1] = 1, 0, 1
    return layout


def _calls() -> dict[str, list[Any]]:
    """Arguments of each call with which it succeeds, but for the last one, the error."""
    u32, u64, pointer = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p
    layout = _layout()
    codec = prefix_codes.PrefixCodec(layout, SECTION, encode=True)
    out = np.zeros(codec.bound(1500, 3), np.uint8)
    made = codec.encode(WORDS, 0, 3, 0, out)
    model = delta.ChangeModel(delta_planner.plan([(OLD, NEW)], 2, 1), encode=True)
    sparse = model.encode(OLD, NEW)
    assert sparse is not None
    planner = delta_planner.Planner(2, 1)
    model_bytes = np.frombuffer(model.data, np.uint8)
    other = planner.fork()
    KEEP.extend([codec, out, made, model, sparse, planner, other, model_bytes])
    target = OLD.copy()
    KEEP.append(target)
    data = made.data.ctypes.data
    records, changed = (sparse.changes.ctypes.data, sparse.sizes.ctypes.data), sparse.data.ctypes.data
    states, words_room = (OLD.ctypes.data, NEW.ctypes.data), (_room(3000), 3000)
    size, words = out.size, WORDS.ctypes.data
    matrix, window = _window_plan(), native.CoreWindow()
    blob = window_plan.encode(MATRIX)
    part = _cut_plan(blob)
    KEEP.append(blob)
    given = (blob.ctypes.data, blob.size)
    return {
        "tpde_plan": [_layout(), words, 1500, 4, _room(20480), u32(), u64()],
        "tpde_codec_open": [layout, SECTION.ctypes.data, 16, 0, pointer()],
        "tpde_index_check": [layout, made.records.ctypes.data, 0, made.data.size, 1 << 20],
        "tpde_decode": [
            codec._handle,
            made.records.ctypes.data,
            0,
            3,
            data,
            0,
            made.data.size,
            made.data.size,
            *words_room,
            1,
        ],
        "tpde_encode": [codec._handle, words, 0, 3, 0, _room(size), size, u64(), _room(36), u32(), u32(), 1],
        "tpde_delta_plan_add": [planner._handle, other._handle],
        "tpde_delta_plan_survey": [planner._handle, *states, 400],
        "tpde_delta_plan_classes": [planner._handle, 1],
        "tpde_delta_plan_count": [planner._handle, *states, 400],
        "tpde_delta_plan_model": [planner._handle, 1, _room(20480), u32()],
        "tpde_delta_model_open": [model_bytes.ctypes.data, model_bytes.size, 0, pointer()],
        "tpde_delta_encode": [
            model._handle,
            OLD.ctypes.data,
            NEW.ctypes.data,
            400,
            _room(2000),
            2000,
            u64(),
            _room(4),
            _room(4),
            0,
            u64(),
            1,
        ],
        "tpde_delta_apply": [
            model._handle,
            changed,
            sparse.data.size,
            *records,
            target.ctypes.data,
            400,
            0,
            1,
        ],
        "tpde_delta_list": [
            model._handle,
            changed,
            sparse.data.size,
            *records,
            target.ctypes.data,
            400,
            _room(3200),
            _room(800),
            u64(),
            1,
        ],
        "tpde_window_plan": [MATRIX.ctypes.data, 20, 70, _room(256), _room(24), 1],
        "tpde_window_choose": [20, 70, _room(2048), window, _room(256)],
        "tpde_window_encode": [MATRIX.ctypes.data, *matrix, _room(blob.size), blob.size, 1],
        "tpde_window_open": [*given, window],
        "tpde_window_check": [*given, window, 1],
        "tpde_window_decode": [*given, 3, 10, _room(1400), 1400, 1],
        "tpde_window_cut_plan": [*given, 16, 4, 64, 6, _room(256), _room(16), 1],
        "tpde_window_cut": [*given, 16, 64, *part[:2], _room(part[2]), part[2], 1],
    }


def _window_plan() -> tuple[int, int]:
    """Head and starts of the matrix."""
    head, starts, error = _room(256), _room(24), native.Error()
    assert not native.core().tpde_window_plan(MATRIX.ctypes.data, 20, 70, head, starts, 1, error)
    return head, starts


def _cut_plan(blob: native.Bytes) -> tuple[int, int, int]:
    """Head and starts of rows 16 to 19 and columns 64 to 69, and what these take."""
    head, starts, error = _room(256), _room(16), native.Error()
    given = (blob.ctypes.data, blob.size, 16, 4, 64, 6, head, starts, 1, error)
    assert not native.core().tpde_window_cut_plan(*given)
    return head, starts, windows.encoded_size(4, 6, int(KEEP[-1].view(np.uint64)[1]))


def _code(name: str, arguments: list[Any]) -> int:
    """What a call returns; its error says the same, and may be left out."""
    error = native.Error()
    given = [ctypes.byref(it) if _is_place(name, i, it) else it for i, it in enumerate(arguments)]
    code = int(getattr(native.core(), name)(*given, error))
    assert error.code == code
    if code:
        assert getattr(native.core(), name)(*given, None) == code
    return code


def _is_place(name: str, number: int, it: Any) -> bool:
    return isinstance(it, (ctypes.c_uint32, ctypes.c_uint64, native.CoreWindow)) or (
        isinstance(it, ctypes.c_void_p) and name.endswith("_open") and number == 4 - ("delta" in name)
    )


CALLS = _calls()
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
        assert _code(name, arguments) == 0, name
    assert sum(name == "tpde_encode" for name, _ in POINTERS) == 7
    assert sum(name == "tpde_delta_apply" for name, _ in POINTERS) == 5
    assert sum(name == "tpde_delta_list" for name, _ in POINTERS) == 8


@pytest.mark.parametrize(("name", "number"), POINTERS)
def test_null_pointers_are_refused(name: str, number: int) -> None:
    arguments = list(CALLS[name])
    arguments[number] = None
    assert _code(name, arguments) == ARGUMENT


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
        ("tpde_window_plan", 1, 1 << 28),
        ("tpde_window_plan", 5, 0),
        ("tpde_window_choose", 0, 0),
        ("tpde_window_choose", 1, 1 << 28),
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
    assert _code(name, arguments) == ARGUMENT


def test_chunks_too_large_for_lanes_are_refused() -> None:
    layout = native.CoreLayout(words=65536, segment_words=65536, chunk_words=65536, word_bytes=2, unit_log2=4)
    codec, words = prefix_codes.PrefixCodec(layout, b""), np.zeros(1 << 17, np.uint8)
    encode = [codec._handle, words.ctypes.data, 0, 1, 0, _room(1 << 18), 1 << 18]
    encode += [ctypes.c_uint64(), _room(12), ctypes.c_uint32(), ctypes.c_uint32(), 1]
    assert _code("tpde_encode", encode) == ARGUMENT
    decode = [codec._handle, _room(12), 0, 1, words.ctypes.data, 0, words.size, words.size]
    assert _code("tpde_decode", [*decode, _room(1 << 17), 1 << 17, 1]) == ARGUMENT


def test_samples_of_4096_chunks_are_refused() -> None:
    words = 4096 * 512
    layout = native.CoreLayout(words=words, segment_words=words, chunk_words=512, word_bytes=1, unit_log2=4)
    sample = np.zeros(words, np.uint8)
    rest = [4, _room(20480), ctypes.c_uint32(), ctypes.c_uint64()]
    assert _code("tpde_plan", [layout, sample.ctypes.data, words, *rest]) == ARGUMENT
    assert _code("tpde_plan", [layout, sample.ctypes.data, words - 1, *rest]) == 0


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
    assert _code("tpde_delta_plan_classes", [planner._handle, 1]) == ARGUMENT


def test_plans_that_are_added_are_of_one_kind_and_have_room() -> None:
    planner = delta_planner.Planner(2, 1)
    for other in (planner, delta_planner.Planner(2, 0), delta_planner.Planner(4, 1)):
        assert _code("tpde_delta_plan_add", [planner._handle, other._handle]) == ARGUMENT
    classes = delta_planner.Planner(2, 1)
    draw = np.arange(40_000, dtype=np.uint16)
    classes.survey((draw % 40 + 60 << 7).view(np.uint8), (draw % 40 + 60 << 7 | draw % 5 % 2).view(np.uint8))
    classes.choose(1 << 30)
    assert _code("tpde_delta_plan_add", [planner._handle, classes._handle]) == ARGUMENT
    assert not native.core().tpde_delta_plan_fork(None)


def test_nothing_is_closed_counted_and_split() -> None:
    core, wrong = native.core(), native.CoreLayout(words=1, word_bytes=3)
    for close in (core.tpde_codec_close, core.tpde_delta_model_close, core.tpde_delta_plan_free):
        close(None)
    for layout in (None, wrong):
        assert core.tpde_chunk_count(layout) == core.tpde_encode_bound(layout, 1, 1) == 0
        assert core.tpde_split(layout, _room(8), 1, _room(8), 1) == ARGUMENT
        assert core.tpde_merge(layout, _room(8), 1, 1, _room(8)) == ARGUMENT
        error = native.Error()
        assert core.tpde_index_check(layout, _room(12), 0, 1, 1, error) == error.code == ARGUMENT


def test_matrices_that_have_no_windows() -> None:
    window = native.CoreWindow()
    assert native.core().tpde_window_sections(1, 1, 0, window) == 0
    assert native.core().tpde_window_sections(1, 1, 0, None) == ARGUMENT
    for given in (
        (0, 1, 0),
        (1, 0, 0),
        (1 << 28, 1, 0),
        (1, 1 << 28, 0),
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
        assert _code(name, arguments) == ARGUMENT


def test_heads_that_cannot_be() -> None:
    for name, number in (("tpde_window_encode", 1), ("tpde_window_cut", 4)):
        arguments = list(CALLS[name])
        head = _kept(arguments[number])
        arguments[number] = head.ctypes.data
        assert _code(name, arguments) == 0
        for at in (0, 12, 48, 63, 70, 128):
            before, head[at] = int(head[at]), 255
            assert _code(name, arguments) == 9, at
            head[at] = before
        head[8] = 2
        assert _code(name, arguments) == 11


@pytest.mark.parametrize(
    ("part", "code"),
    [((0, 20, 0, 70), 0), ((16, 4, 64, 6), 0), ((8, 12, 0, 70), ARGUMENT), ((0, 20, 32, 38), ARGUMENT)],
)
def test_parts_begin_where_stripes_and_pairs_of_tiles_do(part: tuple[int, ...], code: int) -> None:
    arguments = list(CALLS["tpde_window_cut_plan"])
    arguments[2:6] = part
    arguments[6:8] = _room(256), _room(24)
    assert _code("tpde_window_cut_plan", arguments) == code
