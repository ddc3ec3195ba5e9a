"""pack, unpack and verify: files, state dicts, model directories and hub ids alike."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tpde.codec.selection import CodecName
from tpde.errors import InvalidArgument, InvalidDestination, InvalidInput
from tpde.files.destinations import refuse_inside_packed, refuse_sources
from tpde.files.file_kinds import PICKLES
from tpde.files.folder_swap import clear
from tpde.files.inputs import resolve
from tpde.files.manifest import is_packed_directory
from tpde.files.pack_directory import pack_directory
from tpde.files.pack_file import pack_file
from tpde.files.problem import Problem
from tpde.files.progress import Progress, check_progress, no_progress
from tpde.files.resaved import is_resaved, unpack_resaved, verify_resaved
from tpde.files.result import Result
from tpde.files.thread_count import check_threads
from tpde.files.unpack_directory import unpack_directory
from tpde.files.unpack_file import unpack_file
from tpde.files.verify_directory import verify_directory
from tpde.files.verify_file import verify_file
from tpde.files.walk import LeftOut, check_patterns, walk
from tpde.files.weight_files import choose
from tpde.io.paths import given_path
from tpde.io.sinks import refuse_file


@dataclass(frozen=True)
class Summary:
    """What `pack` or `unpack` did.

    Attributes
    ----------
    source, destination : str
        Paths.
    source_bytes, destination_bytes : int
        Sizes of the weight files, in bytes.
    tensors, packed : int
        How many tensors there are, and how many of them are packed.
    ratio : float
        Size of the plain weight files over that of the packed ones.
    files : tuple of Result
        The same for each weight file.
    left_out : tuple of LeftOut
        What of a directory was not taken, and why.
    unmatched : tuple of str
        Patterns of `exclude` that left nothing out: of a file, all.
    """

    source: str
    destination: str
    source_bytes: int
    destination_bytes: int
    tensors: int
    packed: int
    ratio: float
    files: tuple[Result, ...]
    left_out: tuple[LeftOut, ...] = ()
    unmatched: tuple[str, ...] = ()


def _summary(
    source: Path,
    destination: Path,
    results: list[Result],
    left_out: tuple[LeftOut, ...] = (),
    unmatched: Sequence[str] = (),
    *,
    packing: bool,
) -> Summary:
    sizes = sum(r.source_bytes for r in results), sum(r.destination_bytes for r in results)
    plain, packed = sizes if packing else reversed(sizes)
    return Summary(
        str(source),
        str(destination),
        *sizes,
        sum(r.tensors for r in results),
        sum(r.packed for r in results),
        plain / packed if packed else 1.0,
        tuple(results),
        left_out,
        tuple(unmatched),
    )


def pack(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str] = "",
    *,
    threads: int | None = None,
    codec: CodecName = "auto",
    force: bool = False,
    exclude: Sequence[str] = (),
    progress: Progress = no_progress,
) -> Summary:
    """Pack a file or a model directory, losslessly.

    Parameters
    ----------
    source : path-like
        A safetensors file, a PyTorch state dict (`.bin`, `.pt`; code in it is never run), a Hugging Face
        model directory, or the id of a model on the hub if `huggingface_hub` is installed.
    destination : path-like
        The packed file or directory. It appears when it is complete, and not before. It must be named.
    threads : int, optional
        By default one for each processor. The packed bytes do not depend on it.
    codec : {"auto", "prefix", "zstd"}
        Which codec to use where a tensor shrinks at all.
    force : bool
        Replace an existing destination; a folder only if it holds no other files than the model's. Links,
        pipes and the hub's `.cache` in it are carried over.
    exclude : sequence of str
        Patterns of the shell for what to leave out of a directory: of names, or, with a slash, of relative
        paths.
    progress : callable
        Called with a number of bytes of the source when they are done.

    Returns
    -------
    Summary

    Raises
    ------
    InvalidInput
        If the source cannot be packed; its subclasses say why.
    DestinationExists, InvalidDestination
        If the destination cannot be used.
    Truncated, Corrupt, UnsupportedDtype, UnsupportedVersion
        If the source is damaged, or newer than this version.

    Notes
    -----
    Memory stays below 512 MiB, whatever the sizes of file and tensors; of 100,000 tensors, the names and the
    like take up to 150 MiB more.

    Examples
    --------
    >>> import tpde
    >>> tpde.pack("model.safetensors", "packed.safetensors").ratio  # doctest: +SKIP
    1.4962
    """
    _require_paths(source, destination)
    patterns = check_patterns(exclude)
    check_progress(progress)
    check_threads(threads)
    path, target = resolve(source), given_path(destination)
    if path.is_dir():
        results, tree = pack_directory(
            path, target, threads=threads, codec=codec, force=force, exclude=patterns, progress=progress
        )
        return _summary(path, target, results, tree.left_out, tree.unmatched, packing=True)
    _prepare(path, destination, force)
    result = pack_file(path, target, threads=threads, codec=codec, force=force, progress=progress)
    return _summary(path, target, [result], unmatched=patterns, packing=True)


def unpack(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    threads: int | None = None,
    force: bool = False,
    progress: Progress = no_progress,
) -> Summary:
    """Restore what was packed, byte for byte.

    Every chunk's checksum and every tensor's hash is checked, and a directory's files by SHA-256.

    Parameters
    ----------
    source : path-like
        A packed file or directory.
    destination : path-like
        Where the original goes. It appears when it is complete, and not before.
    threads : int, optional
        By default one for each processor.
    force : bool
        Replace an existing destination; a folder only if it holds nothing but files of the model.
    progress : callable
        Called with a number of bytes of the original when they are done.

    Returns
    -------
    Summary

    Raises
    ------
    NotPacked, InvalidInput
        If the source is not packed, or is not there.
    Truncated, Corrupt, UnsupportedDtype, UnsupportedVersion
        If it is damaged, or newer than this version.
    DestinationExists, InvalidDestination
        If the destination cannot be used.

    Examples
    --------
    >>> import tpde
    >>> tpde.unpack("packed.safetensors", "model.safetensors")  # doctest: +SKIP
    """
    check_progress(progress)
    path, target = _existing(source), given_path(destination)
    count = check_threads(threads)
    left_out: tuple[LeftOut, ...] = ()
    if not path.is_dir():
        _prepare(path, destination, force)
        results = [unpack_file(path, target, threads=count, force=force, progress=progress)]
    elif is_resaved(path):
        results, left_out = unpack_resaved(path, target, threads=count, force=force, progress=progress)
    else:
        results = unpack_directory(path, target, threads=count, force=force, progress=progress)
    return _summary(path, target, results, left_out, packing=False)


def verify(
    packed: str | os.PathLike[str],
    *,
    against: str | os.PathLike[str] | None = None,
    threads: int | None = None,
    exclude: Sequence[str] = (),
    progress: Progress = no_progress,
) -> list[Problem]:
    """Check a packed file or directory: every chunk, every tensor, and its source if given.

    Parameters
    ----------
    packed : path-like
        A packed file or directory.
    against : path-like, optional
        The source, to compare every byte with. What it has and was not packed is a problem, too, but for the
        hub's `.cache`.
    threads : int, optional
        By default one for each processor.
    exclude : sequence of str
        What was left out of the source when it was packed: as for `pack`.
    progress : callable
        Called with a number of bytes of the original when they are done.

    Returns
    -------
    list of Problem
        What is damaged, by tensor and chunk; empty if nothing is.

    Raises
    ------
    NotPacked, InvalidInput
        If it is not packed, or is not there.
    Truncated, UnsupportedDtype, UnsupportedVersion
        If a file alone is incomplete, or newer than this version; a directory's are problems.
    Truncated, Corrupt, UnsupportedDtype
        If `against` is a file that is damaged, or newer than this version.

    Examples
    --------
    >>> import tpde
    >>> tpde.verify("packed.safetensors")  # doctest: +SKIP
    []
    """
    check_progress(progress)
    path, count, patterns = _existing(packed), check_threads(threads), check_patterns(exclude)
    other = _existing(against) if against is not None else None
    if path.is_dir():
        if other is not None and not other.is_dir():
            raise InvalidInput(f"`{path}` is a directory, `{other}` is a file", hint="compare like with like")
        if is_resaved(path):
            if other is not None:
                raise InvalidInput(
                    f"`{path}` was saved again from packed weights and has no source to be compared with",
                    hint="compare its weight files one by one",
                )
            return verify_resaved(path, count, progress)
        return verify_directory(path, other, count, progress, patterns)
    if other is not None and other.is_dir():
        raise InvalidInput(f"`{path}` is a file, `{other}` is a directory", hint="compare like with like")
    return verify_file(path, other, count, progress)


def _require_paths(source: object, destination: str | os.PathLike[str]) -> None:
    """Refuse what is no path, and say what packs it."""
    if not isinstance(source, (str, os.PathLike)):
        other = "tpde.pack_module(model)" if hasattr(source, "state_dict") else None
        if isinstance(source, Mapping):
            other = "tpde.torch.save_file(tensors, filename)"
        raise InvalidArgument(
            f"`tpde.pack` takes the path of a file or a directory, not a {type(source).__name__}",
            hint="pass a path" if other is None else f"in memory, `{other}` packs it",
            where="source",
        )
    if destination == "":
        raise InvalidArgument(
            f"`tpde.pack` was not told where the packed `{source}` goes",
            hint="pass a second path",
            where="destination",
        )


def _existing(path: str | os.PathLike[str]) -> Path:
    found = given_path(path)
    if not found.exists():
        raise InvalidInput(f"`{found}` does not exist", hint="check the path", where=str(found))
    return found


def _prepare(source: Path, given: str | os.PathLike[str], force: bool) -> None:
    """Refuse a destination for a file, and clear its folder of what killed processes left."""
    destination = Path(given)
    if destination.suffix in PICKLES:
        raise InvalidDestination(
            f"`{destination}` is the name of a PyTorch state dict, and what is written is a safetensors file",
            hint=f"name it `{destination.with_suffix('.safetensors')}`",
            where=str(destination),
        )
    refuse_sources(destination, source)
    refuse_inside_packed(destination)
    refuse_file(given, force)
    clear(destination.parent)


def total_bytes(source: str | os.PathLike[str], exclude: Sequence[str] = ()) -> int:
    """Bytes of the weight files that would be packed, for a progress bar."""
    path = Path(source)
    if path.is_dir():
        return sum((path / name).stat().st_size for name in choose(walk(path, exclude)).files)
    return path.stat().st_size if path.is_file() else 0


__all__ = ["LeftOut", "Problem", "Summary", "is_packed_directory", "pack", "total_bytes", "unpack", "verify"]
