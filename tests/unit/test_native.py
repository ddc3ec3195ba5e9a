"""The core through ctypes: what its codes mean, what is refused before pointers cross over, what is freed."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.craft import DATA, SPEC, TABLE
from support.deltas import model_of, pair

from tpde.codec import core_chunks, delta, delta_planner, fingerprints, native, prefix_codes
from tpde.codec.selection import base_header, core_layout
from tpde.errors import Corrupt, NativeError, TpdeError, Truncated, UnsupportedVersion
from tpde.format.constants import CODEC_PREFIX

WORDS = np.frombuffer(DATA, np.uint8)
SECTION = TABLE.serialize().ljust(16, b"\0")


def _layout() -> native.CoreLayout:
    layout = core_layout(base_header(SPEC, CODEC_PREFIX, 512))
    layout.tables, layout.first_table[1], layout.table_count[1] = 1, 0, 1
    return layout


# ---- codes ----


@pytest.mark.parametrize(
    ("code", "error", "says"),
    [
        (1, NativeError, "refused a call: no (plane 0): found 3, needed 4"),
        (2, MemoryError, "ran out of memory: no (plane 0): found 3, needed 4"),
        (3, Corrupt, "table 5: no (plane 0): found 3, needed 4"),
        (4, Corrupt, "no (plane 0): found 3, needed 4"),
        (5, Corrupt, "no (plane 0): found 3, needed 4"),
        (6, Corrupt, "no (plane 0): found 3, needed 4"),
        (7, NativeError, "refused a call: no (plane 0): found 3, needed 4"),
        (8, Corrupt, "a model of changes: no (plane 0): found 3, needed 4"),
        (9, Corrupt, "no (plane 0): found 3, needed 4"),
        (10, Truncated, "no (plane 0): found 3, needed 4"),
        (11, UnsupportedVersion, "no (plane 0): found 3, needed 4"),
        (99, NativeError, "refused a call: no (plane 0): found 3, needed 4"),
    ],
)
def test_what_codes_mean(code: int, error: type[Exception], says: str) -> None:
    with pytest.raises(error) as caught:
        native.check(code, native.Error(code, 0, 5, 3, 4, b"no"))
    assert says in str(caught.value)
    if isinstance(caught.value, Corrupt):
        assert caught.value.chunk == (5 if code in (4, 5, 6, 9) else None)
    if isinstance(caught.value, TpdeError) and error is not NativeError:
        assert (caught.value.found, caught.value.needed) == (3, 4)


def test_success_is_no_error() -> None:
    native.check(0, native.Error(0, 0, 5, 3, 4, b"no"))


@pytest.mark.parametrize("code", [3, 4, 5, 6, 9])
def test_errors_of_no_chunk_and_no_plane_name_none(code: int) -> None:
    with pytest.raises(Corrupt) as caught:
        native.check(code, native.Error(code, -1, native.NO_CHUNK, 3, 4, b"no"))
    assert caught.value.chunk is None
    assert str(caught.value).startswith("no: found 3, needed 4")


# ---- the library ----


@pytest.mark.parametrize(("platform", "name"), [("darwin", "libtpde.dylib"), ("linux", "libtpde.so")])
def test_the_librarys_name(platform: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    assert native.library_path() == Path(native.__file__).resolve().parents[1] / name


def test_a_library_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: str) -> None:
        raise OSError(f"{path}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(NativeError, match=r"`libtpde.* could not be loaded") as caught:
        native.core.__wrapped__()
    assert caught.value.hint


def test_no_path_has_no_name() -> None:
    assert native.core().tpde_simd_select(None) != 0


# ---- buffers ----


def test_only_contiguous_buffers_are_taken() -> None:
    every_second = np.zeros(10, np.uint8)[::2]
    for take in (native.address, native.as_bytes, core_chunks.checksum, fingerprints.fingerprint):
        with pytest.raises(ValueError, match="contiguous"):
            take(every_second)


def test_an_index_map_of_another_size_is_refused() -> None:
    for size in (0, 24, 35, 37, 48):
        with pytest.raises(ValueError, match="does not fit the layout"):
            core_chunks.index_check(_layout(), bytes(size), 0, 1 << 20, 1 << 20)


@pytest.mark.parametrize(("planes", "words"), [((1, 16), 32), ((3, 16), 32), ((2, 16), 31), ((2, 16), 34)])
def test_planes_that_are_not_those_of_the_words_are_refused(planes: tuple[int, int], words: int) -> None:
    with pytest.raises(ValueError, match="differ in size"):
        core_chunks.merge(_layout(), np.zeros(planes, np.uint8), np.zeros(words, np.uint8))


def test_what_was_opened_for_decoding_does_not_encode() -> None:
    codec = prefix_codes.PrefixCodec(_layout(), SECTION)
    with pytest.raises(NativeError, match="opened for decoding only"):
        codec.encode(WORDS, 0, 3, 1 << 12, np.empty(1 << 14, np.uint8))
    old, new = pair("BF16", "normal", "some", 400)
    model = delta.ChangeModel(model_of("BF16", old, new).data)
    with pytest.raises(NativeError, match="opened for decoding only"):
        model.encode(old, new)


def test_tables_that_the_codec_does_not_have_are_refused() -> None:
    codec = prefix_codes.PrefixCodec(_layout(), SECTION)
    assert len(codec.tables()) == 1
    codec.layout.tables = 2
    with pytest.raises(NativeError, match="refused table 1 of 2"):
        codec.tables()
    kind, entries = ctypes.c_int(), ctypes.POINTER(ctypes.c_uint32)()
    for number in (-1, 1):
        assert native.core().tpde_codec_table(codec._handle, number, *[kind] * 3, entries)


# ---- what is freed ----


class _Noting:
    """The core, which notes what is freed."""

    def __init__(self, freed: list[str]) -> None:
        self._core, self._freed = native.core(), freed

    def __getattr__(self, name: str) -> Any:
        if name.endswith(("_close", "_free")):
            self._freed.append(name)
        return getattr(self._core, name)


@pytest.fixture
def freed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    noting = _Noting(found)
    for module in (prefix_codes, delta, delta_planner):
        monkeypatch.setattr(module, "core", lambda: noting)
    return found


def _codec() -> prefix_codes.PrefixCodec:
    return prefix_codes.PrefixCodec(_layout(), SECTION)


def _model() -> delta.ChangeModel:
    return delta.ChangeModel(delta_planner.plan([(WORDS, WORDS)], 2, 1))


def _planner() -> delta_planner.Planner:
    return delta_planner.Planner(2, 1)


MAKE = {"tpde_codec_close": _codec, "tpde_delta_model_close": _model, "tpde_delta_plan_free": _planner}


@pytest.mark.parametrize("name", MAKE)
def test_what_is_dropped_is_freed_once(name: str, freed: list[str]) -> None:
    made = MAKE[name]()
    freed.clear()
    del made
    assert freed == [name]


@pytest.mark.parametrize("name", MAKE)
def test_nothing_is_freed_while_the_interpreter_ends(
    name: str, freed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = MAKE[name]()
    freed.clear()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "is_finalizing", lambda: True)
        made.__del__()
    assert freed == []
    made.__del__()
    assert freed == [name]


def _decode(it: Any) -> None:
    it.decode(np.zeros(12, np.uint8), 0, WORDS, 0, 16, np.zeros(1024, np.uint8))


def _apply(it: Any) -> None:
    none = np.zeros(1, np.uint32)
    it.apply(delta.Sparse(np.empty(0, np.uint8), none, none), WORDS.copy())


@pytest.mark.parametrize(("make", "use"), [(_codec, _decode), (_model, _apply)])
def test_what_is_closed_is_closed_once_and_refuses(
    make: Callable[[], Any], use: Callable[[Any], None], freed: list[str]
) -> None:
    it = make()
    freed.clear()
    it.close()
    it.close()
    assert len(freed) == 1
    with pytest.raises(NativeError):
        use(it)
    del it
    assert len(freed) == 1


def test_what_could_not_be_opened_is_not_freed(freed: list[str]) -> None:
    with pytest.raises(Corrupt):
        prefix_codes.PrefixCodec(_layout(), bytes(16))
    with pytest.raises(Corrupt):
        delta.ChangeModel(bytes(8))
    with pytest.raises(MemoryError):
        delta_planner.Planner(3, 0)
    assert freed == []
