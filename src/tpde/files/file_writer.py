"""Writing a packed file tensor by tensor, each piece by piece, in bounded memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import TracebackType
from typing import cast

import xxhash

from tpde.codec.native import Bytes, as_bytes
from tpde.codec.pool import Beside
from tpde.codec.selection import MIN_BYTES, CodecName, TensorPlan, plan_tensor, sample_ranges
from tpde.files import writer_errors
from tpde.files.packed_header import checked_metadata, data_start, packed_header
from tpde.files.source_header import kept_header, restored_header
from tpde.files.tensor_writer import TensorWriter, WrittenTensor, repeats
from tpde.files.thread_count import check_threads
from tpde.format.blob_header import MAX_FIXED_BYTES, align, parse_blob_header
from tpde.format.constants import ALIGN_BLOB, ALIGN_LARGE, DTYPES, KEY_VERSION, LARGE_BYTES, SUFFIX, VERSION
from tpde.format.container import Container, TensorSpec
from tpde.io.buffers import Buffer
from tpde.io.sinks import ByteSink, FileSink
from tpde.io.small_writes import Gathered


class FileWriter:
    """Writes a packed file from tensors given in pieces, so that a source may be larger than memory.

    The file appears when the writer is closed without an error, and not before; leaving the `with` block
    by an exception removes every trace of it.

    Parameters
    ----------
    destination : path-like or ByteSink
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
    threads : int
        How many encode.

    Raises
    ------
    InvalidInput
        If a name or the metadata is nothing that a reader would take, or `source_header` describes other
        tensors. Nothing is written then.
    DestinationExists, InvalidDestination
        If the file cannot be written.
    """

    def __init__(
        self,
        destination: str | os.PathLike[str] | ByteSink,
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
        self._metadata = checked_metadata(self._specs, metadata)
        self.threads = check_threads(threads)
        if codec not in ("auto", "prefix", "zstd"):
            raise writer_errors.unknown_codec(codec)
        self.codec = codec
        header = restored_header(source_header, self._specs, self._metadata)
        self._metadata[KEY_VERSION] = str(VERSION)
        self._metadata |= kept_header(header)
        self._written: dict[str, tuple[TensorSpec, int, int]] = {}  # stored name: spec, begin, end
        self._plain: dict[str, str] = {}
        self._plans: dict[str, TensorPlan | None] = {}
        self._now: tuple[str, TensorWriter] | None = None
        self._done: set[str] = set()
        self._start = data_start(self._specs, self._metadata, header)
        self._at = 0
        # One thread may do everything; with more, hashing and writing go on beside encoding.
        self._background = Beside() if self.threads > 1 else None
        self._sink: ByteSink = (
            cast(ByteSink, destination)
            if hasattr(destination, "commit")
            else FileSink(destination, force=force, mode=mode)
        )
        self._small = Gathered(self._sink)
        self._ended = False
        self._failed: BaseException | None = None  # what of the file was written then is not known

    def spec(self, name: str) -> TensorSpec:
        """What a tensor was announced as.

        Raises
        ------
        UnknownTensor
            If it was not.
        """
        if not isinstance(name, str) or name not in self._specs:
            raise writer_errors.unannounced(name)
        return self._specs[name]

    def may_pack(self, name: str) -> bool:
        """Whether a tensor's name allows it to be packed (format.md 1.2)."""
        return not name.endswith(SUFFIX) and name + SUFFIX not in self._specs

    def plan(self, name: str, sample: Buffer) -> bool:
        """Decide how to store a tensor before its bytes come; returns whether it will be packed.

        Parameters and errors are those of `tpde.PackedWriter.plan`.
        """
        data, spec = as_bytes(sample), self.spec(name)
        if name in self._done or (self._now is not None and self._now[0] == name):
            raise writer_errors.begun_already(name)
        needed = sum(end - begin for begin, end in sample_ranges(spec))
        if data.size != needed:
            raise writer_errors.no_sample(name, data.size, needed)
        if not self.may_pack(name) or spec.nbytes < MIN_BYTES:
            self._plans[name] = None
            return False
        if repeats(data, data[: DTYPES[spec.dtype].word_bytes]) == data.size:
            return True  # perhaps all of it is: its bytes decide
        self._plans[name] = plan_tensor(spec, data, self.codec)
        return self._plans[name] is not None

    def write(self, name: str, data: Buffer) -> None:
        """Write a tensor's next bytes.

        Tensors may come in any order, but each must be complete before the next begins.

        Parameters
        ----------
        name : str
            The tensor.
        data : bytes-like or ndarray
            Contiguous; any number of bytes.

        Raises
        ------
        InvalidArgument, UnknownTensor
            If they are none of the bytes that may come now. These may still come.
        BaseException
            Whatever else. The file is given up then, and no trace of it is left.
        """
        self._require_open(name)
        piece = as_bytes(data)
        if self._now is None or self._now[0] != name:
            size, spec = 0, self._next(name)
        else:
            size, spec = self._now[1].size, self._now[1].spec
        if size + piece.size > spec.nbytes:
            raise writer_errors.too_many(name, size + piece.size, spec.nbytes)
        try:
            self._put(name, spec, piece)
        except BaseException as error:
            self._give_up(error)
            raise

    def _put(self, name: str, spec: TensorSpec, piece: Bytes) -> None:
        if self._now is None:
            if piece.size == spec.nbytes < MIN_BYTES:  # as very many are: written together
                self._small.write(self._start + self._at, piece.data)
                self._end(name, spec, WrittenTensor(piece.size, False, xxhash.xxh3_128_digest(piece.data)))
                return
            self._now = name, self._begin(name, spec)
        tensor = self._now[1]
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
        self._require_open(name)
        spec = self._next(name)
        header = parse_blob_header(blob[:MAX_FIXED_BYTES].tobytes(), blob.size)
        try:
            self._small.flush()
            self._sink.write(self._start + self._at, [blob.data])
        except BaseException as error:
            self._give_up(error)
            raise
        self._end(name, spec, WrittenTensor(header.blob_bytes, True, header.hash))

    def _give_up(self, error: BaseException) -> None:
        """Leave no trace of a file that could not be written."""
        self._failed = error
        self.abort()

    def _require_open(self, name: str) -> None:
        """Refuse a tensor for a file that is complete, or was given up."""
        if self._failed is not None:
            raise writer_errors.given_up(self._sink.name, self._failed) from self._failed
        if self._ended:
            raise writer_errors.too_late(name)

    def _next(self, name: str) -> TensorSpec:
        """What a tensor is, which may begin now."""
        if self._now is not None:
            raise writer_errors.incomplete(*self._now, name)
        spec = self.spec(name)
        if name in self._done:
            raise writer_errors.written_already(name)
        return spec

    def _begin(self, name: str, spec: TensorSpec) -> TensorWriter:
        self._small.flush()
        tensor = TensorWriter(
            spec,
            self._sink,
            self._start + self._at,
            threads=self.threads,
            codec=self.codec,
            may_pack=self.may_pack(name),
            background=self._background,
        )
        if name in self._plans:
            tensor.decide(self._plans[name])
        return tensor

    def _end(self, name: str, spec: TensorSpec, stored: WrittenTensor) -> None:
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

        Once it is complete, or was aborted, this does nothing.

        Raises
        ------
        InvalidArgument
            If a tensor is missing or incomplete.
        InvalidDestination
            If a write has failed.
        """
        if self._failed is not None:
            raise writer_errors.given_up(self._sink.name, self._failed) from self._failed
        if self._ended:
            return
        try:
            self._complete()
        except BaseException:
            self.abort()
            raise
        self._ended = True

    def _complete(self) -> None:
        if self._now is None:
            for name in [name for name, spec in self._specs.items() if not spec.nbytes]:
                if name not in self._done:
                    self.write(name, b"")
        self._small.flush()
        missing = [name for name in self._specs if name not in self._done]
        if missing:
            raise writer_errors.missing_tensors(missing)
        self._sink.write(0, [packed_header(self._written, self._metadata, self._plain, self._start)])
        self._stop()
        self._sink.commit()

    def abort(self) -> None:
        """Leave no trace of the file, unless it is complete."""
        self._ended = True
        try:
            self._stop()
        finally:
            self._sink.abort()

    def _stop(self) -> None:
        if self._background is not None:
            self._background.shutdown()

    def __enter__(self) -> FileWriter:
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
