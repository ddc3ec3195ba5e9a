"""The source's header, which a packed file keeps in its metadata (docs/format.md 1.3)."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping

import xxhash
import zstandard

from tpde.errors import Corrupt, InvalidInput
from tpde.format.constants import KEY_SOURCE, KEY_SOURCE_HASH, MAX_CONTAINER_HEADER
from tpde.format.container import Container, TensorSpec
from tpde.format.container_reader import max_source_header, parse_header
from tpde.format.container_writer import canonical_header

# Of the source's header. Level 19 takes 0.2 s for 300 kB and 85 s for 30 MB, level 9 0.15 s for that, a
# quarter larger. Where it is quick, 19 saves up to a third.
_LEVEL, _LARGE_LEVEL, _LARGE_HEADER = 19, 9, 256 << 10


def restored_header(
    given: bytes | Container | None, specs: Mapping[str, TensorSpec], metadata: Mapping[str, str]
) -> bytes:
    """The header to restore when a file is unpacked: the one that was given, or a canonical one.

    Raises
    ------
    InvalidInput
        If it describes other tensors than `specs`.
    """
    if given is None:
        return canonical_header(specs, metadata)
    source = given if isinstance(given, Container) else parse_header(given, "the source's header")
    if source.specs != specs:
        raise InvalidInput(
            "the source's header describes other tensors than those announced",
            hint="give the header of the file that holds them",
        )
    return source.header


def kept_header(header: bytes) -> dict[str, str]:
    """What the metadata says of a header."""
    level = _LEVEL if len(header) <= _LARGE_HEADER else _LARGE_LEVEL
    frame = zstandard.ZstdCompressor(level=level, write_content_size=True).compress(header)
    return {
        KEY_SOURCE: base64.b64encode(frame).decode(),
        KEY_SOURCE_HASH: xxhash.xxh3_128_hexdigest(header),
    }


def original_header(container: Container, name: str) -> Container:
    """The source's header from the header of a packed file, which messages call `name`.

    Raises
    ------
    Corrupt
        If it is damaged.
    """
    metadata, where = container.metadata, f"`{name}`"
    try:
        packed = base64.b64decode(metadata[KEY_SOURCE], validate=True)
        size = zstandard.frame_content_size(packed)
        if not 0 <= size <= MAX_CONTAINER_HEADER:
            raise ValueError(f"it claims {size} bytes")
        header = zstandard.ZstdDecompressor().decompress(packed, max_output_size=size, allow_extra_data=False)
        if len(header) != size:
            raise ValueError(f"it claims {size} bytes and holds {len(header)}")
        if len(header.rstrip(b" ")) > max_source_header(len(container.header)):
            raise ValueError("it is far larger than that of the packed file")
        if xxhash.xxh3_128_hexdigest(header) != metadata[KEY_SOURCE_HASH]:
            raise ValueError("its hash differs")
    except (KeyError, ValueError, binascii.Error, zstandard.ZstdError) as error:
        raise Corrupt(
            f"{where}: the source's header in the metadata is damaged ({error})",
            hint="fetch the file again",
            where=name,
        ) from None
    return parse_header(header, f"{where}, the source's header")
