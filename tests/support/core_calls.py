"""Calls of the core's C API that succeed, for tests that change one of their arguments."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from support.core_layouts import coded_layout
from support.craft import DATA, TABLE
from support.deltas import pair
from support.windows import weights
from tpde.codec import delta, delta_planner, native, prefix_codes, window_plan, windows

ARGUMENT = 1  # `TPDE_E_ARGUMENT`
WORDS = np.frombuffer(DATA, np.uint8)
SECTION = np.frombuffer(TABLE.serialize().ljust(16, b"\0"), np.uint8)
OLD, NEW = pair("BF16", "normal", "some", 400)
MATRIX = weights(20, 70)
KEEP: list[Any] = []  # what addresses are of


def room(size: int) -> int:
    """Give the address of so many bytes, which are kept."""
    KEEP.append(np.zeros(size, np.uint8))
    return int(KEEP[-1].ctypes.data)


def _calls() -> dict[str, list[Any]]:
    """Arguments of each call with which it succeeds, but for the last one, the error."""
    u32, u64, pointer = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p
    layout = coded_layout()
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
    states, words_room = (OLD.ctypes.data, NEW.ctypes.data), (room(3000), 3000)
    size, words = out.size, WORDS.ctypes.data
    matrix, window = _window_plan(), native.CoreWindow()
    blob = window_plan.encode(MATRIX)
    part = _cut_plan(blob)
    KEEP.append(blob)
    given = (blob.ctypes.data, blob.size)
    return {
        "tpde_plan": [coded_layout(), words, 1500, 4, room(20480), u32(), u64()],
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
        "tpde_encode": [codec._handle, words, 0, 3, 0, room(size), size, u64(), room(36), u32(), u32(), 1],
        "tpde_delta_plan_add": [planner._handle, other._handle],
        "tpde_delta_plan_survey": [planner._handle, *states, 400],
        "tpde_delta_plan_classes": [planner._handle, 1],
        "tpde_delta_plan_count": [planner._handle, *states, 400],
        "tpde_delta_plan_model": [planner._handle, 1, room(20480), u32()],
        "tpde_delta_model_open": [model_bytes.ctypes.data, model_bytes.size, 0, pointer()],
        "tpde_delta_encode": [
            model._handle,
            OLD.ctypes.data,
            NEW.ctypes.data,
            400,
            room(2000),
            2000,
            u64(),
            room(4),
            room(4),
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
            room(3200),
            room(800),
            u64(),
            1,
        ],
        "tpde_window_plan": [MATRIX.ctypes.data, 20, 70, room(256), room(24), 1],
        "tpde_window_choose": [20, 70, room(2048), window, room(256)],
        "tpde_window_encode": [MATRIX.ctypes.data, *matrix, room(blob.size), blob.size, 1],
        "tpde_window_open": [*given, window],
        "tpde_window_check": [*given, window, 1],
        "tpde_window_decode": [*given, 3, 10, room(1400), 1400, 1],
        "tpde_window_cut_plan": [*given, 16, 4, 64, 6, room(256), room(16), 1],
        "tpde_window_cut": [*given, 16, 64, *part[:2], room(part[2]), part[2], 1],
    }


def _window_plan() -> tuple[int, int]:
    """Head and starts of the matrix."""
    head, starts, error = room(256), room(24), native.Error()
    assert not native.core().tpde_window_plan(MATRIX.ctypes.data, 20, 70, head, starts, 1, error)
    return head, starts


def _cut_plan(blob: native.Bytes) -> tuple[int, int, int]:
    """Head and starts of rows 16 to 19 and columns 64 to 69, and what these take."""
    head, starts, error = room(256), room(16), native.Error()
    given = (blob.ctypes.data, blob.size, 16, 4, 64, 6, head, starts, 1, error)
    assert not native.core().tpde_window_cut_plan(*given)
    return head, starts, windows.encoded_size(4, 6, int(KEEP[-1].view(np.uint64)[1]))


def code_of(name: str, arguments: list[Any]) -> int:
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
