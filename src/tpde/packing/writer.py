"""Writing a packed file tensor by tensor, each piece by piece, in bounded memory."""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import xxhash
import zstandard

from tpde.codec.blob import PIECE_BYTES, BlobWriter, write_constant
from tpde.codec.native import Bytes, as_bytes
from tpde.codec.plan import CodecName, Plan, plan_tensor, sample_ranges
from tpde.errors import TpdeError
from tpde.format.blob import align
from tpde.format.constants import (
    ALIGN_BLOB,
    ALIGN_LARGE,
    DTYPES,
    KEY_PLAIN,
    KEY_SOURCE,
    KEY_SOURCE_HASH,
    KEY_VERSION,
    LARGE_BYTES,
    MAX_CONTAINER_HEADER,
    SUFFIX,
    VERSION,
)
from tpde.format.container import (
    TensorSpec,
    canonical_header,
    entry_json,
    join_header,
    metadata_json,
)
from tpde.format.sink import FileSink, Sink
from tpde.packing.order import block_of

HASH_APART = 1 << 20  # bytes from which hashing on a thread of its own pays


def default_threads() -> int:
    """Number of processors that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return os.cpu_count() or 1


class _Store(Protocol):
    """How one tensor's bytes are stored."""

    def write(self, data: Bytes) -> None:
        """Take the next bytes."""

    def finish(self, digest: bytes) -> int:
        """Complete the tensor; returns its size as stored."""


class _Plain:
    """A tensor stored as it is."""

    def __init__(self, sink: Sink, offset: int) -> None:
        self._sink, self._offset, self._size = sink, offset, 0

    def write(self, data: Bytes) -> None:
        self._sink.write(self._offset + self._size, [data])
        self._size += data.size

    def finish(self, digest: bytes) -> int:
        return self._size


class _Constant:
    """A tensor whose words have all been equal so far; `broken` says that they no longer are."""

    def __init__(self, spec: TensorSpec, word: Bytes, sink: Sink, offset: int) -> None:
        self._spec, self.word, self._sink, self._offset = spec, word, sink, offset
        self.size = 0

    def holds(self, data: Bytes) -> bool:
        """Whether these bytes go on the same way."""
        return is_constant(data, np.roll(self.word, -(self.size % self.word.size)))

    def write(self, data: Bytes) -> None:
        self.size += data.size

    def finish(self, digest: bytes) -> int:
        return write_constant(self._spec, self.word.tobytes(), digest, self._sink, self._offset)


def is_constant(data: Bytes, word: Bytes) -> bool:
    """Whether some bytes are one word again and again."""
    b = word.size
    if not np.array_equal(data[:b], word[: data.size]):
        return False
    return bool(np.array_equal(data[b:], data[:-b])) if data.size > b else True


class _Tensor:
    """The tensor being written."""

    def __init__(self, name: str, spec: TensorSpec, offset: int) -> None:
        self.name, self.spec, self.offset = name, spec, offset
        self.hasher = xxhash.xxh3_128()
        self.size = 0
        self.held: list[Bytes] = []  # bytes kept back until there are enough for a sample
        self.store: _Store | None = None


class PackedWriter:
    """Writes a packed file from tensors given in pieces, so that a source may be larger than memory.

    The file appears when the writer is closed without an error, and not before; leaving the `with` block
    by an exception removes every trace of it.

    Parameters
    ----------
    destination : path-like or Sink
        Where the file goes.
    tensors : mapping of str to TensorSpec
        All tensors that will be written: their dtypes (names of safetensors) and shapes.
    metadata : mapping of str to str, optional
        The source's own `__metadata__`.
    source_header : bytes, optional
        The header to restore when the file is unpacked. By default that which the stock library would
        write for `tensors` and `metadata`.
    threads : int, optional
        How many threads encode; by default one for each processor. The file does not depend on it.
    codec : {"auto", "prefix", "zstd"}
        Which codec to use where a tensor shrinks at all.
    force : bool
        Replace an existing file.

    Examples
    --------
    >>> spec = TensorSpec("BF16", (1 << 20, 4096))
    >>> with PackedWriter("big.safetensors", {"weight": spec}) as writer:  # doctest: +SKIP
    ...     for piece in pieces:
    ...         writer.write("weight", piece)
    """

    def __init__(
        self,
        destination: str | os.PathLike[str] | Sink,
        tensors: Mapping[str, TensorSpec],
        *,
        metadata: Mapping[str, str] | None = None,
        source_header: bytes | None = None,
        threads: int | None = None,
        codec: CodecName = "auto",
        force: bool = False,
    ) -> None:
        self._specs = dict(tensors)
        self._metadata = dict(metadata or {})
        self._threads = check_threads(threads)
        if codec not in ("auto", "prefix", "zstd"):
            raise ValueError(f"no codec `{codec}`; there are auto, prefix, zstd")
        self._codec = codec
        header = source_header
        if header is None:
            header = canonical_header(self._specs, self._metadata)
        self._metadata[KEY_VERSION] = str(VERSION)
        self._metadata[KEY_SOURCE] = base64.b64encode(
            zstandard.ZstdCompressor(level=19, write_content_size=True).compress(header)
        ).decode()
        self._metadata[KEY_SOURCE_HASH] = xxhash.xxh3_128_hexdigest(header)
        self._written: dict[str, tuple[TensorSpec, int, int]] = {}  # stored name: spec, begin, end
        self._plain: dict[str, str] = {}
        self._plans: dict[str, Plan | None] = {}
        self._now: _Tensor | None = None
        self._done: set[str] = set()
        total = sum(spec.nbytes for spec in self._specs.values())
        unit = ALIGN_LARGE if total >= LARGE_BYTES else ALIGN_BLOB if total >= 4 * ALIGN_BLOB else 8
        self._start = align(8 + self._reserve(total), unit)
        self._at = 0
        if self._start - 8 > MAX_CONTAINER_HEADER:
            raise TpdeError(
                f"{len(self._specs)} tensors need a header of {self._start - 8} bytes; a safetensors "
                f"file allows {MAX_CONTAINER_HEADER}; write them to several files"
            )
        self._hashing = ThreadPoolExecutor(1, "tpde-hash")
        self._sink = (
            FileSink(destination, force=force) if isinstance(destination, (str, os.PathLike)) else destination
        )

    def _reserve(self, total: int) -> int:
        """Most bytes that the header can take: it is written last, in front of the data."""
        digits = len(str(total + total // 8 + (ALIGN_LARGE + 4096) * (len(self._specs) + 1)))
        largest = 10**digits - 1
        parts = [metadata_json(self._metadata | {KEY_PLAIN: "0" * (32 * len(self._specs))})]
        for name, spec in self._specs.items():
            plain = entry_json(name, spec, largest, largest)
            packed = entry_json(name + SUFFIX, TensorSpec("U8", (largest,)), largest, largest)
            parts.append(max(plain, packed, key=len))
        return len((",".join(parts)).encode()) + 2

    def may_pack(self, name: str) -> bool:
        """Whether a tensor's name allows it to be packed (format.md 1.2)."""
        return not name.endswith(SUFFIX) and name + SUFFIX not in self._specs

    def plan(self, name: str, sample: Any) -> bool:
        """Decide how to store a tensor before its bytes come; returns whether it will be packed.

        Without this, its first bytes are the sample.

        Parameters
        ----------
        name : str
            The tensor.
        sample : bytes-like
            The bytes that `sample_ranges` of its spec name.
        """
        data, spec = as_bytes(sample), self._specs[name]
        word = data[: DTYPES[spec.dtype].word_bytes]
        plan = None
        if self.may_pack(name):
            if is_constant(data, word) and spec.nbytes > 4 * ALIGN_BLOB:
                return True  # decided by its bytes
            plan = plan_tensor(spec, data, self._codec)
        self._plans[name] = plan
        return plan is not None

    def write(self, name: str, data: Any) -> None:
        """Write a tensor's next bytes.

        Tensors may come in any order, but each must be complete before the next begins.

        Parameters
        ----------
        name : str
            The tensor.
        data : bytes-like or ndarray
            Contiguous; any number of bytes.
        """
        if self._now is None or self._now.name != name:
            self._begin(name)
        tensor = self._now
        assert tensor is not None
        piece = as_bytes(data)
        if tensor.size + piece.size > tensor.spec.nbytes:
            raise ValueError(
                f"tensor `{name}` has {tensor.spec.nbytes} bytes, {tensor.size + piece.size} were given"
            )
        for at in range(0, piece.size, PIECE_BYTES):
            self._take(tensor, piece[at : at + PIECE_BYTES])
        if tensor.size == tensor.spec.nbytes:
            self._end(tensor)

    def _begin(self, name: str) -> None:
        if self._now is not None:
            raise ValueError(
                f"tensor `{self._now.name}` has {self._now.size} of {self._now.spec.nbytes} bytes so far; "
                f"it must be complete before `{name}` begins"
            )
        if name not in self._specs:
            raise KeyError(f"tensor `{name}` was not announced")
        if name in self._done:
            raise ValueError(f"tensor `{name}` was written already")
        self._now = _Tensor(name, self._specs[name], self._start + self._at)

    def _take(self, tensor: _Tensor, piece: Bytes) -> None:
        if self._threads == 1 or piece.size < HASH_APART:
            tensor.hasher.update(piece.data)
            self._store(tensor, piece)
            return
        hashed = self._hashing.submit(tensor.hasher.update, piece.data)
        try:
            self._store(tensor, piece)
        finally:
            hashed.result()

    def _store(self, tensor: _Tensor, piece: Bytes) -> None:
        tensor.size += piece.size
        if tensor.store is None:
            sample = sum(end - begin for begin, end in sample_ranges(tensor.spec))
            if tensor.name not in self._plans and tensor.size < sample:
                tensor.held.append(piece.copy())
                return
            if tensor.held:
                piece = np.concatenate([*tensor.held, piece])
                tensor.held = []
            self._choose(tensor, piece, piece[:sample])
        if isinstance(tensor.store, _Constant) and not tensor.store.holds(piece):
            constant = tensor.store
            self._plans.setdefault(
                tensor.name, plan_tensor(tensor.spec, whole_words(tensor.spec, piece), self._codec)
            )
            self._choose(tensor, piece, piece)
            for begin in range(0, constant.size, PIECE_BYTES):
                size = min(PIECE_BYTES, constant.size - begin)
                word = np.roll(constant.word, -(begin % constant.word.size))
                tensor.store.write(np.resize(word, size))
        assert tensor.store is not None
        tensor.store.write(piece)

    def _choose(self, tensor: _Tensor, data: Bytes, sample: Bytes) -> None:
        spec = tensor.spec
        if tensor.name not in self._plans:
            word = data[: DTYPES[spec.dtype].word_bytes]
            constant = data.size >= word.size and is_constant(data, word)
            if constant and self.may_pack(tensor.name) and spec.nbytes > 4 * ALIGN_BLOB:
                tensor.store = _Constant(spec, word.copy(), self._sink, tensor.offset)
                return
            self.plan(tensor.name, whole_words(spec, sample))
        plan = self._plans[tensor.name]
        tensor.store = (
            BlobWriter(plan, self._sink, tensor.offset, self._threads)
            if plan
            else _Plain(self._sink, tensor.offset)
        )

    def _end(self, tensor: _Tensor) -> None:
        if tensor.store is None:
            tensor.store = _Plain(self._sink, tensor.offset)  # it has no bytes
        digest = tensor.hasher.digest()
        size = tensor.store.finish(digest)
        name, spec = tensor.name, tensor.spec
        if isinstance(tensor.store, _Plain):
            self._plain[name] = digest.hex()
        else:
            name, padded = name + SUFFIX, align(size, ALIGN_BLOB)
            self._sink.write(tensor.offset + size, [bytes(padded - size)])
            size, spec = padded, TensorSpec("U8", (padded,))
        self._written[name] = spec, self._at, self._at + size
        self._at += size
        self._done.add(tensor.name)
        self._now = None

    def align_block(self, first: str, last: str) -> None:
        """Let a block end at a multiple of 4096 if it is large and its last tensor is packed (1.6).

        Parameters
        ----------
        first, last : str
            Names of the block's first and last tensor, all of which have been written.
        """
        stored = last + SUFFIX
        begin = self._written.get(first, self._written.get(first + SUFFIX))
        if stored not in self._written or begin is None or self._at - begin[1] < LARGE_BYTES:
            return
        _, at, end = self._written[stored]
        padded = align(end, ALIGN_LARGE)
        self._sink.write(self._start + end, [bytes(padded - end)])
        self._written[stored] = TensorSpec("U8", (padded - at,)), at, padded
        self._at = padded

    def close(self) -> None:
        """Complete the file.

        Raises
        ------
        ValueError
            If a tensor is missing or incomplete.
        """
        for name, spec in self._specs.items():
            if name not in self._done and not spec.nbytes and self._now is None:
                self._begin(name)
                assert self._now is not None
                self._end(self._now)
        missing = [name for name in self._specs if name not in self._done]
        if missing:
            raise ValueError(f"tensor `{missing[0]}` is not complete ({len(missing)} are not)")
        if self._plain:
            order = sorted(self._plain, key=str.encode)
            self._metadata[KEY_PLAIN] = "".join(self._plain[name] for name in order)
        entries = [entry_json(name, *where) for name, where in self._written.items()]
        header = join_header(self._metadata, entries).ljust(self._start - 8, b" ")
        self._sink.write(0, [(self._start - 8).to_bytes(8, "little") + header])
        self._hashing.shutdown()
        self._sink.commit()

    def abort(self) -> None:
        """Leave no trace of the file."""
        self._hashing.shutdown()
        self._sink.abort()

    def __enter__(self) -> PackedWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            try:
                self.close()
            except BaseException:
                self.abort()
                raise
        else:
            self.abort()


def whole_words(spec: TensorSpec, data: Bytes) -> Bytes:
    """Leave out an incomplete word at the end."""
    b = DTYPES[spec.dtype].word_bytes
    return data[: data.size // b * b]


def check_threads(threads: int | None) -> int:
    """A number of threads, or the default for None."""
    if threads is None:
        return default_threads()
    if threads < 1:
        raise ValueError(f"{threads} threads; at least 1 is needed")
    return threads


def store_order(names: list[str], in_place: set[str]) -> list[str]:
    """Within each block of forward-ordered names: what is stored in place, the rest last of all (1.6)."""
    return [n for n in names if n in in_place] + [n for n in names if n not in in_place]


def same_block(a: str, b: str) -> bool:
    """Whether two tensors belong to the same block."""
    return block_of(a) is not None and block_of(a) == block_of(b)
