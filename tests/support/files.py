"""Files in memory: built without tpde's own writer of headers, packed, unpacked and verified."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tpde.codec.selection import CodecName
from tpde.files.file_writer import FileWriter
from tpde.files.pack_file import pack_tensors
from tpde.files.problem import Problem
from tpde.files.reader import PackedFile
from tpde.files.unpack_file import unpack_to
from tpde.files.verify_file import verify_file
from tpde.format.container import TensorSpec
from tpde.io.sinks import BytesSink
from tpde.io.sources import ByteSource, BytesSource, FileSource

Tensors = Mapping[str, tuple[TensorSpec, bytes]]


def container(header: Any, data: bytes, *, pad: int = 8) -> bytes:
    """Give a safetensors file of a header, as a value for JSON or as bytes, and data."""
    if not isinstance(header, bytes):
        header = json.dumps(header).encode()  # ASCII and spaces: not what the stock library writes
    header += b" " * (-len(header) % pad)
    return len(header).to_bytes(8, "little") + header + data


def safetensors_bytes(tensors: Tensors, metadata: Mapping[str, str] | None = None) -> bytes:
    """Give a safetensors file with its tensors in the order of the mapping."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at, data = 0, []
    for name, (spec, content) in tensors.items():
        assert len(content) == spec.nbytes, name
        end = at + len(content)
        header[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [at, end]}
        at = end
        data.append(content)
    return container(header, b"".join(data))


def random_file(path: Path, size: int) -> FileSource:
    """Write random bytes, the same each time, and open them."""
    path.write_bytes(random.Random(1).randbytes(size))
    return FileSource(path)


class WatchedFile:
    """A file whose reads are a function's, which may go on to the file's own."""

    def __init__(self, source: ByteSource, read_into: Callable[[int, memoryview], None]) -> None:
        self.name, self.size, self.read_into = source.name, source.size, read_into


class MemorySource:
    """A safetensors file in memory as a source of tensors."""

    def __init__(self, data: bytes) -> None:
        self._file = PackedFile(data)
        self.name, self.size = "<memory>", len(data)
        self.specs = self._file.container.specs
        self.container = self._file.container

    def read(self, name: str, begin: int, end: int, out: Any) -> None:
        self._file.tensor(name).read(begin, end, out)

    def read_small(self, names: Sequence[str]) -> list[memoryview]:
        return self._file.read_plain(names)

    def close(self) -> None:
        self._file.close()


def pack_bytes(source: bytes, *, threads: int = 1, codec: CodecName = "auto") -> bytes:
    """Pack a safetensors file in memory."""
    opened, sink = MemorySource(source), BytesSink()
    with FileWriter(
        sink,
        opened.specs,
        metadata=opened.container.metadata,
        source_header=opened.container,
        threads=threads,
        codec=codec,
    ) as writer:
        pack_tensors(opened, writer)
    return bytes(sink.data)


def unpack_bytes(packed: Any, *, threads: int = 1) -> bytes:
    """Unpack a packed file in memory."""
    sink = BytesSink()
    with PackedFile(BytesSource(packed)) as file:
        unpack_to(file, sink, threads)
    return bytes(sink.data)


def verify_bytes(packed: Any, *, threads: int = 1) -> list[Problem]:
    """Verify a packed file in memory."""
    return verify_file(BytesSource(packed), None, threads)  # type: ignore[arg-type]


def blobs(packed: bytes) -> dict[str, bytes]:
    """Give the blobs of a packed file by the names of their tensors."""
    with PackedFile(packed) as file:
        at = file.container.data_start
        entries = {name: file.container.entries[name + "_tpde"] for name in file.packed_names()}
    return {name: packed[at + e.begin : at + e.end] for name, e in entries.items()}


def saved_again(packed: bytes) -> bytes:
    """Give a packed file as another tool saves it: with its own metadata and order."""
    size = int.from_bytes(packed[:8], "little")
    header: dict[str, Any] = json.loads(packed[8 : 8 + size])
    del header["__metadata__"]
    entries, data, at = {}, [], 0
    for name in sorted(header):
        begin, end = header[name]["data_offsets"]
        entries[name] = header[name] | {"data_offsets": [at, at + end - begin]}
        data.append(packed[8 + size + begin : 8 + size + end])
        at += end - begin
    return container({"__metadata__": {"by": "another"}} | entries, b"".join(data))


def assert_bits_equal(name: str, found: bytes, needed: bytes) -> None:
    """Compare bytes, naming the tensor and the first byte that differs."""
    if found == needed:
        return
    at = next((i for i, (a, b) in enumerate(zip(found, needed, strict=False)) if a != b), None)
    raise AssertionError(f"{name}: {len(found)} and {len(needed)} bytes; the first difference is at {at}")
