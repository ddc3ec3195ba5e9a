"""Reading what a delta file is but for its payloads (docs/delta.md 5): every field is checked."""

from __future__ import annotations

import base64
import binascii
import itertools
import json
import struct
from typing import cast

import numpy as np
import xxhash
import zstandard

from tpde.errors import Corrupt, Truncated, UnsupportedVersion
from tpde.format.constants import DELTA_MAGIC, MAX_CONTAINER_HEADER
from tpde.format.container import Container, tensor_spec
from tpde.format.container_reader import parse_header
from tpde.format.delta_head import (
    CODECS,
    HASH_AT,
    HEADER,
    MAX_CONTENTS,
    MAX_MODEL_BYTES,
    MAX_MODELS,
    MAX_VALUES,
    PLAIN,
    SAME,
    SPARSE,
    VERSION,
    WITH_BASE,
    Head,
    OtherEntry,
    TensorEntry,
    WeightsEntry,
    is_plain,
    max_held,
    merge_planes,
)
from tpde.format.json_values import values_in
from tpde.io.sources import ByteSource, read

# A tensor's entry: name, dtype, shape, codec, size; and its model, where changes are sparse.
_Fields = tuple[str, str, list[int], str, int, int]


def is_delta(source: ByteSource) -> bool:
    """Whether a file begins as a delta does."""
    return source.size >= len(DELTA_MAGIC) and read(source, 0, len(DELTA_MAGIC)) == DELTA_MAGIC


class _Reader:
    """Checks what a delta says; its errors name the file."""

    def __init__(self, source: ByteSource) -> None:
        self.source, self.name = source, source.name

    def check(self, holds: bool, message: str) -> None:
        if not holds:
            raise self._damaged(message)

    def _damaged(self, message: str) -> Corrupt:
        return Corrupt(
            f"`{self.name}`: {message}", hint="the file is damaged, fetch it again", where=self.name
        )

    def head(self) -> Head:
        source = self.source
        if source.size < HEADER.size:
            raise Truncated(
                f"`{self.name}` has {source.size} bytes, a delta has at least {HEADER.size}",
                hint="the file is incomplete, fetch the rest",
                where=self.name,
                found=source.size,
                needed=HEADER.size,
            )
        header = read(source, 0, HEADER.size)
        magic, version, zero, hashes_bytes, contents_bytes, plain_bytes, data_bytes, zeros, head_hash = (
            HEADER.unpack(header)
        )
        self.check(magic == DELTA_MAGIC, "this is no delta")
        if version != VERSION:
            raise UnsupportedVersion(
                f"`{self.name}` has version {version} of the delta format; this tpde reads {VERSION}",
                hint="upgrade tpde",
                where=self.name,
                found=version,
                needed=VERSION,
            )
        needed = HEADER.size + data_bytes + hashes_bytes + contents_bytes
        if source.size < needed:
            raise Truncated(
                f"`{self.name}` has {source.size} bytes, its header says {needed}",
                hint="the file is incomplete, fetch the rest",
                where=self.name,
                found=source.size,
                needed=needed,
            )
        self.check(source.size == needed, f"{source.size} bytes, its header says {needed}")
        limit = min(MAX_CONTENTS, max_held(contents_bytes))
        self.check(
            plain_bytes <= limit and contents_bytes <= MAX_CONTENTS, f"contents of {plain_bytes} bytes"
        )
        tail = read(source, HEADER.size + data_bytes, hashes_bytes + contents_bytes)
        found = xxhash.xxh3_64_intdigest(header[:HASH_AT] + bytes(8) + tail)
        self.check(found == head_hash, f"its head hashes to {found:016x}, {head_hash:016x} was written")
        self.check(zero == 0 and not any(zeros), "reserved bytes are not zero")
        head = self._contents(self._decompress(tail[hashes_bytes:], plain_bytes))
        self._hashes(head, tail[:hashes_bytes])
        self.check(head.data_bytes == data_bytes, f"payloads of {head.data_bytes} bytes, not {data_bytes}")
        return head

    def _decompress(self, frame: bytes, size: int) -> bytes:
        try:
            self.check(zstandard.frame_content_size(frame) == size, "the contents have another size")
            return zstandard.ZstdDecompressor().decompress(
                frame, max_output_size=size, allow_extra_data=False
            )
        except zstandard.ZstdError as error:
            raise Corrupt(f"`{self.name}`: its contents are damaged ({error})", where=self.name) from None

    def _contents(self, plain: bytes) -> Head:
        self.check(len(plain) >= 12, "the contents end inside their sizes")
        text, models, records = struct.unpack_from("<3I", plain)
        self.check(12 + text + models + records == len(plain), "the parts of the contents have other sizes")
        try:
            written = plain[12 : 12 + text].decode()
            self.check(values_in(written) < MAX_VALUES, f"more than {MAX_VALUES} values")
            fields = json.loads(written)
        except (ValueError, RecursionError) as error:
            raise Corrupt(f"`{self.name}`: its contents are not JSON ({error})", where=self.name) from None
        self.check(isinstance(fields, dict) and set(fields) == {"base", "files", "models"}, "other contents")
        base, files, sizes = fields["base"], fields["files"], fields["models"]
        self.check(base is None or _is_text(base), "its base's place is no text")
        self.check(isinstance(files, list) and isinstance(sizes, list), "files or models are no list")
        self.check(
            len(sizes) <= MAX_MODELS
            and all(_is_size(size) and size <= MAX_MODEL_BYTES for size in sizes)
            and sum(sizes) == models
            and models % 2 == 0,
            "the sizes of models",
        )
        joined = merge_planes(plain[12 + text : 12 + text + models], 2)
        head = Head(
            base,
            [self._file(file) for file in files],
            [joined[a:b] for a, b in itertools.pairwise(itertools.accumulate(sizes, initial=0))],
        )
        names = [file.name for file in head.files]
        self.check(len(set(names)) == len(names), "two files have one name")
        self._records(head, plain[len(plain) - records :])
        return head

    def _file(self, file: object) -> WeightsEntry | OtherEntry:
        if not (isinstance(file, dict) and _is_text(file.get("name"))):
            raise self._damaged("a file without a name")
        name = file["name"]
        if set(file) == {"name", "hash", "bytes"}:
            self.check(_is_hash(file["hash"]) and _is_size(file["bytes"]), f"the entry of `{name}`")
            return OtherEntry(name, file["hash"], file["bytes"])
        self.check(set(file) == {"name", "header", "header_hash", "tensors"}, f"the entry of `{name}`")
        self.check(_is_hash(file["header_hash"]), f"the hash of the header of `{name}`")
        self.check(isinstance(file["tensors"], list), f"the tensors of `{name}`")
        tensors = [self._tensor(it) for it in file["tensors"]]
        self.check(len({it.name for it in tensors}) == len(tensors), "two tensors of a file have one name")
        entry = WeightsEntry(name, None, file["header_hash"], tensors)
        if file["header"] is not None:
            entry.header = self._header(file["header"], name)
            check_header(entry, entry.header, f"`{self.name}`")
        return entry

    def _tensor(self, it: object) -> TensorEntry:
        fault = _fault_of(it)
        if fault is not None:
            raise self._damaged(fault)
        fields = cast(_Fields, it)  # since it has no fault
        name, dtype, shape, codec, size = fields[:5]
        try:
            spec = tensor_spec(dtype, tuple(shape))
        except ValueError as error:
            raise Corrupt(f"`{self.name}`: tensor `{name}`: {error}", tensor=name, where=self.name) from None
        if codec == PLAIN:
            self.check(size == spec.nbytes, f"tensor `{name}`: {size} bytes")
        return TensorEntry(name, spec, codec, size, fields[5] if codec == SPARSE else 0)

    def _header(self, text: object, name: str) -> bytes:
        """A header that differs from the base's (5.2)."""
        try:
            if not isinstance(text, str):
                raise TypeError(f"a {type(text).__name__} is no text")
            frame = base64.b64decode(text, validate=True)
            size = zstandard.frame_content_size(frame)
            if not 0 <= size <= min(MAX_CONTAINER_HEADER, max_held(len(frame))):
                raise ValueError(f"it claims {size} bytes")
            return zstandard.ZstdDecompressor().decompress(frame, max_output_size=size)
        except (TypeError, ValueError, binascii.Error, zstandard.ZstdError) as error:
            raise Corrupt(
                f"`{self.name}`: the header of `{name}` is damaged ({error})", where=self.name
            ) from None

    def _records(self, head: Head, planes: bytes) -> None:
        sparse = [it for it in head.tensors if it.codec == SPARSE]
        counts = [it.chunks for it in sparse]
        self.check(len(planes) == 8 * sum(counts), f"records of {len(planes)} bytes, not {8 * sum(counts)}")
        changes, sizes = np.frombuffer(merge_planes(planes, 4), "<u4").reshape(2, -1)
        models, at = len(head.models), 0
        for it, count in zip(sparse, counts, strict=True):
            if it.model >= models:
                raise self._damaged(f"tensor `{it.name}`: there is no model {it.model}")
            it.changes, it.sizes = changes[at : at + count], sizes[at : at + count]
            at += count
        filled = [(it, count) for it, count in zip(sparse, counts, strict=True) if count or it.size]
        self.check(all(count for _, count in filled), "a payload of a tensor without words")
        firsts = np.cumsum([0, *(count for _, count in filled)])[:-1]
        sums = np.add.reduceat(sizes, firsts, dtype=np.uint64).tolist() if filled else []
        for (it, _), size in zip(filled, sums, strict=True):
            if size != it.size:
                raise self._damaged(f"tensor `{it.name}`: its chunks' sizes")

    def _hashes(self, head: Head, hashes: bytes) -> None:
        at = 0
        for it in head.tensors:
            if it.codec in WITH_BASE:
                it.base = hashes[at : at + 16]
                at += 16
            if it.codec == SAME:
                it.target = it.base
            else:
                it.target = hashes[at : at + 16]
                at += 16
            if it.size:
                it.payload_hash = int.from_bytes(hashes[at : at + 8], "little")
                at += 8
            if it.codec == SPARSE and is_plain(head.models[it.model]):
                it.check = int.from_bytes(hashes[at : at + 8], "little")
                at += 8
        for other in head.others:
            if other.size:
                other.payload_hash = int.from_bytes(hashes[at : at + 8], "little")
                at += 8
        self.check(at == len(hashes), f"{len(hashes)} bytes of hashes, {at} are needed")


def check_header(entry: WeightsEntry, header: bytes, where: str) -> Container:
    """Check that a safetensors header is that of a file of the target; returns it parsed.

    Raises
    ------
    Corrupt, NotSafetensors, UnsupportedDtype
        If it is not.
    """
    if xxhash.xxh3_128_hexdigest(header) != entry.header_hash:
        raise Corrupt(f"{where}: the header of `{entry.name}` has another hash", hint="fetch it again")
    container = parse_header(header, f"{where}, the header of `{entry.name}`")
    if [(n, e.spec) for n, e in container.entries.items()] != [(it.name, it.spec) for it in entry.tensors]:
        raise Corrupt(f"{where}: `{entry.name}` has other tensors in its header", hint="fetch it again")
    return container


def read_head(source: ByteSource) -> Head:
    """Read and check what a delta is, but for its payloads.

    Raises
    ------
    Truncated, Corrupt, UnsupportedVersion, UnsupportedDtype
        If it cannot be read.
    """
    return _Reader(source).head()


def _fault_of(it: object) -> str | None:
    """What cannot be in a tensor's entry, but for what its dtype and shape say."""
    if not (isinstance(it, list) and len(it) in (5, 6) and _is_text(it[0])):
        return "a tensor without a name"
    name, dtype, shape, codec, size = it[:5]
    if not (isinstance(shape, list) and all(map(_is_size, shape)) and _is_size(size)):
        return f"tensor `{name}`: its shape or size"
    if codec not in CODECS or (len(it) == 6) != (codec == SPARSE):
        return f"tensor `{name}`: its codec"
    if not isinstance(dtype, str):
        return f"tensor `{name}`: its dtype"
    if not size and codec not in (SAME, SPARSE, PLAIN):
        return f"tensor `{name}`: no payload"
    if size and codec == SAME:
        return f"tensor `{name}`: a payload"
    if codec == SPARSE and not _is_size(it[5]):
        return f"tensor `{name}`: its model"
    return None


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 60


def _is_hash(value: object) -> bool:
    return isinstance(value, str) and len(value) == 32 and not set(value) - set("0123456789abcdef")


def _is_text(value: object) -> bool:
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
