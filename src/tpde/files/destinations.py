"""What may not be a destination, and what may be replaced in one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from pathlib import Path

from tpde.errors import InvalidDestination, TpdeError
from tpde.files.manifest import read_manifest
from tpde.format.constants import MANIFEST


def refuse_nested(source: Path, destination: Path) -> None:
    """Refuse a destination that is the source, lies inside it or a packed model, or around the source."""
    refuse_sources(destination, source)
    inner, outer = destination.resolve(), source.resolve()
    if inner.is_relative_to(outer):
        raise InvalidDestination(
            f"`{destination}` lies inside the source `{source}`", hint="choose a destination outside it"
        )
    if outer.is_relative_to(inner):
        raise InvalidDestination(
            f"the source `{source}` lies inside `{destination}`, which would be replaced",
            hint="choose a destination beside it",
        )
    refuse_inside_packed(destination)


def refuse_inside_packed(destination: Path) -> None:
    """Refuse a destination inside a packed directory, whose manifest says all that is in it.

    What else lies there is neither verified nor unpacked, and keeps `--force` from replacing the folder.

    Raises
    ------
    InvalidDestination
        If it lies there.
    """
    if destination.name in ("", ".."):
        return  # no folder can be made there
    for folder in (parent := destination.parent.resolve(), *parent.parents):
        if os.path.isfile(folder / MANIFEST):  # where `Path.is_file` raises, nothing is found
            raise InvalidDestination(
                f"`{destination}` lies inside the packed model `{folder}`, and would be no part of it",
                hint="choose a destination outside it",
                where=str(destination),
            )


def refuse_sources(destination: Path, *sources: str | os.PathLike[str]) -> None:
    """Refuse a destination that is a source.

    Raises
    ------
    InvalidDestination
        If it is.
    """
    one = "the source itself, which is" if len(sources) == 1 else "one of the sources, which are"
    for source in map(Path, sources):
        if source.exists() and destination.exists() and os.path.samefile(source, destination):
            raise InvalidDestination(
                f"`{destination}` is {one} never modified",
                hint=f"choose another destination, such as `{_beside(destination)}`",
                where=str(destination),
            )


def _beside(path: Path) -> Path:
    """Another name in the same folder."""
    whole = path.resolve()
    name = f"{whole.name}-new" if path.is_dir() else f"{whole.stem}-new{whole.suffix}"
    return path.parent / name if path.name not in ("", "..") else whole.parent / name


def replaceable(destination: Path, names: Collection[str]) -> set[str]:
    """What may be replaced in a destination: files of these names, and those of the model packed there."""
    ours = {*names, MANIFEST}
    with contextlib.suppress(TpdeError):  # without a manifest, or with a damaged one, `names` are all we know
        if os.path.isfile(destination / MANIFEST):
            manifest = read_manifest(destination)
            ours.update(manifest.files, manifest.folders)
    return ours
