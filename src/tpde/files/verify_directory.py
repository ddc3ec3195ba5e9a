"""A packed directory compared with its manifest, and with its source."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from tpde.errors import InvalidInput, NotSafetensors, TpdeError, printable
from tpde.files.changed_texts import packed_config, packed_index, through_links
from tpde.files.copying import sha256, stands_for_link
from tpde.files.documents import parse_object
from tpde.files.file_kinds import SAFETENSORS, is_config
from tpde.files.manifest import Manifest, read_manifest, require_packed
from tpde.files.packed_state import is_packed, packed_names
from tpde.files.problem import Problem
from tpde.files.progress import Progress, no_progress
from tpde.files.shards import parse_index, read_index
from tpde.files.verify_file import verify_file
from tpde.files.walk import walk
from tpde.files.weight_files import as_safetensors
from tpde.format.constants import MANIFEST


def verify_directory(
    folder: Path,
    against: Path | None,
    threads: int,
    progress: Progress = no_progress,
    exclude: Sequence[str] = (),
) -> list[Problem]:
    """Check everything in a packed directory: unpacking gives what the manifest says, and the source has.

    Where another takes its place meanwhile, what was read is of both, and that one is checked.
    """
    while True:
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)  # or another folder may get its inode
        try:
            problems = _all_problems(folder, against, threads, progress, exclude)
            if not problems or not _is_replaced(folder, held):
                return problems
        finally:
            os.close(held)


def _is_replaced(folder: Path, held: int) -> bool:
    try:
        return not os.path.samestat(os.fstat(held), folder.stat())
    except OSError:  # it is gone
        return False


def _all_problems(
    folder: Path, against: Path | None, threads: int, progress: Progress, exclude: Sequence[str]
) -> list[Problem]:
    require_packed(folder)
    manifest = read_manifest(folder)
    problems: list[Problem] = []
    for name in manifest.files:
        try:
            problems += _verify(folder, manifest, name, threads, against, progress)
        except TpdeError as error:  # one bad shard must not hide the others'
            problems.append(Problem(str(folder / name), None, None, str(error)))
        except OSError as error:
            problems.append(_problem(folder / name, f"`{folder / name}`: {error.strerror or error}"))
    for name in manifest.folders:
        problems += [
            _problem(root / name, f"the folder `{root / name}` is missing")
            for root in (folder, *([against] if against is not None else []))
            if not (root / name).is_dir()
        ]
    if against is not None:
        problems += _left_out(manifest, against, exclude)
    return problems


def _problem(path: Path, message: str) -> Problem:
    return Problem(str(path), None, None, message)


def _verify(
    folder: Path,
    manifest: Manifest,
    name: str,
    threads: int,
    against: Path | None,
    progress: Progress,
) -> list[Problem]:
    path, info = folder / name, manifest.files[name]
    other = against / info.get("from", name) if against is not None else None
    if "link" in info:
        return [
            _problem(it, f"`{it}` is not the link that was packed")
            for it in (path, other)
            if it is not None and not _is_link(it, info["link"], strict=it == other)
        ]
    if not path.is_file():
        return [_problem(path, f"`{path}` is missing, or is no file")]
    manifest.refuse_link(folder, name)
    if other is not None and not other.is_file():
        return [_problem(path, f"`{other}` is missing from the source, or is no file")]
    found = []
    if name.endswith(SAFETENSORS) and _may_be_packed(path):
        found += verify_file(path, other, threads, progress, info["sha256"])
    else:
        if not _is_as_packed(folder, manifest, name):
            found.append(_problem(path, f"`{path}` differs from what was packed"))
        if other is not None and _source_sha256(other, info) != info["sha256"]:
            found.append(_problem(other, f"`{other}` differs from what was packed"))
    if other is not None and (path.stat().st_mode ^ other.stat().st_mode) & stat.S_IXUSR:
        found.append(_problem(path, f"only one of `{path}` and `{other}` may be executed"))
    return found


def _may_be_packed(path: Path) -> bool:
    """Whether a file is packed; one that is no safetensors file at all may have been copied."""
    try:
        return is_packed(path)
    except NotSafetensors:
        return False


def _is_link(path: Path, target: str, *, strict: bool) -> bool:
    """Whether a path is a link that says this; if that is not strict, a copy of what it leads to will do."""
    return stands_for_link(path, target) and (path.is_symlink() or not strict)


def _source_sha256(path: Path, info: Mapping[str, str]) -> str:
    """SHA-256 of what a file of the source restores to: of an index of pickles, that of safetensors."""
    if "from" not in info or not path.name.endswith(".json"):
        return sha256(path)
    return hashlib.sha256(as_safetensors(read_index(path)).text.encode()).hexdigest()


def _is_as_packed(folder: Path, manifest: Manifest, name: str) -> bool:
    """Whether a file is what was packed, or what packing makes of that: the manifest holds it then."""
    info, path = manifest.files[name], folder / name
    text = info.get("original")
    if text is None:
        return sha256(path) == info["sha256"]
    if hashlib.sha256(text.encode("utf-8")).hexdigest() != info["sha256"]:
        return False
    config = is_config(name)
    try:
        made = (
            packed_config(parse_object(text, path)) if config else _made_index(folder, manifest, name, text)
        )
    except InvalidInput:  # hashes can be made to fit
        return False
    return made is None or path.read_bytes() == made.encode("utf-8")


def _made_index(folder: Path, manifest: Manifest, name: str, text: str) -> str | None:
    """The index that packing makes; None if a shard is damaged or missing, which is reported for itself."""
    index, where = parse_index(text, folder / name), PurePosixPath(name).parent
    packed = {}
    try:
        for it, info in manifest.files.items():
            if it.endswith(SAFETENSORS) and "link" not in info:
                packed[it] = set(packed_names(folder / it))
    except TpdeError:
        return None
    return packed_index(index, where, through_links(packed, manifest.links()))


def _left_out(manifest: Manifest, against: Path, exclude: Sequence[str]) -> list[Problem]:
    """What the source has, and was not packed."""
    tree = walk(against, exclude)
    known = {*manifest.files, *manifest.folders, *(it.get("from", "") for it in manifest.files.values())}
    parents = {str(parent) for name in known for parent in PurePosixPath(name).parents}
    known.add(MANIFEST)  # of what was there before the source was saved again
    extra = [it for it in (*tree.files, *tree.links, *tree.folders) if it not in known and it not in parents]
    unexpected = [(it.name, it.reason) for it in tree.left_out if not it.expected]
    # A folder stands for all that it holds: the wrong source may have a hundred thousand files.
    folders = set(tree.folders).intersection(extra)
    tops = [it for it in extra if not folders.intersection(map(str, PurePosixPath(it).parents))]
    reasons = [(printable(it), "it is not in the packed directory") for it in tops]
    return [
        Problem(str(against / name), None, None, f"`{against / name}` was not packed: {why}")
        for name, why in sorted(reasons + unexpected)
    ]
