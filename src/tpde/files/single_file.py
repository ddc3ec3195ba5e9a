"""One file packed, unpacked or verified."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from tpde.codec.native import Bytes
from tpde.codec.selection import MIN_BYTES, CodecName
from tpde.errors import Corrupt, NotPacked, TpdeError
from tpde.files.copying import mode_of
from tpde.files.forward_order import forward_blocks
from tpde.files.inputs import TensorSource, open_source, read_pieces, read_sample
from tpde.files.reader import PackedFile, PackedTensor, Tensor
from tpde.files.writer import PackedWriter, store_order
from tpde.format.constants import ALIGN_BLOB
from tpde.format.container_reader import parse_header
from tpde.io.sinks import FileSink, Sink
from tpde.io.small_reads import batches
from tpde.io.small_writes import Gathered

Progress = Callable[[int], None]
"""Called with a number of source bytes when they are done."""


def no_progress(_: int) -> None:
    """No progress is shown."""


@dataclass(frozen=True)
class Result:
    """What packing or unpacking a file came to.

    Attributes
    ----------
    source, destination : str
        Paths.
    source_bytes, destination_bytes : int
        Their sizes.
    tensors, packed : int
        How many tensors there are, and how many of them are packed.
    """

    source: str
    destination: str
    source_bytes: int
    destination_bytes: int
    tensors: int
    packed: int


def pack_tensors(source: TensorSource, writer: PackedWriter, progress: Progress = no_progress) -> None:
    """Write all tensors of a source.

    Every tensor that may be packed is sampled first, because what stays plain is stored last (format.md 1.6).
    """
    specs, blocks = source.specs, forward_blocks(source.specs)
    in_place, packed = set[str](), set[str]()
    for name in blocks:
        nbytes = specs[name].nbytes
        if nbytes >= MIN_BYTES and writer.plan(name, read_sample(source, name)):
            packed.add(name)
        elif nbytes % ALIGN_BLOB == 0:
            in_place.add(name)
    whole = packed | in_place
    for first, last, names in _blocks(store_order(list(blocks), whole), blocks, packed, whole):
        for small, some in batches(names, lambda name: specs[name].nbytes < MIN_BYTES):
            if small:
                for name, data in zip(some, source.read_small(some), strict=True):
                    if data.nbytes:  # what is empty is left to the writer, whose close puts it last
                        writer.write(name, data)
                progress(sum([specs[name].nbytes for name in some]))
                continue
            for name in some:
                for piece in read_pieces(source, name):
                    writer.write(name, piece)
                    progress(piece.size)
        writer.align_block(first, last)


def _blocks(
    order: list[str], blocks: Mapping[str, str | None], packed: set[str], whole: set[str]
) -> Iterator[tuple[str, str, list[str]]]:
    """Runs of tensors of one block, a packed one last so that it can take the padding.

    What is not of whole units is in runs of its own: no packed one may come behind it.
    """
    for _, run in itertools.groupby(order, lambda name: (name in whole, blocks[name])):
        names = list(run)
        last = next((n for n in reversed(names) if n in packed), None)
        if last is not None:
            names.remove(last)
            names.append(last)
        yield names[0], names[-1], names


def pack_file(
    source: Path,
    destination: Path,
    *,
    threads: int | None,
    codec: CodecName,
    force: bool,
    progress: Progress = no_progress,
) -> Result:
    """Pack one file."""
    opened = open_source(source)
    try:
        return pack_opened(
            opened, source, destination, threads=threads, codec=codec, force=force, progress=progress
        )[0]
    finally:
        opened.close()


def pack_opened(
    opened: TensorSource,
    source: Path,
    destination: Path,
    *,
    threads: int | None,
    codec: CodecName,
    force: bool,
    progress: Progress = no_progress,
) -> tuple[Result, set[str]]:
    """Pack a file that is open, with its permissions; returns the names of the packed tensors, too."""
    with PackedWriter(
        destination,
        opened.specs,
        metadata=opened.container.metadata,
        source_header=opened.container,
        threads=threads,
        codec=codec,
        force=force,
        mode=mode_of(source),
    ) as writer:
        pack_tensors(opened, writer, progress)
    packed = writer.packed_names()
    sizes = source.stat().st_size, destination.stat().st_size
    return Result(str(source), str(destination), *sizes, len(opened.specs), len(packed)), packed


def stream(tensor: Tensor, threads: int, take: Callable[[int, Bytes], None]) -> bytes:
    """Read a tensor piece by piece, handing each with its offset to `take`; returns its XXH3-128.

    The piece is valid only during the call.
    """
    hasher, pieces = xxhash.xxh3_128(), list(tensor.pieces())
    buffer = np.empty(max([end - begin for begin, end in pieces], default=0), np.uint8)
    for begin, end in pieces:
        piece = buffer[: end - begin]
        tensor.read(begin, end, piece, threads)
        hasher.update(piece.data)
        take(begin, piece)
    return hasher.digest()


def check_digest(name: str, digest: bytes | None, found: bytes) -> None:
    """Raise `Corrupt` if a tensor's bytes are not those that were packed."""
    if digest is not None and found != digest:
        raise Corrupt(
            f"tensor `{name}`: the bytes hash to {found.hex()}, {digest.hex()} was packed",
            hint="the file is damaged, fetch it again",
            tensor=name,
            found=found.hex(),
            needed=digest.hex(),
        )


def _is_small(packed: PackedFile, name: str) -> bool:
    """Whether a tensor is one of those that are read many at a time: no writer packs a smaller one."""
    return packed.specs[name].nbytes < MIN_BYTES and packed.is_plain(name)


def _read_small(packed: PackedFile, names: list[str]) -> bytes:
    """The bytes of small tensors, one after the other, which must be those that were packed."""
    pieces = packed.read_plain(names)
    for name, piece in zip(names, pieces, strict=True):
        check_digest(name, packed.digest(name), xxhash.xxh3_128_digest(piece))
    return b"".join(pieces)


def unpack_to(packed: PackedFile, sink: Sink, threads: int, progress: Progress = no_progress) -> int:
    """Write the source file of a packed one; returns its size in bytes."""
    header, out = packed.source_header(), Gathered(sink)
    sink.write(0, [len(header).to_bytes(8, "little") + header])
    at = 8 + len(header)
    source = packed.original or parse_header(header, f"`{packed.source.name}`")
    for small, names in batches(source.entries, partial(_is_small, packed)):
        if small:  # and side by side in the source
            data = _read_small(packed, names)
            out.write(at + source.entries[names[0]].begin, memoryview(data))
            progress(len(data))
            continue
        for name in names:
            tensor, place = packed.tensor(name), at + source.entries[name].begin

            def take(offset: int, piece: Bytes, place: int = place) -> None:
                out.write(place + offset, piece.data)
                progress(piece.size)

            check_digest(name, tensor.digest, stream(tensor, threads, take))
    out.flush()
    return at + source.data_bytes


def unpack_file(
    source: Path, destination: Path, *, threads: int, force: bool, progress: Progress = no_progress
) -> Result:
    """Unpack one file."""
    with PackedFile(source) as packed:
        if not packed.is_packed:
            raise NotPacked(f"`{source}` is not packed", hint="use it as it is", where=str(source))
        sink = FileSink(destination, force=force, mode=mode_of(source))
        try:
            size = unpack_to(packed, sink, threads, progress)
            sink.commit()
        except Corrupt as error:
            sink.abort()
            raise error.prefixed(f"`{source}`", where=str(source)) from None
        except BaseException:
            sink.abort()
            raise
        return Result(
            str(source),
            str(destination),
            packed.source.size,
            size,
            len(packed.specs),
            len(packed.packed_names()),
        )


@dataclass(frozen=True)
class Problem:
    """One thing that `verify` found.

    Attributes
    ----------
    file : str
        Path of the file.
    tensor : str or None
        The tensor, where the damage is in one.
    chunk : int or None
        The chunk, where the damage is in one.
    message : str
        What is wrong.
    """

    file: str
    tensor: str | None
    chunk: int | None
    message: str


def verify_file(
    path: Path,
    against: Path | None,
    threads: int,
    progress: Progress = no_progress,
    sha256: str | None = None,
) -> list[Problem]:
    """Check every chunk and every tensor of a packed file, and compare it with its source.

    With `sha256`, which is that of the file it restores, also the file as a whole.
    """
    problems: list[Problem] = []

    def note(error: TpdeError) -> None:
        tensor, chunk = getattr(error, "tensor", None), getattr(error, "chunk", None)
        problems.append(Problem(str(path), tensor, chunk, str(error)))

    try:
        packed = PackedFile(path)
    except Corrupt as error:
        note(error)
        return problems
    with packed:
        if not packed.is_packed:
            raise NotPacked(f"`{path}` is not packed", hint="pack it with `tpde pack` first", where=str(path))
        source = open_source(against) if against is not None else None
        try:
            if source is not None:
                for difference in _compare_headers(packed, source):
                    note(difference)
            header = packed.source_header()
            whole = hashlib.sha256(len(header).to_bytes(8, "little") + header)
            hasher = whole if sha256 is not None else None
            order = (packed.original or parse_header(header, f"`{path}`")).entries
            for small, names in batches(order, partial(_is_small, packed)):
                if not (small and _are_intact(packed, names, source, hasher)):
                    for name in names:
                        for problem in _verify_tensor(packed, name, source, threads, hasher):
                            note(problem)
                progress(sum([packed.specs[name].nbytes for name in names]))
            if sha256 is not None and not problems and whole.hexdigest() != sha256:
                note(
                    Corrupt(
                        f"it restores a file with SHA-256 {whole.hexdigest()}, the manifest says {sha256}",
                        found=whole.hexdigest(),
                        needed=sha256,
                    )
                )
        finally:
            if source is not None:
                source.close()
    return problems


def _compare_headers(packed: PackedFile, source: TensorSource) -> Iterator[Corrupt]:
    for name in sorted(set(packed.specs).symmetric_difference(source.specs)):
        where = "packed" if name in source.specs else "source"
        yield Corrupt(f"tensor `{name}` is missing from the {where} file", tensor=name)
    if packed.original is not None and packed.source_header() != source.container.header:
        yield Corrupt("the source's header differs from the one that was packed")


def _are_intact(packed: PackedFile, names: list[str], source: TensorSource | None, whole: Any) -> bool:
    """Whether small tensors are intact, and equal to the source's; only then the whole file's hash has them.

    Where one is not, `_verify_tensor` says which.
    """
    try:
        data = _read_small(packed, names)
    except Corrupt:
        return False
    if source is not None:
        # Of lists each spec is first compared by identity, in C.
        if [packed.specs[name] for name in names] != [source.specs.get(name) for name in names]:
            return False
        if data != b"".join(source.read_small(names)):
            return False
    if whole is not None:
        whole.update(data)
    return True


def _verify_tensor(
    packed: PackedFile, name: str, source: TensorSource | None, threads: int, whole: Any = None
) -> list[TpdeError]:
    """Check a tensor, compare it with the source's, and give its bytes to the hash of the whole file."""
    problems: list[TpdeError] = []
    try:
        tensor = packed.tensor(name)
    except TpdeError as error:
        if not isinstance(error, Corrupt):
            error = Corrupt(error.message, tensor=name, hint=error.hint)
        return [error]
    compare = source if source is not None and source.specs.get(name) == tensor.spec else None

    def take(offset: int, piece: Bytes) -> None:
        if whole is not None:
            whole.update(piece.data)
        if compare is None or problems:
            return
        other = np.empty(piece.size, np.uint8)
        compare.read(name, offset, offset + piece.size, other)
        differ = piece != other
        if differ.any():
            at = int(np.argmax(differ))
            problems.append(
                Corrupt(
                    f"tensor `{name}`: byte {offset + at} is {piece[at]:#04x}, but {other[at]:#04x} in the "
                    "source",
                    tensor=name,
                )
            )

    if compare is None and source is not None and name in source.specs:
        problems.append(
            Corrupt(
                f"tensor `{name}` is {tensor.spec.dtype} {list(tensor.spec.shape)}, but "
                f"{source.specs[name].dtype} {list(source.specs[name].shape)} in the source",
                tensor=name,
            )
        )
    try:
        check_digest(name, tensor.digest, stream(tensor, threads, take))
    except Corrupt as error:
        # Name every damaged chunk, not only the first that a thread met.
        found: list[TpdeError] = []
        if isinstance(tensor, PackedTensor) and tensor.blob.header.chunks:
            last = tensor.blob.header.chunks - 1
            found = [e.of_tensor(name) for e in tensor.blob.damaged_chunks(0, last)]
        problems.extend(found or [error])
    return problems
