"""The example of docs/format.md 9: the bytes of the page are those that the core and the slow codec write."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import xxhash

from tpde.codec import reference
from tpde.codec.blob import BlobWriter
from tpde.codec.selection import TensorPlan, base_header
from tpde.format.constants import CODEC_PREFIX
from tpde.format.container import TensorSpec
from tpde.io.sinks import BytesSink

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "format.md"
TEXT = DOCUMENT.read_text("utf-8").partition("## 9. ")[2]
SPEC = TensorSpec("BF16", (16, 16))


def _words() -> bytes:
    """The tensor as the first table of the section says."""
    rotated = [0x7E00 | i for i in range(256)]
    for i, symbol, low in re.findall(r"^(\d+) +[01] [01]{8} [01]{7} +(\w\w), (\w\w)$", TEXT, re.M):
        rotated[int(i)] = int(symbol + low, 16)
    words = [(it >> 1) | (it & 1) << 15 for it in rotated]
    for i, sign, exponent, mantissa in re.findall(r"^(\d+) +([01]) ([01]{8}) ([01]{7}) ", TEXT, re.M):
        assert words[int(i)] == int(sign + exponent + mantissa, 2)
    assert words[8:10] + words[18:19] == [0x3F84, 0xBF04, 0x4009]
    return np.array(words, "<u2").tobytes()


def _page() -> bytes:
    """The blob as the tables of the section say, with plane 0 between."""
    rows = re.findall(r"^\| (\d+) \| `((?:[0-9a-f]{2} ){15}[0-9a-f]{2})` \|", TEXT, re.M)
    blob = bytearray(512)
    blob[192:448] = range(256)
    for offset, text in rows:
        blob[int(offset) : int(offset) + 16] = bytes.fromhex(text)
    assert [int(offset) for offset, _ in rows] == [*range(0, 192, 16), *range(448, 512, 16)]
    return bytes(blob)


def test_the_slow_codec_writes_and_reads_the_page() -> None:
    header = reference.parse_header(_page())
    tables = reference.parse_tables(header, _page())
    made = reference.encode_blob(_words(), "BF16", (16, 16), tables=tables, planes=header.planes)
    assert made == _page()
    assert reference.decode_blob(_page()) == _words()


def test_the_core_writes_the_page() -> None:
    section = _page()[160:176]
    header = replace(
        base_header(SPEC, CODEC_PREFIX), planes=((0, 0), (0, 1)), tables=1, tables_bytes=len(section)
    )
    sink = BytesSink(4096)
    writer = BlobWriter(TensorPlan(header, section, 0), sink, 0, 1)
    writer.write(np.frombuffer(_words(), np.uint8))
    size = writer.finish(xxhash.xxh3_128_digest(_words()))
    assert bytes(sink.data[:size]) == _page()


def test_the_lanes_are_those_of_the_page() -> None:
    rows = re.findall(r"^\| (\d+)(?: to (\d+))? \| .+ \| `([01 ]+)` \| (\d+) \|$", TEXT, re.M)
    bits = ""
    for first, last, text, length in rows:
        one = text.replace(" ", "")
        assert len(one) == int(length)
        bits += one * (int(last or first) - int(first) + 1)
    stored = "".join(f"{byte:08b}"[::-1] for byte in _page()[484:504])
    assert stored == bits.ljust(160, "0")
