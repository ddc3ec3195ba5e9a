"""Model directories packed, unpacked and verified (docs/format.md 8)."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from tpde.codec.plan import CodecName
from tpde.errors import (
    AlreadyPacked,
    Corrupt,
    InvalidDestination,
    InvalidInput,
    NotPacked,
    TpdeError,
    Truncated,
    UnsupportedVersion,
)
from tpde.format.constants import MANIFEST, METHOD, SUFFIX, VERSION
from tpde.format.sink import refuse_existing, unwritable
from tpde.packing.documents import (
    is_inside,
    is_text,
    json_object,
    parse_object,
    read_modules,
)
from tpde.packing.files import (
    Problem,
    Progress,
    Result,
    no_progress,
    pack_file,
    unpack_file,
    verify_file,
)
from tpde.packing.reader import PackedFile
from tpde.packing.shards import ShardIndex, is_index, parse_index, read_index
from tpde.packing.sources import shards


@contextlib.contextmanager
def new_folder(destination: Path, names: Collection[str], force: bool) -> Iterator[Path]:
    """A folder filled under a temporary name beside its place, and renamed at the end.

    Parameters
    ----------
    destination : Path
        Its place.
    names : collection of str
        The relative paths of the files that it will hold.
    force : bool
        Replace what is there, but no folder that holds other files.

    Raises
    ------
    DestinationExists, InvalidDestination
        If something is there that may not be replaced, or the folder cannot be made.
    """
    refuse_existing(destination, force)
    _refuse_loss(destination, names)
    temporary = destination.with_name(f".{destination.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.mkdir()
    except OSError as error:
        raise unwritable(destination, error) from error
    try:
        yield temporary
        refuse_existing(destination, force)
        if os.path.lexists(destination):
            old = temporary.with_name(temporary.name + ".old")
            destination.rename(old)
            try:
                temporary.rename(destination)
            except OSError:
                old.rename(destination)
                raise
            _remove(old)
        else:
            temporary.rename(destination)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError) and error.filename is not None:  # name the place that was asked for
            path = Path(os.fsdecode(error.filename))
            if path.is_relative_to(temporary):
                error.filename = str(destination / path.relative_to(temporary))
        raise


def _refuse_loss(destination: Path, names: Collection[str]) -> None:
    """Refuse to replace a folder that holds files of something else, which would be lost."""
    if not destination.is_dir() or destination.is_symlink():
        return
    ours = {*names, MANIFEST}
    with contextlib.suppress(TpdeError):  # without a manifest, or with a damaged one, `names` are all we know
        ours.update(read_manifest(destination))
    for name in files_below(destination):
        if name not in ours:
            raise InvalidDestination(
                f"`{destination}` holds `{name}`, which is no file of this model and would be lost",
                hint="remove the folder yourself, or choose another destination",
            )


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
    hasher = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            hasher.update(piece)
    return hasher.hexdigest()


def files_below(folder: Path) -> Iterator[str]:
    """Every file below a folder but the hub's cache, relative, in order."""
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        if path.is_file() and relative.parts[0] != ".cache":
            yield relative.as_posix()


def refuse_nested(source: Path, destination: Path) -> None:
    """Refuse a destination inside the source, which would be copied, or around it, which would be removed."""
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


def is_packed_directory(folder: Path) -> bool:
    """Whether a directory was packed by tpde."""
    return (folder / MANIFEST).is_file()


def _packed_index(index: ShardIndex, folder: PurePosixPath, packed: dict[str, set[str]]) -> str:
    """An index with the packed tensors under their names in the packed files, which lie in `folder`."""
    return index.renamed(
        lambda name, file: name + SUFFIX if name in packed.get((folder / file).as_posix(), ()) else name
    )


def _names_packing(name: str, weights: Collection[str]) -> bool:
    """Whether a file is the configuration of a model, which says that its weights are packed.

    That of the directory is, and in a pipeline those beside weights.
    """
    path = PurePosixPath(name)
    if path.name != "config.json":
        return False
    return path.parent == PurePosixPath() or any(PurePosixPath(it).parent == path.parent for it in weights)


def _read_by_others(source: Path) -> list[str]:
    """Folders whose weights neither transformers nor diffusers read: of modules of sentence-transformers."""
    return [
        str(it["path"])
        for it in read_modules(source)
        if it.get("path") and str(it.get("type", "")).rpartition(".")[2] != "Transformer"
    ]


def _packed_config(config: dict[str, Any]) -> str:
    ours: dict[str, Any] = {"quant_method": METHOD, "version": VERSION}
    if "quantization_config" in config:
        ours["source"] = config["quantization_config"]
    config["quantization_config"] = ours
    return json.dumps(config, ensure_ascii=False, indent=2) + "\n"


def pack_directory(
    source: Path,
    destination: Path,
    *,
    threads: int | None,
    codec: CodecName,
    force: bool,
    progress: Progress = no_progress,
) -> list[Result]:
    """Pack a model directory; returns a result for each of its weight files."""
    if is_packed_directory(source):
        raise AlreadyPacked(
            f"`{source}` is packed already", hint="unpack it with `tpde unpack`", where=str(source)
        )
    refuse_nested(source, destination)
    weights = {p.relative_to(source).as_posix() for p in shards(source)}
    weights -= {name for name in weights if any(name.startswith(f"{it}/") for it in _read_by_others(source))}
    results, files = [], dict[str, dict[str, str]]()
    names = list(files_below(source))
    with new_folder(destination, names, force) as folder:
        packed_names: dict[str, set[str]] = {}  # by file: components of a pipeline have tensors of one name
        for name in names:
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            files[name] = {"sha256": sha256(source / name)}
            if name in weights:
                result = pack_file(
                    source / name, target, threads=threads, codec=codec, force=False, progress=progress
                )
                with PackedFile(target) as packed:
                    packed_names[name] = set(packed.packed_names())
                results.append(renamed(result, destination / name))
            else:
                shutil.copyfile(source / name, target)
        for name in files:
            if is_index(name):
                index = read_index(source / name)
                files[name]["original"] = index.text
                changed = _packed_index(index, PurePosixPath(name).parent, packed_names)
            elif _names_packing(name, weights):
                files[name]["original"], value = json_object(source / name)
                changed = _packed_config(value)
            else:
                continue
            (folder / name).write_text(changed, "utf-8", newline="\n")
        manifest = {"version": VERSION, "files": files}
        (folder / MANIFEST).write_text(
            json.dumps(manifest, ensure_ascii=False, indent=2) + "\n", "utf-8", newline="\n"
        )
    return results


def renamed(result: Result, destination: Path) -> Result:
    """A result with another destination."""
    return Result(
        result.source,
        str(destination),
        result.source_bytes,
        result.destination_bytes,
        result.tensors,
        result.packed,
    )


def read_manifest(folder: Path) -> dict[str, dict[str, str]]:
    """The files of a packed directory's source, by their relative paths.

    Raises
    ------
    NotPacked, UnsupportedVersion, Corrupt
        If there is no manifest, or not a valid one.
    """
    path = folder / MANIFEST
    if not path.is_file():  # a pipe would be waited for
        raise NotPacked(
            f"`{folder}` is not a packed model directory, it has no `{MANIFEST}`",
            hint="pack it with `tpde pack` first",
        )
    try:
        manifest = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"`{path}` is not JSON ({error})", hint="fetch it again", where=str(path)) from None
    version = manifest.get("version") if isinstance(manifest, dict) else None
    if version != VERSION:
        raise UnsupportedVersion(
            f"`{path}` has version {version}; this tpde reads version {VERSION}",
            hint="upgrade tpde",
            where=str(path),
            found=version,
            needed=VERSION,
        )
    files = manifest.get("files")
    if not isinstance(files, dict):
        raise Corrupt(f"`{path}` has no `files`", hint="fetch it again", where=str(path))
    for name, info in files.items():
        if not is_inside(name) or any(parent.as_posix() in files for parent in PurePosixPath(name).parents):
            raise Corrupt(
                f"`{path}` names {name[:200]!a}, which is no file of the directory",
                hint="it cannot be trusted",
                where=str(path),
            )
        if not isinstance(info, dict) or "sha256" not in info or not all(map(is_text, info.values())):
            raise Corrupt(f"`{path}`: the entry of `{name}` is damaged", hint="fetch it again")
    return files


def _is_packed(path: Path) -> bool:
    with PackedFile(path) as file:
        return file.is_packed


def unpack_directory(
    source: Path, destination: Path, *, threads: int, force: bool, progress: Progress = no_progress
) -> list[Result]:
    """Restore the directory that was packed; returns a result for each of its weight files."""
    files = read_manifest(source)
    refuse_nested(source, destination)
    results = []
    with new_folder(destination, files, force) as folder:
        for name, info in files.items():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if "original" in info:
                target.write_bytes(info["original"].encode("utf-8"))
            elif not (source / name).is_file():
                raise Truncated(
                    f"`{source}` lacks `{name}`, which its manifest names", hint="fetch it", where=name
                )
            elif name.endswith(".safetensors") and _is_packed(source / name):
                result = unpack_file(source / name, target, threads=threads, force=False, progress=progress)
                results.append(renamed(result, destination / name))
            else:
                shutil.copyfile(source / name, target)
            found = sha256(target)
            if found != info.get("sha256"):
                raise Corrupt(
                    f"`{source / name}` unpacks to a file with SHA-256 {found}, the manifest says "
                    f"{info.get('sha256')}",
                    hint="the directory is damaged, fetch it again",
                    where=str(source / name),
                    found=found,
                    needed=info.get("sha256"),
                )
    return results


def verify_directory(
    folder: Path, against: Path | None, threads: int, progress: Progress = no_progress
) -> list[Problem]:
    """Check every file of a packed directory."""
    problems: list[Problem] = []
    files = read_manifest(folder)
    for name in files:
        path, other = folder / name, against / name if against is not None else None
        if not path.is_file():
            problems.append(Problem(str(path), None, None, f"`{path}` is missing"))
        elif other is not None and not other.is_file():
            problems.append(Problem(str(path), None, None, f"`{other}` is missing from the source"))
        elif name.endswith(".safetensors"):
            try:
                if _is_packed(path):
                    problems += verify_file(path, other, threads, progress)
                else:
                    problems += _differences(folder, files, name, other)
            except TpdeError as error:  # one bad shard must not hide the others'
                problems.append(Problem(str(path), None, None, str(error)))
        else:
            problems += _differences(folder, files, name, other)
    return problems


def _differences(
    folder: Path, files: dict[str, dict[str, str]], name: str, other: Path | None
) -> list[Problem]:
    """Compare a file that packing has copied or changed, and the source's if there is one."""
    wrong = [] if _is_as_packed(folder, files, name) else [folder / name]
    if other is not None and sha256(other) != files[name]["sha256"]:
        wrong.append(other)
    return [Problem(str(it), None, None, f"`{it}` differs from what was packed") for it in wrong]


def _is_as_packed(folder: Path, files: dict[str, dict[str, str]], name: str) -> bool:
    """Whether a file is what was packed, or what packing makes of that: the manifest holds it then."""
    text = files[name].get("original")
    if text is None:
        return sha256(folder / name) == files[name]["sha256"]
    if hashlib.sha256(text.encode("utf-8")).hexdigest() != files[name]["sha256"]:
        return False
    config = PurePosixPath(name).name == "config.json"
    try:
        if config:
            made = _packed_config(parse_object(text, folder / name))
        else:
            index = parse_index(text, folder / name)
    except InvalidInput:  # hashes can be made to fit
        return False
    if not config:
        where, packed = PurePosixPath(name).parent, {}
        try:
            for shard in {(where / file).as_posix() for file in index.names()} & files.keys():
                with PackedFile(folder / shard) as file:
                    packed[shard] = set(file.packed_names())
        except TpdeError:
            return True  # of a shard, which is reported for itself
        made = _packed_index(index, where, packed)
    return (folder / name).read_bytes() == made.encode("utf-8")
