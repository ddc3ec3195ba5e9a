"""nvCOMP as a back end: both shapes of its API, one warning where it is missing or fails, damage found."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zstandard
from support.backends import MadeBackend, MadeKernel
from support.codecs import pack_everything
from support.contents import CONTENTS, fill, shapes
from support.nvcomp import FakeNvcomp, merge_kernel
from support.packed import pack

from tpde.codec import selection as planning
from tpde.codec.blob import BlobWriter
from tpde.codec.native import Bytes
from tpde.cuda.nvcomp import Nvcomp
from tpde.cuda.zstd_blob import ZstdBlob
from tpde.errors import Corrupt
from tpde.format.blob_header import BlobHeader, parse_blob_header
from tpde.format.constants import CODEC_ZSTD, DTYPES
from tpde.format.container import TensorSpec
from tpde.io.sinks import BytesSink

Install = Callable[[Any], Nvcomp]


@pytest.fixture
def install(launch_on: Any) -> Install:
    """Let the back end have an nvCOMP that finds a module, or raises; the merge runs on host memory."""

    def put(found: Any) -> Nvcomp:
        def load() -> Any:
            if isinstance(found, BaseException):
                raise found
            return found

        made: MadeBackend = launch_on(MadeBackend(merge_kernel, nvcomp=Nvcomp(load)))
        return made.nvcomp

    return put


def _pack(spec: TensorSpec, data: bytes) -> tuple[BlobHeader, Bytes]:
    packed = pack(spec, data, "zstd", threads=1)
    assert packed is not None
    return packed.header, packed.blob


def _decode(header: BlobHeader, blob: Bytes, opened: ZstdBlob) -> tuple[bool, bytes, list[int]]:
    out = np.full(header.spec.nbytes + 16, 0xA5, np.uint8)
    scratch, status = np.empty(opened.scratch_bytes, np.uint8), np.zeros(4, np.uint32)
    read, reports, *addresses = (a.ctypes.data for a in (opened.descriptors, status, blob, scratch, out))
    done = opened.launch(read, reports, 7, *addresses)
    assert (out[header.spec.nbytes :] == 0xA5).all()
    return done, out[: header.spec.nbytes].tobytes(), status.tolist()


@pytest.mark.parametrize("version", ["5.2.0", "5.3.0", "6.0.0"])
@pytest.mark.parametrize("dtype", ["F8_E4M3", "U8", "BF16", "U16", "F32", "I32", "F64", "I64"])
def test_every_content(version: str, dtype: str, install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    pack_everything(monkeypatch)
    few = 5 * 4096  # several runs a blob
    fake = FakeNvcomp(version)
    install(fake)
    for name in CONTENTS:
        for spec in shapes(dtype, 4096):
            if not spec.nbytes:
                continue
            data = fill(name, spec)
            header, blob = _pack(spec, data)
            opened = ZstdBlob(header, blob, 0, scratch_bytes=few)
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
    nvcomp = install(BROKEN[what])
    header, blob, _ = _example()
    opened = ZstdBlob(header, blob, 0)
    with pytest.warns(RuntimeWarning, match="nvCOMP") as caught:
        assert not _decode(header, blob, opened)[0]
    assert len(caught) == 1
    assert "CPU" in str(caught[0].message)
    assert "tpde[nvcomp]" in str(caught[0].message) or what == "library"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not _decode(header, blob, opened)[0]
        assert not nvcomp.available()


def test_one_warning_where_it_fails(install: Install) -> None:
    fake = FakeNvcomp("6.0.0")
    install(fake)
    header, blob, data = _example()
    opened = ZstdBlob(header, blob, 0)
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
    nvcomp, content = install(fake), np.zeros(64, np.uint8)
    frame = np.frombuffer(zstandard.ZstdCompressor().compress(content.tobytes()), np.uint8)
    assert nvcomp.available()
    nvcomp.decode(frame.ctypes.data, [0], [frame.size], content.ctypes.data, [0], [64], 0, 0)
    assert fake.options[0]["cuda_stream"] == 1


def test_damage_is_found_before_and_after_decoding(install: Install) -> None:
    install(FakeNvcomp("6.0.0"))
    header, blob, _ = _example()
    opened = ZstdBlob(header, blob, 0, number=5)
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
            ZstdBlob(header, damaged, 0)
        assert error.value.chunk == 1
    with pytest.raises(ValueError, match="codec 1"):
        ZstdBlob(planning.base_header(header.spec, 1), blob, 0)


def _frames(header: BlobHeader, blob: Bytes) -> list[int]:
    """Where chunks begin, and where the last one ends."""
    records = blob[header.index_at : header.index_at + 12 * header.chunks].view("<u4")[::3].astype(int)
    return [*(records << header.unit_log2).tolist(), header.blob_bytes]


def _written(words: Bytes) -> tuple[BlobHeader, Bytes]:
    """Give a blob of U16 in chunks of 512 words."""
    header = planning.base_header(TensorSpec("U16", (words.size // 2,)), CODEC_ZSTD, 512)
    sink = BytesSink()
    writer = BlobWriter(planning.TensorPlan(header, b"", 0), sink, 0, 1)
    writer.write(words)
    blob = np.frombuffer(bytes(sink.data[: writer.finish(bytes(16))]), np.uint8).copy()
    return parse_blob_header(blob.tobytes()[:4096], blob.size), blob


def _coded() -> tuple[BlobHeader, Bytes, list[int]]:
    """Give a blob of three chunks whose planes are all coded, and where these begin."""
    words = (np.arange(1300) * 7 % 13 * 257).astype(np.uint16)
    header, blob = _written(words.view(np.uint8))
    return header, blob, _frames(header, blob)


def test_frames_end_with_their_chunk() -> None:
    """Not in the next one, though its bytes are there, nor behind the blob."""
    header, blob, starts = _coded()
    ZstdBlob(header, blob, 0)
    for chunk in range(3):
        at = starts[chunk]
        first = int(blob[at : at + 4].view("<u4")[0])
        second = at + -(-(4 + first) // 4) * 4
        for size, good in ((starts[chunk + 1] - second - 4, True), (starts[chunk + 1] - second - 3, False)):
            damaged = blob.copy()
            damaged[second : second + 4] = np.frombuffer(size.to_bytes(4, "little"), np.uint8)
            if good:  # to the last byte of its chunk
                ZstdBlob(header, damaged, 0)
                continue
            with pytest.raises(Corrupt, match=r"ends inside a zstd frame \(plane 1\)") as caught:
                ZstdBlob(header, damaged, 0)
            assert caught.value.chunk == chunk
    with pytest.raises(Corrupt, match="ends inside a zstd frame") as caught:
        ZstdBlob(header, blob[:-1], 0)
    assert caught.value.chunk == 2


@pytest.mark.parametrize("more", [-1, 1])
def test_frames_of_another_size_than_their_plane_are_refused(more: int) -> None:
    header, blob, starts = _coded()
    at = starts[0] + 4 + 5  # behind the frame's magic number and its descriptor: the size less 256
    assert blob[at : at + 2].tolist() == [0, 1]
    damaged = blob.copy()
    damaged[at : at + 2] = np.frombuffer((256 + more).to_bytes(2, "little"), np.uint8)
    with pytest.raises(Corrupt, match=f"a zstd frame of {512 + more} bytes, 512 are needed"):
        ZstdBlob(header, damaged, 0)


def test_where_frames_lie(launch_on: Any) -> None:
    """Runs are of as many chunks as there is room for, and of one at least; each plane has its place."""
    header, blob, starts = _coded()
    given: list[Any] = []
    noted = SimpleNamespace(available=lambda: True, decode=lambda *it: given.append(it))
    launched: list[Any] = []

    def kernel(*which: Any) -> MadeKernel:
        return MadeKernel(lambda *size: lambda *it: launched.append((which, *size, *it)))

    launch_on(MadeBackend(kernel, nvcomp=noted))
    each = [(0, 1), (1, 2), (2, 3)]
    for planes, runs in ((6, [(0, 3)]), (5, [(0, 2), (2, 3)]), (4, [(0, 2), (2, 3)]), (3, each), (0, each)):
        opened = ZstdBlob(header, blob, 2, number=9, scratch_bytes=512 * planes)
        given.clear()
        launched.clear()
        assert opened.launch(10, 20, 30, 40, 50, 60)
        assert opened.scratch_bytes == 512 * 2 * max(last - first for first, last in runs)
        assert len(given) == len(launched) == len(runs)
        for (first, last), frames, (kernel, grid, block, shared, stream, *rest) in zip(
            runs, given, launched, strict=True
        ):
            source, offsets, sizes, out, places, contents, device, on = frames
            assert (source, out, device, on) == (40, 50, 2, 30)
            assert places == [512 * i for i in range(2 * (last - first))]
            words = [min(512, 1300 - 512 * chunk) for chunk in range(first, last) for _ in range(2)]
            assert contents == words
            assert offsets[::2] == [start + 4 for start in starts[first:last]]
            assert sizes == [int(blob[at - 4 : at].view("<u4")[0]) for at in offsets]
            assert kernel == ("merge.cu", "merge", {"WORD": 2, "ROTATE": 0}, 2)
            assert (grid, block, shared, stream) == (last - first, 128, 0, 30)
            assert rest == [10, 40, first, 2 * first, 50, 60, 20]


def test_a_blob_without_frames_needs_little_room(install: Install) -> None:
    words = np.frombuffer(np.random.default_rng(0).bytes(2600), np.uint8)
    header, blob = _written(words)
    fake = FakeNvcomp("6.0.0")
    install(fake)
    opened = ZstdBlob(header, blob, 0)
    assert opened.scratch_bytes == 16
    assert _decode(header, blob, opened) == (True, words.tobytes(), [0, 0, 0, 0])
    assert not fake.calls, "there is nothing to decode"


@pytest.mark.parametrize(
    ("version", "good"),
    [
        ("4.9.0", False),
        ("5.1.9", False),
        ("5.2.0", True),
        ("5.10.1", True),
        ("6.99.0", True),
        ("7.0.0", False),
    ],
)
def test_versions_whose_api_is_known(version: str, good: bool, install: Install) -> None:
    nvcomp = install(FakeNvcomp(version))
    if good:
        assert nvcomp.available()
        return
    with pytest.warns(RuntimeWarning, match=f"nvCOMP {version} has another Python API than 5.2 to 6.x"):
        assert not nvcomp.available()


def test_one_codec_is_used_by_one_thread_at_a_time(install: Install) -> None:
    """It is shared by all that use its stream."""
    fake = FakeNvcomp("5.2.0")
    nvcomp = install(fake)
    assert nvcomp.available()
    inside, most, threads = [0], [0], list[threading.Thread]()

    class Watched:
        def __init__(self, **options: Any) -> None:
            pass

        def decode(self, srcs: Any, out: Any) -> None:
            inside[0] += 1
            most.append(inside[0])
            if not threads:
                threads.append(threading.Thread(target=decode))
                threads[0].start()
                threads[0].join(0.05)  # it would be in here by then, if it did not wait
            inside[0] -= 1

    content = np.zeros(64, np.uint8)
    at = content.ctypes.data

    def decode() -> None:
        nvcomp.decode(at, [0], [8], at, [0], [8], 0, 7)

    fake.Codec = Watched
    decode()
    threads[0].join(20)
    assert most == [0, 1, 1]


def test_nothing_to_decode_asks_for_no_codec(install: Install) -> None:
    fake = FakeNvcomp("6.0.0")
    nvcomp = install(fake)
    assert nvcomp.available()
    nvcomp.decode(0, [], [], 0, [], [], 0, 7)
    assert not fake.options
