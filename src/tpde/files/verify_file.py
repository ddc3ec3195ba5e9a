"""One packed file verified: alone, and against its source."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np

from tpde.codec.native import Bytes
from tpde.errors import Corrupt, NotPacked, TpdeError
from tpde.files.checked_reads import is_small, read_small, stream
from tpde.files.inputs import TensorSource, open_source
from tpde.files.problem import Problem
from tpde.files.progress import Progress, no_progress
from tpde.files.reader import PackedFile
from tpde.files.tensor_reader import BlobTensor, check_digest
from tpde.format.container_reader import parse_header
from tpde.io.small_reads import batches


class _Hash(Protocol):
    """A hash that takes bytes one after the other."""

    def update(self, data: bytes | memoryview, /) -> None: ...


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
            for small, names in batches(order, partial(is_small, packed)):
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
    if packed.source_header() != source.container.header:
        yield Corrupt("the source's header differs from the one that unpacking gives")


def _are_intact(
    packed: PackedFile, names: list[str], source: TensorSource | None, whole: _Hash | None
) -> bool:
    """Whether small tensors are intact, and equal to the source's; only then the whole file's hash has them.

    Where one is not, `_verify_tensor` says which.
    """
    try:
        data = read_small(packed, names)
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
    packed: PackedFile, name: str, source: TensorSource | None, threads: int, whole: _Hash | None = None
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
        if isinstance(tensor, BlobTensor) and tensor.blob.header.chunks:
            last = tensor.blob.header.chunks - 1
            found = [e.of_tensor(name) for e in tensor.blob.damaged_chunks(0, last)]
        problems.extend(found or [error])
    return problems
