"""Packed files taken apart, changed where it hurts, and put together with hashes that fit."""

from __future__ import annotations

import base64
import contextlib
import json
import random
import struct
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any
from unittest import mock

import xxhash
import zstandard
from support import craft
from support.changes import change_bytes, change_value
from support.contents import fill, spec_of
from support.files import pack_bytes, safetensors_bytes

from tpde.codec import reference
from tpde.errors import TpdeError
from tpde.format.constants import SUFFIX

_NUMBERS = (
    *(0, 1, 2, 3, 4, 7, 8, 12, 15, 16, 17, 31, 32, 63, 64, 127, 128, 255, 256, 511, 512, 513, 4096, 65535),
    *(2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**60, 2**63 - 1, 2**63, 2**64 - 1),
)
_RECORD = ("offset", "checksum", "modes", "table", "fill")
LIMIT = 1 << 24  # bytes of an original; a few bytes may describe any number of equal words


@dataclass
class Tensor:
    """What a container holds under a name."""

    name: str
    dtype: str
    shape: list[Any]
    data: bytes


@dataclass
class Parts:
    """A packed file.

    Attributes
    ----------
    metadata : object
        Of the container.
    tensors : list of Tensor
        In their order.
    source : bytes or None
        The source's header.
    """

    metadata: Any
    tensors: list[Tensor]
    source: bytes | None

    def copy(self) -> Parts:
        """One that may be changed."""
        return Parts(self.metadata, [replace(it) for it in self.tensors], self.source)


def take_apart(data: bytes) -> Parts:
    """The parts of a sound file."""
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    metadata = header.pop("__metadata__", {})
    tensors = [
        Tensor(
            name,
            it["dtype"],
            it["shape"],
            data[start + it["data_offsets"][0] : start + it["data_offsets"][1]],
        )
        for name, it in header.items()
    ]
    source = None
    if "tpde.source" in metadata:
        source = zstandard.decompress(base64.b64decode(metadata["tpde.source"]))
    return Parts(metadata, tensors, source)


def put_together(parts: Parts, *, sealed: bool) -> bytes:
    """A file; with hashes that fit if it is to be sealed."""
    metadata: Any = parts.metadata
    if sealed and parts.source is not None and isinstance(metadata, dict):
        metadata = dict(metadata)
        metadata["tpde.source"] = base64.b64encode(zstandard.compress(parts.source)).decode()
        metadata["tpde.source_hash"] = xxhash.xxh3_128_hexdigest(parts.source)
        plain = [it for it in parts.tensors if not is_blob(it)]
        plain.sort(key=lambda it: it.name.encode("utf-8", "surrogatepass"))  # format.md 1.3
        if plain:
            metadata["tpde.plain"] = "".join(xxhash.xxh3_128_hexdigest(it.data) for it in plain)
    header: dict[str, Any] = {"__metadata__": metadata} if metadata != {} else {}
    at = 0
    for it in parts.tensors:
        header[it.name] = {"dtype": it.dtype, "shape": it.shape, "data_offsets": [at, at + len(it.data)]}
        at += len(it.data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(it.data for it in parts.tensors)


def is_blob(it: Tensor) -> bool:
    """Whether a tensor looks like a blob."""
    return it.name.endswith(SUFFIX) and it.data[:8] == reference.MAGIC


# ---- hashes


class _Whatever(int):
    """A checksum that is equal to any other."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


def seal(blob: bytes) -> bytes:
    """Make the checksums and hashes of a blob right, as far as it can be decoded."""
    try:
        header = reference.parse_header(_seal_metadata(blob))
        if header.words * header.word_bytes > LIMIT:
            return _seal_metadata(blob)
        if header.codec == reference.CONSTANT:
            words = header.constant[: header.word_bytes] * header.words
        else:
            tables, records = reference.parse_tables(header, blob), reference.parse_index(header, blob)
            real, pieces = reference.checksum, []
            with mock.patch.object(reference, "checksum", return_value=_Whatever(0)):
                for i in range(header.chunks):
                    pieces.append(reference.decode_chunk(header, tables, records, i, blob))
            for i, piece in enumerate(pieces):
                at = header.index_at + reference.RECORD.size * i + 4
                blob = craft.patch(blob, at, struct.pack("<I", real(piece)))
            words = b"".join(pieces)
        blob = craft.patch(blob, craft.FIELDS["hash"][0], xxhash.xxh3_128_digest(words))
    except TpdeError:
        pass
    return _seal_metadata(blob)


def _seal_metadata(blob: bytes) -> bytes:
    """Make the hash of what is before the chunks right, as far as the header says where that ends."""
    if len(blob) < reference.HEADER.size:
        return blob
    codec, ndim, word_bytes = blob[10], blob[15], blob[13]
    chunks, tables, unit = (
        struct.unpack_from(f"<{craft.FIELDS[name][1]}", blob, craft.FIELDS[name][0])[0]
        for name in ("chunks", "tables_bytes", "unit_log2")
    )
    planes = 0 if codec == reference.CONSTANT else word_bytes
    end = reference.align(reference.HEADER.size + 8 * ndim + 4 * planes, 16)
    if codec != reference.CONSTANT:
        end = reference.align(end + tables + reference.RECORD.size * chunks, 1 << min(unit, 12))
    return craft.reseal(blob, end) if end <= len(blob) else blob


# ---- changes


def _number(draw: random.Random, old: int, bits: int) -> int:
    new = draw.choice((draw.choice(_NUMBERS), old + 1, old - 1, 2 * old, old // 2, draw.getrandbits(bits)))
    return new & (1 << bits) - 1


def _change_field(blob: bytes, draw: random.Random) -> bytes:
    name = draw.choice(sorted(craft.FIELDS))
    at, kind = craft.FIELDS[name]
    (old,) = struct.unpack_from(f"<{kind}", blob, at)
    return craft.patch(blob, at, struct.pack(f"<{kind}", _number(draw, old, 8 * struct.calcsize(kind))))


def _change_record(blob: bytes, draw: random.Random) -> bytes:
    header = reference.parse_header(_seal_metadata(blob))
    if not header.chunks:
        return _change_field(blob, draw)
    at = header.index_at + reference.RECORD.size * draw.randrange(header.chunks)
    values = list(reference.RECORD.unpack_from(blob, at))
    which = draw.randrange(len(_RECORD))
    values[which] = _number(draw, values[which], (32, 32, 16, 8, 8)[which])
    return craft.patch(blob, at, reference.RECORD.pack(*values))


def _change_part(blob: bytes, draw: random.Random) -> bytes:
    """Change bytes of the shape, the planes, the tables or the chunks, and keep where they lie."""
    header = reference.parse_header(_seal_metadata(blob))
    ends = [reference.HEADER.size, header.tables_at, header.index_at, header.chunks_at, len(blob)]
    spans = [(a, b) for a, b in pairwise(ends) if b > a]
    begin, end = draw.choice(spans)
    for _ in range(draw.choice((1, 1, 2, 8))):
        at = draw.randrange(begin, end)
        blob = craft.patch(blob, at, bytes([blob[at] ^ 1 << draw.randrange(8)]))
    return blob


def _change_blob(parts: Parts, draw: random.Random) -> None:
    it = draw.choice([it for it in parts.tensors if is_blob(it)] or parts.tensors)
    way = draw.choice((_change_field, _change_record, _change_part, _change_part, change_bytes))
    try:
        it.data = way(it.data, draw)
    except (TpdeError, struct.error):  # it was changed before, and has no parts
        it.data = change_bytes(it.data, draw)
    it.shape = [len(it.data)]


def _change_tensor(parts: Parts, draw: random.Random) -> None:
    it, other = draw.choice(parts.tensors), draw.choice(parts.tensors)
    what = draw.randrange(8)
    if what == 0:
        it.dtype = draw.choice((*reference.DTYPES, "F8_E4M3", "U4", "", "u8"))
    elif what == 1:
        it.shape = [*it.shape, draw.choice((0, 1, 2, 2**63, -1, 1.0, True, None))]
    elif what == 2:
        it.name = draw.choice(
            (it.name + SUFFIX, it.name.removesuffix(SUFFIX), "", "\ud800", "x" * 5000, other.name)
        )
    elif what == 3:
        parts.tensors.remove(it)
    elif what == 4:
        it.data, other.data = other.data, it.data
    elif what == 5:
        it.data = change_bytes(it.data, draw)
    elif what == 6:
        parts.tensors.append(replace(it, name=it.name + draw.choice(("", "2", SUFFIX))))
    else:
        draw.shuffle(parts.tensors)


def _change_source(parts: Parts, draw: random.Random) -> None:
    if parts.source is None:
        return _change_tensor(parts, draw)
    with contextlib.suppress(ValueError):  # it was changed before, and is no JSON
        if draw.random() < 0.6:
            parts.source = json.dumps(change_value(json.loads(parts.source), draw)).encode()
            return None
    parts.source = change_bytes(parts.source, draw)
    return None


def _change_metadata(parts: Parts, draw: random.Random) -> None:
    parts.metadata = change_value(parts.metadata, draw) if parts.metadata else {"tpde": "1"}


def change(parts: Parts, draw: random.Random) -> Parts:
    """One to three changes."""
    parts = parts.copy()
    ways = (_change_blob, _change_blob, _change_blob, _change_tensor, _change_source, _change_metadata)
    for _ in range(draw.choice((1, 1, 2, 3))):
        if parts.tensors:
            draw.choice(ways)(parts, draw)
    return parts


def bases() -> list[bytes]:
    """Small sound files of every codec: packed ones, and such as other tools save."""
    wanted = {
        "layers.0.weight": ("BF16", 700, "normal"),
        "layers.0.scale": ("F32", 300, "normal"),
        "layers.1.ids": ("I16", 600, "ascending"),
        "layers.1.mask": ("U8", 900, "nearly"),
        "layers.2.experts": ("F8_E4M3", 700, "normal"),
        "constant": ("F32", 400, "constant"),
        "plain": ("U16", 40, "random"),
        "tiny": ("F32", 3, "normal"),
    }
    tensors = {
        n: (spec_of(d, words), fill(content, spec_of(d, words))) for n, (d, words, content) in wanted.items()
    }
    packed = pack_bytes(safetensors_bytes(tensors, {"format": "pt"}))
    blobs = {"prefix": craft.prefix_blob(), "zstd": craft.zstd_blob(), "constant": craft.constant_blob()}
    loose = [Tensor(name + SUFFIX, "U8", [len(it)], it) for name, it in blobs.items()]
    alone = [put_together(Parts({}, [it], None), sealed=False) for it in loose]
    return [packed, packed, put_together(Parts({"format": "pt"}, loose, None), sealed=False), *alone]
