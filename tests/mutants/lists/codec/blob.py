"""Of blobs: writing, reading and checking them."""

from __future__ import annotations

from ...mutant import mutant

_BLOB_WRITER = "unit/test_blob_writer.py"

MUTANTS = (
    mutant(
        "the-last-background-write-may-fail",
        "codec/blob.py",
        "            self._writing[0].result()\n            self._writing = None",
        "            self._writing = None",
        "a disk that is full at the last piece commits a file that lacks it",
        "unit/test_background_writes.py",
    ),
    mutant(
        "a-background-write-may-fail",
        "codec/blob.py",
        "                last[0].result()\n",
        "",
        "the error of a piece's background write is dropped",
        "unit/test_background_writes.py",
    ),
    mutant(
        "one-buffer-for-two-pieces",
        "codec/blob.py",
        "            self._out = np.empty(0, np.uint8)\n            if last is not None:",
        "            if last is not None:",
        "a piece is encoded into the buffer that is being written",
        "unit/test_background_writes.py",
    ),
    mutant(
        "a-pending-piece-is-the-callers",
        "codec/blob.py",
        "self._pending = piece.copy()",
        "self._pending = piece",
        "words that wait for their chunk change when the caller uses its buffer again",
        _BLOB_WRITER,
    ),
    mutant(
        "an-incomplete-tensor-is-finished",
        "codec/blob.py",
        "if self._next != self._header.chunks or self._pending.size:",
        "if self._pending.size:",
        "a blob without its last chunks is written",
        _BLOB_WRITER,
    ),
    mutant(
        "the-largest-chunk-is-the-last",
        "codec/blob.py",
        "self._max_chunk = max(self._max_chunk, made.max_chunk)",
        "self._max_chunk = made.max_chunk",
        "the header bounds chunks by the last ones alone",
        _BLOB_WRITER,
    ),
    mutant(
        "the-largest-stream-is-the-last",
        "codec/blob.py",
        "self._max_stream = max(self._max_stream, made.max_stream)",
        "self._max_stream = made.max_stream",
        "the header bounds coded planes by the last ones alone",
        _BLOB_WRITER,
    ),
    mutant(
        "the-index-is-not-checked",
        "codec/blob.py",
        "        if chunks is not None:\n            core_chunks.index_check(",
        "        if chunks is None:\n            core_chunks.index_check(",
        "chunks outside of their blob are read",
        "malformed/test_attacks_blob.py",
    ),
    mutant(
        "the-meta-hash-is-not-checked",
        "codec/blob.py",
        "        header.check_meta(meta)\n",
        "",
        "a damaged header, table or index map is taken",
        "malformed/test_attacks_blob.py",
    ),
    mutant(
        "constants-start-anywhere",
        "codec/blob.py",
        "repeat_word(np.roll(word, -(begin % b)), out)",
        "repeat_word(word, out)",
        "a range of a constant that starts within a word is shifted",
        "contract/test_roundtrip.py::test_any_range_of_bytes_reads_like_a_slice",
    ),
    mutant(
        "the-last-damaged-chunk-is-not-named",
        "codec/blob.py",
        "        for number in range(first, last + 1):",
        "        for number in range(first, last):",
        "`verify` does not name a last chunk that is damaged beside others",
        _BLOB_WRITER,
    ),
)
