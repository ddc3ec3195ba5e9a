"""Numbers of docs/format.md, in its order."""

from __future__ import annotations

from typing import Final, NamedTuple

VERSION: Final = 1
SUFFIX: Final = "_tpde"  # format.md 1.1
METHOD: Final = "tpde"  # of the `quantization_config` in `config.json`, format.md 8

# format.md 1.3: keys of __metadata__
KEY_VERSION: Final = "tpde"
KEY_SOURCE: Final = "tpde.source"
KEY_SOURCE_HASH: Final = "tpde.source_hash"
KEY_PLAIN: Final = "tpde.plain"
KEYS: Final = KEY_SOURCE, KEY_SOURCE_HASH, KEY_PLAIN  # that are there with a version alone

# format.md 1.6
ALIGN_LARGE: Final = 4096
ALIGN_BLOB: Final = 256
LARGE_BYTES: Final = 4 << 20

# format.md 7
MAX_CONTAINER_HEADER: Final = 100_000_000
SOURCE_HEADER_BYTES: Final = 4 << 20  # and as much for each byte of the container's header as
SOURCE_HEADER_TIMES: Final = 32

# format.md 2
MAGIC: Final = b"\x89TPDE\r\n\x1a"
DELTA_MAGIC: Final = b"\x89TPDD\r\n\x1a"  # delta.md 5.1
HEADER_BYTES: Final = 128
MAX_DIMS: Final = 64
MAX_BYTES: Final = 1 << 60
LAYOUT_LINEAR: Final = 0


class Dtype(NamedTuple):
    """A dtype of safetensors and how its words are taken (format.md 2.1)."""

    name: str
    code: int
    word_bytes: int
    rotate: int
    bits: int


DTYPES: Final = {
    d.name: d
    for d in (
        Dtype("BOOL", 1, 1, 0, 8),
        Dtype("F4", 2, 1, 0, 4),
        Dtype("F6_E2M3", 3, 1, 0, 6),
        Dtype("F6_E3M2", 4, 1, 0, 6),
        Dtype("U8", 5, 1, 0, 8),
        Dtype("I8", 6, 1, 0, 8),
        Dtype("F8_E5M2", 7, 1, 1, 8),
        Dtype("F8_E4M3", 8, 1, 1, 8),
        Dtype("F8_E8M0", 9, 1, 0, 8),
        Dtype("F8_E4M3FNUZ", 10, 1, 1, 8),
        Dtype("F8_E5M2FNUZ", 12, 1, 1, 8),
        Dtype("I16", 13, 2, 0, 16),
        Dtype("U16", 14, 2, 0, 16),
        Dtype("F16", 15, 2, 1, 16),
        Dtype("BF16", 16, 2, 1, 16),
        Dtype("I32", 17, 4, 0, 32),
        Dtype("U32", 18, 4, 0, 32),
        Dtype("F32", 19, 4, 1, 32),
        Dtype("C64", 20, 4, 1, 64),
        Dtype("F64", 21, 8, 1, 64),
        Dtype("I64", 22, 8, 0, 64),
        Dtype("U64", 23, 8, 0, 64),
    )
}
DTYPE_BY_CODE: Final = {d.code: d for d in DTYPES.values()}

# format.md 2.2
CODEC_PREFIX: Final = 1
CODEC_ZSTD: Final = 2
CODEC_CONSTANT: Final = 3

MAX_TABLES: Final = 16  # format.md 7
MAX_TABLES_BYTES: Final = 131_584
RECORD_BYTES: Final = 12  # format.md 4.3
MODE_RAW: Final = 0
MODE_FILL: Final = 1
MODE_CODED: Final = 2
MIN_CHUNK_WORDS: Final = 512  # format.md 4.1
MAX_CHUNK_WORDS: Final = 65536
MAX_PREFIX_CHUNK_WORDS: Final = 32768
MIN_UNIT_LOG2: Final = 4  # format.md 2
MAX_UNIT_LOG2: Final = 12


class CodecFacts(NamedTuple):
    """A codec, and what a valid blob of it has."""

    name: str
    chunks: bool  # planes, an index map and chunks; without, the header's constant says all
    tables: bool
    max_chunk_words: int


CODEC_FACTS: Final = {
    CODEC_PREFIX: CodecFacts("prefix", True, True, MAX_PREFIX_CHUNK_WORDS),
    CODEC_ZSTD: CodecFacts("zstd", True, False, MAX_CHUNK_WORDS),
    CODEC_CONSTANT: CodecFacts("constant", False, False, MAX_CHUNK_WORDS),
}

MANIFEST: Final = "tpde_manifest.json"  # format.md 8
