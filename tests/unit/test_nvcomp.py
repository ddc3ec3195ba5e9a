"""nvCOMP as a back end: both shapes of its API, one warning where it is missing or fails, damage found."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.codecs import pack_everything
from support.contents import CONTENTS, fill, shapes
from support.nvcomp import FakeNvcomp, merge
from support.packed import pack

from tpde.codec import plan as planning
from tpde.codec.native import Bytes
from tpde.cuda import nvcomp
from tpde.errors import Corrupt
from tpde.format.blob import BlobHeader
from tpde.format.constants import DTYPES
from tpde.format.container import TensorSpec

Install = Callable[[Any], None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Make an import of `nvidia.nvcomp` find a module, or raise."""
    monkeypatch.setattr(nvcomp, "_given_up", False)

    def put(found: Any) -> None:
        def load(name: str) -> Any:
            assert name == "nvidia.nvcomp"
            if isinstance(found, BaseException):
                raise found
            return found

        nvcomp._module.cache_clear()
        nvcomp._codec.cache_clear()
        monkeypatch.setattr(importlib, "import_module", load)

    yield put
    nvcomp._module.cache_clear()
    nvcomp._codec.cache_clear()


@pytest.fixture
def merged_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the merge on host memory."""

    def kernel(source: str, name: str, defines: dict[str, int], device: int) -> dict[str, int]:
        assert (source, name, device) == ("merge.cu", "merge", 0)
        return defines

    def launch(
        made: dict[str, int], grid: int, block: int, shared: int, stream: int, *given: np.generic
    ) -> None:
        assert (block, shared) == (128, 0)
        layout = planning.CoreLayout(
            words=1,
            segment_words=1,
            chunk_words=4096,
            word_bytes=made["WORD"],
            rotate=made["ROTATE"],
            unit_log2=4,
        )
        merge(layout, grid, *(int(value) for value in given))

    monkeypatch.setattr(nvcomp.nvrtc, "kernel", kernel)
    monkeypatch.setattr(nvcomp.nvrtc, "launch", launch)


def _pack(spec: TensorSpec, data: bytes) -> tuple[BlobHeader, Bytes]:
    packed = pack(spec, data, "zstd", threads=1)
    assert packed is not None
    return packed.header, packed.blob


def _decode(header: BlobHeader, blob: Bytes, opened: nvcomp.ZstdBlob) -> tuple[bool, bytes, list[int]]:
    out = np.full(header.spec.nbytes + 16, 0xA5, np.uint8)
    scratch, status = np.empty(opened.scratch_bytes, np.uint8), np.zeros(4, np.uint32)
    read, reports, *addresses = (a.ctypes.data for a in (opened.descriptors, status, blob, scratch, out))
    done = opened.launch(read, reports, 7, *addresses)
    assert (out[header.spec.nbytes :] == 0xA5).all()
    return done, out[: header.spec.nbytes].tobytes(), status.tolist()


@pytest.mark.parametrize("version", ["5.2.0", "5.3.0", "6.0.0"])
@pytest.mark.parametrize("dtype", ["F8_E4M3", "U8", "BF16", "U16", "F32", "I32", "F64", "I64"])
def test_every_content(
    version: str, dtype: str, install: Install, merged_here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack_everything(monkeypatch)
    monkeypatch.setattr(nvcomp, "SCRATCH_BYTES", 5 * 4096)  # several runs a blob
    fake = FakeNvcomp(version)
    install(fake)
    for name in CONTENTS:
        for spec in shapes(dtype, 4096):
            if not spec.nbytes:
                continue
            data = fill(name, spec)
            header, blob = _pack(spec, data)
            opened = nvcomp.ZstdBlob(header, blob, 0)
            assert opened.scratch_bytes <= max(5, DTYPES[dtype].word_bytes) * 4096
            assert _decode(header, blob, opened) == (True, data, [0, 0, 0, 0]), (name, spec)
    assert max(fake.calls) > 1
    assert fake.options == [
        {"algorithm": "Zstd", "bitstream_kind": "raw", "device_id": 0, "cuda_stream": 7}
    ], "one codec a stream"


def _example() -> tuple[BlobHeader, Bytes, bytes]:
    spec = TensorSpec("I64", (200_000,))
    data = fill("normal", spec)
    return *_pack(spec, data), data


BROKEN = {
    "missing": ModuleNotFoundError("No module named 'nvidia'"),
    "library": OSError("libnvcomp.so.6: cannot open shared object file"),
    "old": FakeNvcomp("5.1.0"),
    "new": FakeNvcomp("7.0.0"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_one_warning_where_it_cannot_be_used(what: str, install: Install) -> None:
    install(BROKEN[what])
    header, blob, _ = _example()
    opened = nvcomp.ZstdBlob(header, blob, 0)
    with pytest.warns(RuntimeWarning, match="nvCOMP") as caught:
        assert not _decode(header, blob, opened)[0]
    assert len(caught) == 1
    assert "CPU" in str(caught[0].message)
    assert "tpde[nvcomp]" in str(caught[0].message) or what == "library"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not _decode(header, blob, opened)[0]
        assert not nvcomp.available()


def test_one_warning_where_it_fails(install: Install, merged_here: None) -> None:
    fake = FakeNvcomp("6.0.0")
    install(fake)
    header, blob, data = _example()
    opened = nvcomp.ZstdBlob(header, blob, 0)
    assert _decode(header, blob, opened) == (True, data, [0, 0, 0, 0])
    fake.fail = True
    with pytest.warns(RuntimeWarning, match="nvcompErrorCannotDecompress") as caught:
        assert not _decode(header, blob, opened)[0]
    assert len(caught) == 1
    fake.fail = False
    calls = len(fake.calls)
    assert not _decode(header, blob, opened)[0]
    assert len(fake.calls) == calls, "left alone once it failed"


def test_the_default_stream_is_named(install: Install) -> None:
    fake = FakeNvcomp("6.0.0")
    install(fake)
    nvcomp._codec(0, 0)
    assert fake.options[0]["cuda_stream"] == 1


def test_damage_is_found_before_and_after_decoding(install: Install, merged_here: None) -> None:
    install(FakeNvcomp("6.0.0"))
    header, blob, _ = _example()
    opened = nvcomp.ZstdBlob(header, blob, 0, number=5)
    second = int(np.frombuffer(blob[header.index_at + 12 : header.index_at + 16].tobytes(), "<u4")[0])
    at = second << header.unit_log2
    damaged = blob.copy()
    damaged[header.index_at + 12 + 4] ^= 1  # the second chunk's checksum
    done, _, status = _decode(header, damaged, opened)
    assert done
    assert status == [1, 5, 1, 0]
    for where, value, match in (
        (at + 3, 0xFF, "ends inside a zstd frame"),
        (at + 4, 0x00, "damaged"),
        (at + 10, blob[at + 10] ^ 0x55, "are needed"),
    ):
        damaged = blob.copy()
        damaged[where] = value
        with pytest.raises(Corrupt, match=match) as error:
            nvcomp.ZstdBlob(header, damaged, 0)
        assert error.value.chunk == 1
    with pytest.raises(ValueError, match="codec 1"):
        nvcomp.ZstdBlob(planning.base_header(header.spec, 1), blob, 0)
