"""Matrices encoded by kernels: what tests on a CPU and on a GPU share."""

from __future__ import annotations

import numpy as np

from tpde.codec import window_plan, windows
from tpde.codec.windows import Words
from tpde.cuda.window_encode import BLOB_AT, COUNTS_BYTES, SAID_AT, ChosenWindow, Matrix, WindowEncoder

GUARD = 256  # bytes before and after what may be written


def assert_same_blob(found: np.ndarray, words: Words) -> None:
    """Compare with the core's blob, and name the section that differs."""
    expected = window_plan.encode(np.ascontiguousarray(words))
    assert found.size == expected.size
    wrong = np.flatnonzero(found != expected)
    if wrong.size:
        window, at = windows.validate(expected), int(wrong[0])
        places = {
            "header": 0,
            "records": window.records_at,
            "offsets": window.offsets_at,
            "entries": window.entries_at,
            "bodies": window.bodies_at,
        }
        name = [it for it, start in places.items() if start <= at][-1]
        raise AssertionError(
            f"{wrong.size} bytes differ, the first at {at - places[name]} of the {name}: "
            f"found {found[at]:#x}, expected {expected[at]:#x}"
        )


def room(nbytes: int, unit: int, fill: int) -> np.ndarray:
    """Give guarded host memory at a multiple of so many bytes, and not of twice as many."""
    made = np.full(nbytes + 2 * GUARD + 4 * unit, fill, np.uint8)
    at = -(made.ctypes.data + GUARD) % (2 * unit) + GUARD + unit
    return made[at : at + nbytes]


def guards(part: np.ndarray) -> np.ndarray:
    """Give all bytes around a part that `room` gave."""
    whole = part.base
    assert isinstance(whole, np.ndarray)
    at = part.ctypes.data - whole.ctypes.data
    return np.concatenate([whole[:at], whole[at + part.size :]])


def encoding_on_host(words: np.ndarray) -> tuple[WindowEncoder, np.ndarray, ChosenWindow, np.ndarray]:
    """Encode a matrix by kernels that run on the CPU; give all that was used, and the blob.

    Rows may have a stride, and lie at any word.
    """
    rows, columns = words.shape
    encoder = WindowEncoder(Matrix(words.ctypes.data, rows, columns, words.strides[0] // 2), 0)
    scratch = room(encoder.scratch_bytes, 16, 0)
    encoder.plan(scratch.ctypes.data, 0)
    chosen = encoder.choose(scratch[:COUNTS_BYTES])
    scratch[SAID_AT : SAID_AT + chosen.said.size] = chosen.said
    out = room(chosen.window.nbytes, BLOB_AT, 0xA5)
    encoder.encode(chosen, scratch.ctypes.data, out.ctypes.data, 0)
    assert not guards(scratch).any()
    assert (guards(out) == 0xA5).all()
    return encoder, scratch, chosen, out


def encode_on_host(words: np.ndarray) -> np.ndarray:
    """Give the blob alone."""
    return encoding_on_host(words)[3]
