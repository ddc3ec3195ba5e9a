"""Packed model directories taken apart, and written again as a stranger might."""

from __future__ import annotations

import base64
import json
import math
import struct
from pathlib import Path
from typing import Any, NamedTuple

import xxhash
import zstandard

from support import craft
from tpde.codec import reference
from tpde.files.reader import PackedFile
from tpde.format.constants import SUFFIX


class Stored(NamedTuple):
    """A tensor as a weight file holds it."""

    packed: bool
    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def plain(self) -> Stored:
        """The same tensor, not packed."""
        with PackedFile(craft.file_of(self.data)) as file:
            return Stored(False, self.dtype, self.shape, file.read("x").tobytes())


def tensors_of(folder: Path) -> dict[str, Stored]:
    """What the only weight file of a packed directory holds, by the names in the source."""
    whole = (folder / "model.safetensors").read_bytes()
    start = 8 + struct.unpack("<Q", whole[:8])[0]
    codes = {it.code: name for name, it in reference.DTYPES.items()}
    found = {}
    for name, entry in json.loads(whole[8:start]).items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        data = whole[start + begin : start + end]
        if name.endswith(SUFFIX):
            header = reference.parse_header(data)
            found[name.removesuffix(SUFFIX)] = Stored(True, codes[header.dtype], tuple(header.shape), data)
        else:
            found[name] = Stored(False, entry["dtype"], tuple(entry["shape"]), data)
    return found


def write_tensors(folder: Path, tensors: dict[str, Stored]) -> None:
    """Write a weight file that holds these, with metadata that fits."""
    entries: dict[str, Any] = {}
    source: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = of_source = 0
    for name, it in tensors.items():
        size = math.prod(it.shape) * reference.DTYPES[it.dtype].bits // 8
        source[name] = {
            "dtype": it.dtype,
            "shape": list(it.shape),
            "data_offsets": [of_source, of_source + size],
        }
        entries[name + SUFFIX * it.packed] = {
            "dtype": "U8" if it.packed else it.dtype,
            "shape": [len(it.data)] if it.packed else list(it.shape),
            "data_offsets": [at, at + len(it.data)],
        }
        of_source, at = of_source + size, at + len(it.data)
    header = json.dumps(source).encode()
    plain = sorted((name, it.data) for name, it in tensors.items() if not it.packed)
    metadata = {
        "format": "pt",
        "tpde": "1",
        "tpde.source": base64.b64encode(zstandard.compress(header)).decode(),
        "tpde.source_hash": xxhash.xxh3_128_hexdigest(header),
        "tpde.plain": "".join(xxhash.xxh3_128_hexdigest(data) for _, data in plain),
    }
    text = json.dumps({"__metadata__": metadata} | entries).encode()
    data = b"".join(it.data for it in tensors.values())
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    (folder / "tpde_manifest.json").unlink(missing_ok=True)


def constant(shape: tuple[int, ...]) -> Stored:
    """A sound bf16 blob of a few bytes, whose words are all equal: a tensor of any size."""
    header = reference.parse_header(craft.constant_blob())
    header.words = math.prod(shape)
    header.segment_words, header.shape = max(1, header.words), shape
    header.blob_bytes = header.tables_at
    data = header.serialize()
    seal = struct.pack("<Q", reference.meta_hash_of(data))
    return Stored(True, "BF16", shape, craft.patch(data, reference.META_HASH_AT, seal))


def edit_json(path: Path, **values: Any) -> None:
    """Change entries of a JSON object."""
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | values), "utf-8")
