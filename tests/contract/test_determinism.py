"""The packed bytes depend on the source alone: not on threads, not on the instruction set."""

from __future__ import annotations

import pytest
from support.codecs import Case, every_codec, pack_everything
from support.contents import CONTENTS, fill, spec_of
from support.files import pack_bytes, safetensors_bytes, unpack_bytes

from tpde.codec import native
from tpde.format.constants import DTYPES


@pytest.fixture(autouse=True)
def _pack_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    pack_everything(monkeypatch)


def _source(case: Case, dtype: str) -> bytes:
    specs = [spec_of(dtype, words) for words in (1021, 7 * 8192 + 3)]
    return safetensors_bytes(
        {f"{c}.{i}{case.suffix}": (spec, fill(c, spec)) for c in CONTENTS for i, spec in enumerate(specs)}
    )


@every_codec
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_instruction_set_writes_and_reads_the_same_bytes(
    case: Case, dtype: str, simd_restored: None
) -> None:
    source = _source(case, dtype)
    packed = set()
    for path in native.simd_available():
        native.simd_select(path)
        packed.add(pack_bytes(source, codec=case.codec))
    assert len(packed) == 1
    (one,) = packed
    for path in native.simd_available():
        native.simd_select(path)
        assert unpack_bytes(one) == source, path


@every_codec
@pytest.mark.parametrize("dtype", ["F8_E4M3", "BF16", "F32", "F64", "I32", "C64", "F4"])
def test_threads_do_not_change_the_bytes(case: Case, dtype: str) -> None:
    source = _source(case, dtype)
    one = pack_bytes(source, codec=case.codec, threads=1)
    for threads in (2, 5):
        assert pack_bytes(source, codec=case.codec, threads=threads) == one
        assert unpack_bytes(one, threads=threads) == source


def test_a_path_that_is_not_there_is_refused(simd_restored: None) -> None:
    with pytest.raises(ValueError, match="available: "):
        native.simd_select("z80")
    assert native.simd() in native.simd_available()
    assert native.simd_available()[-1] == "portable"
