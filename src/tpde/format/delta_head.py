"""What a delta file is but for its payloads (docs/delta.md 5), and how that is written."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash
import zstandard

from tpde.errors import InvalidInput
from tpde.format.constants import DELTA_MAGIC, DTYPES, MAX_CONTAINER_HEADER
from tpde.format.container import TensorSpec
from tpde.format.json_values import values_in

VERSION = 1
HEADER = struct.Struct("<8sHHIIIQ24sQ")
HASH_AT = 56
CHUNK_WORDS = 65536  # delta.md 3.1
# More is compressed at a quick level: 1 MB of records takes 4 ms instead of 100, and 1 % more.
_SLOW_BYTES = 1 << 17
_BLOCK_BYTES = 512  # of which a block of zstd takes at least 4: a 128th
MAX_CONTENTS, CONTENTS_BYTES, CONTENTS_TIMES = 100_000_000, 4 << 20, 128  # delta.md 6
MAX_VALUES = 1 << 22  # of the JSON, which take up to some 100 bytes of memory each
MAX_MODELS, MAX_MODEL_BYTES = 64, 1 << 18

SAME, SPARSE, DENSE, FULL, PLAIN = "same", "sparse", "dense", "full", "plain"  # delta.md 5.3
WITH_BASE = (SAME, SPARSE, DENSE)
CODECS = (*WITH_BASE, FULL, PLAIN)

Numbers = npt.NDArray[np.uint32]
_NO_NUMBERS: Numbers = np.empty(0, np.uint32)


@dataclass
class TensorEntry:
    """A tensor of the target (5.2 to 5.4).

    Attributes
    ----------
    name, spec
        Its name, dtype and shape.
    codec : {"same", "sparse", "dense", "full", "plain"}
        How it is stored.
    size : int
        Bytes of its payload.
    model : int
        Which model its chunks are under, if it is sparse.
    base, target : bytes
        Fingerprints; that of the base is empty if it has none.
    payload_hash : int
        XXH3-64.
    check : int
        Of its changes, if it is sparse under a model of one class (4).
    changes, sizes : ndarray of uint32
        The records of its chunks, if it is sparse.
    """

    name: str
    spec: TensorSpec
    codec: str
    size: int = 0
    model: int = 0
    base: bytes = b""
    target: bytes = b""
    payload_hash: int = 0
    check: int = 0
    changes: Numbers = field(default_factory=lambda: _NO_NUMBERS)
    sizes: Numbers = field(default_factory=lambda: _NO_NUMBERS)

    @property
    def chunks(self) -> int:
        """Number of chunks of its words."""
        return -(-self.spec.nbytes // (CHUNK_WORDS * DTYPES[self.spec.dtype].word_bytes))


@dataclass
class WeightsEntry:
    """A safetensors file of the target. `header` is None if the base's file has the same."""

    name: str
    header: bytes | None
    header_hash: str
    tensors: list[TensorEntry]


@dataclass
class OtherEntry:
    """Another file of the target; it is as the base's if `size` is 0. `hash` is XXH3-128."""

    name: str
    hash: str
    size: int = 0
    payload_hash: int = 0


@dataclass
class Head:
    """What a delta is, but for its payloads."""

    base: str | None
    files: list[WeightsEntry | OtherEntry]
    models: list[bytes]

    @property
    def tensors(self) -> Iterator[TensorEntry]:
        """All tensors in the order of their payloads."""
        for file in self.files:
            if isinstance(file, WeightsEntry):
                yield from file.tensors

    @property
    def others(self) -> Iterator[OtherEntry]:
        """All other files in the order of their payloads, which follow those of tensors."""
        return (file for file in self.files if isinstance(file, OtherEntry))

    @property
    def data_bytes(self) -> int:
        """Size of all payloads."""
        return sum(it.size for it in self.tensors) + sum(it.size for it in self.others)


def is_plain(model: bytes) -> bool:
    """Whether a model is of one class: its changes stand in memory order, and have a check (2.1, 4)."""
    return model[2:3] == b"\1"


def max_held(frame_bytes: int) -> int:
    """Most bytes that a frame of so many may hold, be it of contents or of a header (delta.md 5.1, 5.2)."""
    return CONTENTS_BYTES + CONTENTS_TIMES * frame_bytes


def frame_of(data: bytes) -> bytes:
    """A zstd frame of what it may hold: what is compressed too well is cut into more blocks."""
    compressor = zstandard.ZstdCompressor(level=19 if len(data) <= _SLOW_BYTES else 3)
    frame = compressor.compress(data)
    if len(data) <= max_held(len(frame)):
        return frame
    writer = compressor.compressobj(size=len(data))
    blocks = [
        writer.compress(data[at : at + _BLOCK_BYTES]) + writer.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
        for at in range(0, len(data), _BLOCK_BYTES)
    ]
    return b"".join((*blocks, writer.flush()))


def _refuse_more(what: str, found: int, most: int, hint: str) -> None:
    """Refuse to write what readers refuse."""
    if found > most:
        raise InvalidInput(f"{what}, at most {most} are allowed", hint=hint, found=found, needed=most)


def _file_json(file: WeightsEntry | OtherEntry) -> dict[str, object]:
    if isinstance(file, OtherEntry):
        return {"name": file.name, "hash": file.hash, "bytes": file.size}
    header = None
    if file.header is not None:
        size, where = len(file.header), f" of `{file.name}`" if file.name else ""
        hint = "shorten its metadata and the names of its tensors"
        _refuse_more(f"the header{where} takes {size} bytes", size, MAX_CONTAINER_HEADER, hint)
        header = base64.b64encode(frame_of(file.header)).decode()
    tensors = [
        [it.name, it.spec.dtype, list(it.spec.shape), it.codec, it.size, *([it.model] * (it.codec == SPARSE))]
        for it in file.tensors
    ]
    return {"name": file.name, "header": header, "header_hash": file.header_hash, "tensors": tensors}


def split_planes(data: bytes, width: int) -> bytes:
    """Split numbers of `width` bytes into byte planes: all lowest bytes first (delta.md 5.2)."""
    numbers = np.frombuffer(data, f"<u{width}")
    planes = np.empty((width, numbers.size), np.uint8)
    for i in range(width):  # several times as fast as a transposed copy
        planes[i] = numbers >> 8 * i
    return planes.tobytes()


def merge_planes(planes: bytes, width: int) -> bytes:
    """Invert `split_planes`."""
    numbers = np.zeros((len(planes) // width, width), np.uint8)
    for i, plane in enumerate(np.frombuffer(planes, np.uint8).reshape(width, -1)):
        if plane.any():  # of records the upper ones are empty
            numbers[:, i] = plane
    return numbers.tobytes()


def serialize(head: Head) -> tuple[bytes, bytes]:
    """Give the header, and the hashes and contents that follow the data.

    Raises
    ------
    InvalidInput
        If they are more than a reader takes (delta.md 6).
    """
    fields = {
        "base": head.base,
        "files": [_file_json(file) for file in head.files],
        "models": [len(model) for model in head.models],
    }
    written = json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
    count, hint = values_in(written), "write a delta for each file, or join small tensors"
    _refuse_more(f"the contents of the delta have {count} values", count, MAX_VALUES - 1, hint)
    text = written.encode()
    models = split_planes(b"".join(head.models), 2)
    sparse = [it for it in head.tensors if it.codec == SPARSE]
    numbers = [np.empty(0, np.uint32), *(it.changes for it in sparse), *(it.sizes for it in sparse)]
    records = split_planes(np.concatenate(numbers).astype("<u4").tobytes(), 4)
    plain = struct.pack("<3I", len(text), len(models), len(records)) + text + models + records
    _refuse_more(f"the contents of the delta take {len(plain)} bytes", len(plain), MAX_CONTENTS, hint)
    contents = frame_of(plain)
    taken = len(contents)  # more than they are, if they cannot be compressed
    _refuse_more(f"the contents of the delta take {taken} bytes, compressed", taken, MAX_CONTENTS, hint)
    hashes = bytearray()  # which grows where it is: of bytes, each tensor's would copy those of all before
    for it in head.tensors:
        hashes += it.base + (it.target if it.codec != SAME else b"")
        hashes += it.payload_hash.to_bytes(8, "little") if it.size else b""
        if it.codec == SPARSE and is_plain(head.models[it.model]):
            hashes += it.check.to_bytes(8, "little")
    for other in head.others:
        hashes += other.payload_hash.to_bytes(8, "little") if other.size else b""
    sizes = len(hashes), len(contents), len(plain), head.data_bytes
    header = HEADER.pack(DELTA_MAGIC, VERSION, 0, *sizes, bytes(24), 0)
    found = xxhash.xxh3_64_intdigest(header + hashes + contents)
    return header[:HASH_AT] + found.to_bytes(8, "little"), bytes(hashes + contents)


class Payload(NamedTuple):
    """Where a payload lies in the file."""

    offset: int
    size: int
    hash: int


def payloads(head: Head) -> Iterator[tuple[TensorEntry | OtherEntry, Payload]]:
    """Where each tensor's and each other file's payload lies."""
    at = HEADER.size
    every: list[TensorEntry | OtherEntry] = [*head.tensors, *head.others]
    for it in every:
        yield it, Payload(at, it.size, it.payload_hash)
        at += it.size
