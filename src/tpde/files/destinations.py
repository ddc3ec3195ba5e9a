"""What may not be a destination, and what may be replaced in one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from pathlib import Path

from tpde.errors import InvalidDestination, InvalidInput, TpdeError
from tpde.files.manifest import read_manifest
from tpde.format.constants import MANIFEST
from tpde.io.temporary import is_temporary


def refuse_nested(source: Path, destination: Path) -> None:
    """Refuse a destination that is the source, lies inside it or a packed model, or around the source."""
    _refuse_same(destination, source, "the source itself, which is")
    inner, outer = _followed(destination), _followed(source)
    # Of a link, both where it leads to and where it lies.
    if any(it.is_relative_to(outer) for it in (inner, _unfollowed(destination))):
        raise InvalidDestination(
            f"`{destination}` lies inside the source `{source}`", hint="choose a destination outside it"
        )
    if outer.is_relative_to(inner):
        raise InvalidDestination(
            f"the source `{source}` lies inside `{destination}`, which would be replaced",
            hint="choose a destination beside it",
        )
    _refuse_linked(destination, source)
    _refuse_temporary(destination, source)
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
    """Refuse a destination that is a source, or has what a link in a source leads to; or a source to go.

    Raises
    ------
    InvalidDestination
        If it does.
    InvalidInput
        If the source has a temporary name beside the destination, where such files are removed.
    """
    one = "the source itself, which is" if len(sources) == 1 else "one of the sources, which are"
    for source in map(Path, sources):
        _refuse_same(destination, source, one)
        _refuse_linked(destination, source)
        _refuse_temporary(destination, source)


def _refuse_same(destination: Path, source: Path, one: str) -> None:
    if source.exists() and destination.exists() and os.path.samefile(source, destination):
        raise InvalidDestination(
            f"`{destination}` is {one} never modified",
            hint=f"choose another destination, such as `{_beside(destination)}`",
            where=str(destination),
        )


def _refuse_linked(destination: Path, source: Path) -> None:
    for link, place in _links(source) if destination.exists() else ():
        if place.is_relative_to(_followed(destination)):
            raise InvalidDestination(
                f"`{link}` in the source leads to `{place}`, which writing `{destination}` would replace",
                hint=f"choose another destination, such as `{_beside(destination)}`",
                where=str(destination),
            )


def _refuse_temporary(destination: Path, source: Path) -> None:
    """Refuse a source that would be removed as what a killed process has left."""
    folder = _followed(destination.parent)
    for path in (_unfollowed(source), _followed(source)):
        for it in (path, *path.parents):
            if it.parent == folder and is_temporary(it.name):
                raise InvalidInput(
                    f"`{it}` has the name of a temporary file of tpde, which writing beside it removes",
                    hint="rename it first",
                    where=str(source),
                )


def _links(folder: Path) -> Iterator[tuple[Path, Path]]:
    """The links in a folder, and where each leads to in the end; none of a file."""
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            if os.path.islink(path := os.path.join(parent, name)):
                yield Path(path), _followed(path)


def _followed(path: str | os.PathLike[str]) -> Path:
    """A path without links. Those that lead in circles stay, of which `Path.resolve` makes an error."""
    return Path(os.path.realpath(path))


def _unfollowed(path: Path) -> Path:
    """A path without links but for its last part, which may be one."""
    return Path(os.path.normpath(_followed(path.parent) / path.name))


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
