"""The writer gives one file for one source, however its bytes come."""

from __future__ import annotations

import base64
import itertools
import threading
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from support.contents import fill, fill_large, rng, spec_of
from support.files import unpack_bytes, verify_bytes

from tpde.codec import selection
from tpde.codec.selection import CodecName
from tpde.errors import TpdeError
from tpde.files.file_writer import FileWriter
from tpde.files.reader import PackedFile
from tpde.files.source_header import kept_header
from tpde.files.tensor_writer import TensorWriter
from tpde.format.constants import DTYPES, KEY_SOURCE
from tpde.format.container import TensorSpec
from tpde.format.container_reader import parse_header
from tpde.format.container_writer import canonical_header
from tpde.io.sinks import BytesSink, FileSink


def _write(tensors: dict[str, tuple[TensorSpec, bytes]], cuts: list[int], **options: object) -> bytes:
    """Write tensors in pieces that end at these places of each tensor."""
    sink = BytesSink()
    with FileWriter(sink, {n: s for n, (s, _) in tensors.items()}, threads=1, **options) as writer:
        for name, (_, data) in tensors.items():
            ends = sorted({min(cut, len(data)) for cut in cuts} | {len(data)})
            for begin, end in zip([0, *ends], ends, strict=False):
                writer.write(name, data[begin:end])
    return bytes(sink.data)


def _restored(tensors: dict[str, tuple[TensorSpec, bytes]]) -> bytes:
    header = canonical_header({n: s for n, (s, _) in tensors.items()}, {})
    order = parse_header(header, "source").entries
    data = b"".join(tensors[name][1] for name in order)
    return len(header).to_bytes(8, "little") + header + data


SPEC = spec_of("BF16", 20_000)
MIXED = {
    "weight": (SPEC, fill("normal", SPEC)),
    "plain": (SPEC, fill("random", SPEC)),
    "constant": (SPEC, fill("constant", SPEC)),
    "ids": (spec_of("I64", 9_000), fill("ascending", spec_of("I64", 9_000))),
}
WHOLE = _write(MIXED, [])


@given(st.lists(st.integers(0, SPEC.nbytes), max_size=12))
def test_any_split_into_pieces_gives_the_same_file(cuts: list[int]) -> None:
    assert _write(MIXED, cuts) == WHOLE


def test_the_pieces_were_packed_and_come_back() -> None:
    with PackedFile(WHOLE) as file:
        assert sorted(file.packed_names()) == ["constant", "ids", "weight"]
    assert unpack_bytes(WHOLE) == _restored(MIXED)
    assert verify_bytes(WHOLE) == []


def _broken(dtype: str, words: int, at: int, rest: str) -> tuple[TensorSpec, bytes]:
    """Give a tensor of equal words that has others from byte `at` on."""
    spec = spec_of(dtype, words)
    head = fill("constant", spec)[:at]
    return spec, head + fill(rest, spec)[at:]


SAMPLE = selection.SAMPLE_CHUNKS * selection.PREFIX_CHUNK_WORDS  # words that a tensor is judged by


@pytest.mark.parametrize("dtype", ["U8", "BF16", "F32"])
@pytest.mark.parametrize("rest", ["normal", "random", "nearly"])
@pytest.mark.parametrize("where", ["start", "middle", "sample", "behind", "end"])
def test_constant_tensors_that_stop_being_constant(dtype: str, rest: str, where: str) -> None:
    b, words = DTYPES[dtype].word_bytes, SAMPLE + 9_999
    at = {"start": 1, "middle": words * b // 2 + 1, "sample": SAMPLE * b, "behind": SAMPLE * b + 5,
          "end": words * b - 1}[where]  # fmt: skip
    tensors = {"x": _broken(dtype, words, at, rest)}
    if where == "end":
        spec, data = tensors["x"]
        tensors["x"] = (spec, data[:-1] + bytes([data[-1] ^ 1]))
    files = {_write(tensors, cuts) for cuts in ([], [at], [at - 1, at + 1], [SAMPLE * b], [100_000, 500_001])}
    for file in files:
        assert unpack_bytes(file) == _restored(tensors)
        assert verify_bytes(file) == []
    assert len(files) == 1, "the file depends on how its bytes came"


@pytest.mark.parametrize("words", [600, SAMPLE + 5])
def test_single_bytes_are_pieces_too(words: int) -> None:
    spec = spec_of("BF16", 600)
    tensors = {"x": (spec, fill("normal", spec)), "c": (spec, fill("constant", spec))}
    assert _write(tensors, list(range(spec.nbytes))) == _write(tensors, [])


LARGE = spec_of("BF16", 17 << 21)  # 68 MiB: three steps of several threads


@pytest.mark.parametrize("cuts", [[], [33 << 20, (33 << 20) + 5, (35 << 20) + 7]])
def test_pieces_hashed_beside_encoding_are_hashed_in_order(cuts: list[int]) -> None:
    data = fill_large("normal", LARGE)
    sink = BytesSink()
    with FileWriter(sink, {"x": LARGE}, threads=2) as writer:
        for begin, end in itertools.pairwise([0, *cuts, len(data)]):
            writer.write("x", data[begin:end])
    assert bytes(sink.data) == _write({"x": (LARGE, data)}, [])
    assert verify_bytes(bytes(sink.data)) == []


class _Short(FileSink):
    """A file whose pieces find no memory, from one of them on."""

    def __init__(self, path: Path, number: int) -> None:
        super().__init__(path)
        self._left = number

    def room(self, offset: int, size: int) -> None:
        if not self._left:
            raise MemoryError("no memory for this piece")
        self._left -= 1


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_piece_that_fails_leaves_no_thread_and_no_file(number: int, tmp_path: Path) -> None:
    before, data = threading.active_count(), fill_large("normal", LARGE)

    def write() -> None:
        with FileWriter(_Short(tmp_path / "x", number), {"x": LARGE}, threads=2) as writer:
            for begin, end in itertools.pairwise([0, 9 << 20, 18 << 20, len(data)]):
                writer.write("x", data[begin:end])

    with pytest.raises(MemoryError, match="for this piece"):
        write()
    assert threading.active_count() == before
    assert list(tmp_path.iterdir()) == []


class _Late(Executor):
    """Does what it was given when somebody waits for any of it, in order."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Future[Any], Any, Any]] = []

    def submit(self, call: Any, /, *args: Any, **_: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.result = lambda *_: self._until(future)  # type: ignore[method-assign,misc]
        self.waiting.append((future, call, args))
        return future

    def _until(self, future: Future[Any]) -> Any:
        while any(it is future for it, _, _ in self.waiting):
            done, call, args = self.waiting.pop(0)
            done.set_result(call(*args))
        return Future.result(future, 0)


@pytest.mark.parametrize("content", ["normal", "random", "constant"])
def test_whatever_is_hashed_beside_is_waited_for(content: str) -> None:
    """Else what a caller writes next into its memory would be hashed, or nothing at all."""
    data = np.frombuffer(fill_large(content, LARGE), np.uint8)
    sink = BytesSink()
    made = TensorWriter(LARGE, sink, 0, threads=2, codec="auto", may_pack=True, background=_Late())  # type: ignore[arg-type]
    for begin in range(0, data.size, 35 << 20):  # more than is encoded at a time
        piece = data[begin : begin + (35 << 20)].copy()
        made.write(piece)
        piece[:] = 0
    assert made.finish().digest == xxhash.xxh3_128_digest(data)


@pytest.mark.parametrize("codec", ["auto", "prefix", "zstd"])
def test_what_ends_up_plain_is_told_from_what_is_packed(codec: CodecName) -> None:
    sink = BytesSink()
    for content, packed in (("normal", True), ("random", False), ("constant", True)):
        for may_pack in (False, True):
            made = TensorWriter(SPEC, sink, 0, threads=1, codec=codec, may_pack=may_pack, background=None)
            made.write(np.frombuffer(fill(content, SPEC), np.uint8))
            stored = made.finish()
            assert stored.packed is (packed and may_pack)
            assert (stored.size < SPEC.nbytes) is stored.packed


def test_arrays_of_any_dtype_and_shape_are_bytes() -> None:
    values = np.frombuffer(fill("normal", SPEC), np.uint16).reshape(100, 200)
    sink = BytesSink()
    with FileWriter(sink, {"weight": SPEC}) as writer:
        writer.write("weight", values[:50])
        writer.write("weight", values[50:])
    assert unpack_bytes(bytes(sink.data)) == _restored({"weight": MIXED["weight"]})
    with pytest.raises(ValueError, match="contiguous"), FileWriter(BytesSink(), {"weight": SPEC}) as writer:
        writer.write("weight", values.T)


def test_empty_tensors_need_no_bytes() -> None:
    sink = BytesSink()
    with FileWriter(sink, {"a": TensorSpec("F32", (0, 3)), "b": TensorSpec("BF16", (0,))}):
        pass
    with PackedFile(bytes(sink.data)) as file:
        assert file.specs == {"b": TensorSpec("BF16", (0,)), "a": TensorSpec("F32", (0, 3))}
        assert file.read("a").size == 0


def test_tensors_may_come_in_any_order() -> None:
    names = list(MIXED)
    for seed in range(4):
        order = rng("order", seed).permutation(names)
        file = _write({str(n): MIXED[str(n)] for n in order}, [])
        assert unpack_bytes(file) == _restored(MIXED)


def test_a_source_header_that_readers_would_take_for_a_bomb_is_refused() -> None:
    header = canonical_header({n: s for n, (s, _) in MIXED.items()}, {})
    padded = header.rstrip() + b" " * (8 << 20)  # padding may be as long as it likes
    with PackedFile(_write(MIXED, [], source_header=padded)) as file:
        assert len(file.source_header()) == len(padded)
    with pytest.raises(TpdeError, match="blanks between its values"):
        _write(MIXED, [], source_header=b"{" + b" " * (8 << 20) + header[1:])


@pytest.mark.parametrize(("tensors", "level"), [(1000, 19), (8000, 9)])
def test_large_headers_of_sources_are_compressed_quickly(tensors: int, level: int) -> None:
    """Level 19 takes 85 s for 30 MB."""
    header = canonical_header({f"model.layers.{i}.weight": spec_of("F32", i) for i in range(tensors)}, {})
    frame = base64.b64decode(kept_header(header)[KEY_SOURCE])
    assert frame == zstandard.ZstdCompressor(level=level, write_content_size=True).compress(header)


def test_a_writer_says_what_it_will_pack_and_what_it_packed() -> None:
    few = TensorSpec("U8", (40,))
    specs = {"w": SPEC, "random": SPEC, "few": few, "x": SPEC, "x_tpde": SPEC}
    writer = FileWriter(BytesSink(), specs)
    assert [name for name in specs if writer.may_pack(name)] == ["w", "random", "few"]
    data = {name: fill("random" if name == "random" else "normal", spec) for name, spec in specs.items()}
    planned = set()
    for name, spec in specs.items():
        sample = b"".join(data[name][begin:end] for begin, end in selection.sample_ranges(spec))
        if writer.plan(name, sample):
            planned.add(name)
    assert planned == {"w"}
    assert writer.packed_names() == set()
    for name in specs:
        writer.write(name, data[name])
        assert writer.packed_names() == {"w"}
    writer.close()
