"""One file packed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tpde.codec.selection import MIN_BYTES, CodecName
from tpde.files.copying import Unchanged, mode_of
from tpde.files.file_writer import FileWriter
from tpde.files.forward_order import forward_blocks
from tpde.files.inputs import TensorSource, open_source, read_pieces, read_sample
from tpde.files.progress import Progress, no_progress
from tpde.files.result import Result
from tpde.format.constants import ALIGN_BLOB
from tpde.io.small_reads import batches


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
    unchanged = Unchanged(source)
    opened = open_source(source)
    try:
        return pack_opened(
            opened,
            source,
            destination,
            threads=threads,
            codec=codec,
            force=force,
            progress=progress,
            check=unchanged.require_in_place,
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
    check: Callable[[], None],
) -> tuple[Result, set[str]]:
    """Pack a file that is open, with its permissions; returns the names of the packed tensors, too.

    `check` is called when all is read: where it raises, no file appears.
    """
    with FileWriter(
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
        check()
    packed = writer.packed_names()
    sizes = opened.size, destination.stat().st_size  # the source may be gone by now
    return Result(str(source), str(destination), *sizes, len(opened.specs), len(packed)), packed


def pack_tensors(source: TensorSource, writer: FileWriter, progress: Progress = no_progress) -> None:
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
    for first, last, names in _blocks(_store_order(list(blocks), whole), blocks, packed, whole):
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


def _store_order(names: list[str], in_place: set[str]) -> list[str]:
    """Within each block of forward-ordered names: what is stored in place, the rest last of all (1.6)."""
    return [n for n in names if n in in_place] + [n for n in names if n not in in_place]


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
