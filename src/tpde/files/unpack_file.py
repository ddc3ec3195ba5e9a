"""One file unpacked."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from tpde.codec.native import Bytes
from tpde.errors import Corrupt, NotPacked
from tpde.files.checked_reads import is_small, read_small, stream
from tpde.files.copying import mode_of
from tpde.files.progress import Progress, no_progress
from tpde.files.reader import PackedFile
from tpde.files.result import Result
from tpde.files.tensor_reader import check_digest
from tpde.format.container_reader import parse_header
from tpde.io.committed import committed
from tpde.io.sinks import ByteSink, FileSink
from tpde.io.small_reads import batches
from tpde.io.small_writes import Gathered


def unpack_file(
    source: Path, destination: Path, *, threads: int, force: bool, progress: Progress = no_progress
) -> Result:
    """Unpack one file."""
    with PackedFile(source) as packed:
        if not packed.is_packed:
            raise NotPacked(f"`{source}` is not packed", hint="use it as it is", where=str(source))
        sink = FileSink(destination, force=force, mode=mode_of(source))
        try:
            with committed(sink):
                size = unpack_to(packed, sink, threads, progress)
        except Corrupt as error:
            raise error.prefixed(f"`{source}`", where=str(source)) from None
        return Result(
            str(source),
            str(destination),
            packed.source.size,
            size,
            len(packed.specs),
            len(packed.packed_names()),
        )


def unpack_to(packed: PackedFile, sink: ByteSink, threads: int, progress: Progress = no_progress) -> int:
    """Write the source file of a packed one; returns its size in bytes."""
    header, out = packed.source_header(), Gathered(sink)
    sink.write(0, [len(header).to_bytes(8, "little") + header])
    at = 8 + len(header)
    source = packed.original or parse_header(header, f"`{packed.source.name}`")
    for small, names in batches(source.entries, partial(is_small, packed)):
        if small:  # and side by side in the source
            data = read_small(packed, names)
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
