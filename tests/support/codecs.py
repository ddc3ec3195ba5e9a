"""The codecs under contract: a new codec adds a line to `CASES`."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from support.contents import CONTENTS, fill, shapes
from support.files import Tensors
from tpde.codec import selection
from tpde.codec.selection import CodecName
from tpde.files import file_writer, tensor_writer
from tpde.format.constants import CODEC_CONSTANT, CODEC_PREFIX, CODEC_ZSTD

ZSTD_CHUNK_WORDS = 4096  # instead of 65536, so that small tensors have several chunks


@dataclass(frozen=True)
class Case:
    """A way to store a tensor."""

    name: str
    code: int | None  # of the blobs; None: plain
    codec: CodecName
    chunk_words: int
    contents: tuple[str, ...] = tuple(CONTENTS)
    suffix: str = ""  # of names: `_tpde` keeps a tensor plain (format.md 1.2)

    def tensors(self, dtype: str) -> Tensors:
        """Give every content in every shape."""
        specs = list(shapes(dtype, self.chunk_words))
        return {
            f"{content}.{i}{self.suffix}": (spec, fill(content, spec))
            for content in self.contents
            for i, spec in enumerate(specs)
        }


CASES = (
    Case("prefix", CODEC_PREFIX, "prefix", selection.PREFIX_CHUNK_WORDS),
    Case("zstd", CODEC_ZSTD, "zstd", ZSTD_CHUNK_WORDS),
    Case("constant", CODEC_CONSTANT, "auto", selection.PREFIX_CHUNK_WORDS, ("zeros", "constant")),
    Case("plain", None, "auto", selection.PREFIX_CHUNK_WORDS, suffix="_tpde"),
)
every_codec = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def pack_everything(patch: pytest.MonkeyPatch) -> None:
    """Let the planner pack tensors that do not shrink, and the smallest."""
    patch.setattr(selection, "WORTH", 10**9)
    for module in (selection, tensor_writer, file_writer):
        patch.setattr(module, "MIN_BYTES", 1)
    patch.setattr(selection, "ZSTD_CHUNK_WORDS", ZSTD_CHUNK_WORDS)
