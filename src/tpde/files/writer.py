"""Writing a packed file tensor by tensor, each piece by piece, in bounded memory."""

from __future__ import annotations

import base64
import os
from collections import Counter
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

import xxhash
import zstandard

from tpde.codec.native import Bytes, as_bytes
from tpde.codec.selection import MIN_BYTES, CodecName, TensorPlan, plan_tensor
from tpde.errors import InvalidInput, TpdeError
from tpde.files.tensor_writer import Stored, TensorWriter, repeats
from tpde.format.blob_header import MAX_FIXED_BYTES, align, parse_blob_header
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
from tpde.format.container import Container, TensorSpec, check_texts
from tpde.format.container_reader import max_source_header, parse_header
from tpde.format.container_writer import canonical_header, entry_json, join_header, metadata_json, names_bytes
from tpde.io.sinks import FileSink, Sink
from tpde.io.small_writes import Gathered

# Of the source's header. Level 19 takes 0.2 s for 300 kB and 85 s for 30 MB, level 9 0.15 s for that, a
# quarter larger. Where it is quick, 19 saves up to a third.
_LEVEL, _LARGE_LEVEL, _LARGE_HEADER = 19, 9, 256 << 10

MAX_THREADS = 1 << 16  # no machine has more processors, and the core would take 2^32 + 1 for 1


def default_threads() -> int:
    """Number of processors that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return os.cpu_count() or 1


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
    source_header : bytes or Container, optional
        The header to restore when the file is unpacked, parsed or not. By default that which the stock
        library would write for `tensors` and `metadata`.
    threads : int, optional
        How many threads encode; by default one for each processor. The file does not depend on it.
    codec : {"auto", "prefix", "zstd"}
        Which codec to use where a tensor shrinks at all.
    force : bool
        Replace an existing file.
    mode : int, optional
        The file's permission bits. By default those of the file that it replaces, or of a new file.

    Attributes
    ----------
    codec : str
        As it was given.

    Raises
    ------
    InvalidInput
        If a name or the metadata is nothing that a reader would take, or `source_header` describes other
        tensors. Nothing is written then.
    DestinationExists, InvalidDestination
        If the file cannot be written.

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
        source_header: bytes | Container | None = None,
        threads: int | None = None,
        codec: CodecName = "auto",
        force: bool = False,
        mode: int | None = None,
    ) -> None:
        self._specs = dict(tensors)
        self._metadata = _checked(self._specs, metadata)
        self._threads = check_threads(threads)
        if codec not in ("auto", "prefix", "zstd"):
            raise ValueError(f"no codec `{codec}`; there are auto, prefix, zstd")
        self.codec = codec
        if source_header is None:
            header = canonical_header(self._specs, self._metadata)
        else:
            given = source_header
            source = given if isinstance(given, Container) else parse_header(given, "the source's header")
            if source.specs != self._specs:
                raise InvalidInput(
                    "the source's header describes other tensors than those announced",
                    hint="give the header of the file that holds them",
                )
            header = source.header
        self._metadata[KEY_VERSION] = str(VERSION)
        level = _LEVEL if len(header) <= _LARGE_HEADER else _LARGE_LEVEL
        self._metadata[KEY_SOURCE] = base64.b64encode(
            zstandard.ZstdCompressor(level=level, write_content_size=True).compress(header)
        ).decode()
        self._metadata[KEY_SOURCE_HASH] = xxhash.xxh3_128_hexdigest(header)
        self._written: dict[str, tuple[TensorSpec, int, int]] = {}  # stored name: spec, begin, end
        self._plain: dict[str, str] = {}
        self._plans: dict[str, TensorPlan | None] = {}
        self._now: tuple[str, TensorWriter] | None = None
        self._done: set[str] = set()
        total = sum(spec.nbytes for spec in self._specs.values())
        unit = ALIGN_LARGE if total >= LARGE_BYTES else ALIGN_BLOB if total >= 4 * ALIGN_BLOB else 8
        self._start = align(8 + self._reserve(total), unit)
        self._at = 0
        if self._start - 8 > MAX_CONTAINER_HEADER:
            raise TpdeError(
                f"{len(self._specs)} tensors need a header of {self._start - 8} bytes; a safetensors file "
                f"allows {MAX_CONTAINER_HEADER}",
                hint="write them to several files",
                found=self._start - 8,
                needed=MAX_CONTAINER_HEADER,
            )
        if len(header.rstrip(b" ")) > max_source_header(self._start - 8):
            raise TpdeError(
                f"the source's header has {len(header)} bytes, far more than its tensors and metadata need",
                hint="write it without the blanks between its values",
            )
        # One thread may do everything; with more, hashing and writing go on beside encoding.
        self._background = ThreadPoolExecutor(1, "tpde") if self._threads > 1 else None
        self._sink: Sink = (
            FileSink(destination, force=force, mode=mode)
            if isinstance(destination, (str, os.PathLike))
            else destination
        )
        self._small = Gathered(self._sink)

    def _reserve(self, total: int) -> int:
        """Most bytes that the header can take: it is written last, in front of the data."""
        digits = len(str(total + total // 8 + (ALIGN_LARGE + 4096) * (len(self._specs) + 1)))
        largest = 10**digits - 1
        size = len(metadata_json(self._metadata | {KEY_PLAIN: "0" * (32 * len(self._specs))}).encode()) + 2
        packed = len(entry_json(SUFFIX, TensorSpec("U8", (largest,)), largest, largest))
        size += names_bytes(self._specs)
        for spec, count in Counter(self._specs.values()).items():  # few of many tensors differ in it
            size += count * (max(len(entry_json("", spec, largest, largest)), packed) + 1)
        return size

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
        if not self.may_pack(name) or spec.nbytes < MIN_BYTES:
            self._plans[name] = None
            return False
        if repeats(data, data[: DTYPES[spec.dtype].word_bytes]) == data.size:
            return True  # perhaps all of it is: its bytes decide
        self._plans[name] = plan_tensor(spec, data, self.codec)
        return self._plans[name] is not None

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
        piece = as_bytes(data)
        if self._now is None or self._now[0] != name:
            spec = self._next(name)
            if piece.size == spec.nbytes < MIN_BYTES:  # as very many are: written together
                self._small.write(self._start + self._at, piece.data)
                self._end(name, spec, Stored(piece.size, False, xxhash.xxh3_128_digest(piece.data)))
                return
            self._now = name, self._begin(name, spec)
        tensor = self._now[1]
        if tensor.size + piece.size > tensor.spec.nbytes:
            raise ValueError(
                f"tensor `{name}` has {tensor.spec.nbytes} bytes, {tensor.size + piece.size} were given"
            )
        tensor.write(piece)
        if tensor.size == tensor.spec.nbytes:
            stored = tensor.finish()
            if stored.packed:
                padding = bytes(align(stored.size, ALIGN_BLOB) - stored.size)
                self._sink.write(tensor.offset + stored.size, [padding])
            self._end(name, tensor.spec, stored)

    def write_blob(self, name: str, blob: Bytes) -> None:
        """Write a whole tensor that was packed elsewhere, by the writer's codec.

        Parameters
        ----------
        name : str
            The tensor, whose name `may_pack`.
        blob : ndarray of uint8
            Its blob, with its hash, and zeros up to a multiple of 256 bytes.
        """
        spec = self._next(name)
        self._small.flush()
        header = parse_blob_header(blob[:MAX_FIXED_BYTES].tobytes(), blob.size)
        self._sink.write(self._start + self._at, [blob.data])
        self._end(name, spec, Stored(header.blob_bytes, True, header.hash))

    def _next(self, name: str) -> TensorSpec:
        """What a tensor is, which may begin now."""
        if self._now is not None:
            other, tensor = self._now
            raise ValueError(
                f"tensor `{other}` has {tensor.size} of {tensor.spec.nbytes} bytes so far; it must be "
                f"complete before `{name}` begins"
            )
        if name not in self._specs:
            raise KeyError(f"tensor `{name}` was not announced")
        if name in self._done:
            raise ValueError(f"tensor `{name}` was written already")
        return self._specs[name]

    def _begin(self, name: str, spec: TensorSpec) -> TensorWriter:
        self._small.flush()
        tensor = TensorWriter(
            spec,
            self._sink,
            self._start + self._at,
            threads=self._threads,
            codec=self.codec,
            may_pack=self.may_pack(name),
            background=self._background,
        )
        if name in self._plans:
            tensor.decide(self._plans[name])
        return tensor

    def _end(self, name: str, spec: TensorSpec, stored: Stored) -> None:
        size = stored.size
        self._done.add(name)
        self._now = None
        if not stored.packed:
            self._plain[name] = stored.digest.hex()
        else:
            size = align(size, ALIGN_BLOB)
            name, spec = name + SUFFIX, TensorSpec("U8", (size,))
        self._written[name] = spec, self._at, self._at + size
        self._at += size

    def packed_names(self) -> set[str]:
        """Names of the tensors that have been written packed."""
        return self._done - self._plain.keys()

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
        """Complete the file. Where that fails, nothing of it is left.

        Raises
        ------
        ValueError
            If a tensor is missing or incomplete.
        """
        try:
            self._complete()
        except BaseException:
            self.abort()
            raise

    def _complete(self) -> None:
        if self._now is None:
            for name in [name for name, spec in self._specs.items() if not spec.nbytes]:
                if name not in self._done:
                    self.write(name, b"")
        self._small.flush()
        missing = [name for name in self._specs if name not in self._done]
        if missing:
            raise ValueError(f"tensor `{missing[0]}` is not complete ({len(missing)} are not)")
        if self._plain:
            # Texts compare by code points, in the order of their UTF-8 bytes.
            self._metadata[KEY_PLAIN] = "".join(self._plain[name] for name in sorted(self._plain))
        entries = (entry_json(name, *where) for name, where in self._written.items())
        header = join_header(self._metadata, entries).ljust(self._start - 8, b" ")
        self._sink.write(0, [(self._start - 8).to_bytes(8, "little") + header])
        self._stop()
        self._sink.commit()

    def abort(self) -> None:
        """Leave no trace of the file."""
        try:
            self._stop()
        finally:
            self._sink.abort()

    def _stop(self) -> None:
        if self._background is not None:
            self._background.shutdown()

    def __enter__(self) -> PackedWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()


def _checked(names: Collection[str], metadata: Mapping[str, str] | None) -> dict[str, str]:
    """The metadata, once names and metadata are such as readers take."""
    found = {} if metadata is None else metadata
    try:
        check_texts(names, found)
    except ValueError as error:
        raise InvalidInput(str(error), hint="change it, or no reader would open the file") from None
    return dict(found)


def check_threads(threads: int | None) -> int:
    """A number of threads, or the default for None.

    Raises
    ------
    ValueError
        If it is not a whole number from 1 to `MAX_THREADS`.
    """
    if threads is None:
        return default_threads()
    if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= MAX_THREADS:
        raise ValueError(f"{threads!r:.50} threads; at least 1 is needed, and at most {MAX_THREADS}")
    return threads


def store_order(names: list[str], in_place: set[str]) -> list[str]:
    """Within each block of forward-ordered names: what is stored in place, the rest last of all (1.6)."""
    return [n for n in names if n in in_place] + [n for n in names if n not in in_place]
