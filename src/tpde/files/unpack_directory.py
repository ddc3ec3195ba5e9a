"""A packed directory restored (docs/format.md 8)."""

from __future__ import annotations

import os
from pathlib import Path

from tpde.errors import Corrupt, NotPacked, NotSafetensors, Truncated
from tpde.files.copying import copy_file, finish_folders, mode_of, sha256, stands_for_link, write_text
from tpde.files.destinations import refuse_nested, replaceable
from tpde.files.file_kinds import SAFETENSORS
from tpde.files.folder_swap import new_folder
from tpde.files.manifest import read_manifest, require_packed
from tpde.files.progress import Progress, no_progress
from tpde.files.result import Result
from tpde.files.unpack_file import unpack_file
from tpde.files.walk import walk


def unpack_directory(
    source: Path, destination: Path, *, threads: int, force: bool, progress: Progress = no_progress
) -> list[Result]:
    """Restore the directory that was packed; returns a result for each of its weight files."""
    require_packed(source)
    manifest = read_manifest(source)
    refuse_nested(source, destination)
    names = {*manifest.files, *manifest.folders}
    results = []
    with new_folder(destination, replaceable(destination, names), force=force) as folder:
        for name, info in manifest.files.items():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if "link" in info:
                if os.path.lexists(source / name) and not stands_for_link(source / name, info["link"]):
                    raise Corrupt(
                        f"`{source / name}` is not the link that was packed, nor a copy of what it leads to",
                        hint="the directory is damaged, fetch it again",
                        where=str(source / name),
                    )
                continue
            if not (source / name).is_file():
                raise Truncated(
                    f"`{source}` lacks `{name}`, which its manifest names", hint="fetch it", where=name
                )
            manifest.refuse_link(source, name)
            if "original" in info:
                found = write_text(target, info["original"], mode_of(source / name))
            else:
                result = _restore(source / name, target, threads, progress)
                results += [] if result is None else [result.at(destination / name)]
                found = sha256(target) if result is not None else copy_file(source / name, target)
            if found != info["sha256"]:
                raise Corrupt(
                    f"`{source / name}` unpacks to a file with SHA-256 {found}, the manifest says "
                    f"{info['sha256']}",
                    hint="the directory is damaged, fetch it again",
                    where=str(source / name),
                    found=found,
                    needed=info["sha256"],
                )
        for name in manifest.folders:
            (folder / name).mkdir(parents=True, exist_ok=True)
        for name, link in manifest.links().items():  # last: nothing is written through one
            (folder / name).symlink_to(link)
        finish_folders(source, folder, walk(folder).folders)
    return results


def _restore(path: Path, target: Path, threads: int, progress: Progress) -> Result | None:
    """Unpack a weight file; None if it is no packed one, which is as it was."""
    if not path.name.endswith(SAFETENSORS):
        return None
    try:
        return unpack_file(path, target, threads=threads, force=False, progress=progress)
    except (NotPacked, NotSafetensors):
        return None
