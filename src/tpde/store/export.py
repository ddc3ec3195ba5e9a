"""A state of training as files that other tools read (docs/reference/checkpoint-store.md 3)."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from tpde.errors import Corrupt, InvalidDestination, InvalidInput
from tpde.files.copying import write_file
from tpde.files.documents import is_inside, json_object
from tpde.files.file_kinds import SAFETENSORS
from tpde.files.folder_swap import new_folder
from tpde.format.container import TensorSpec
from tpde.format.container_writer import canonical_header
from tpde.store.states import State
from tpde.store.tree_text import damaged, is_mapping, map_tensors, one_of
from tpde.store.written_weights import write_weights

REST = "state.json"


def export_state(step: int, tree: Any, state: State, folder: Path, force: bool, threads: int) -> None:
    """Write a state into a new folder.

    Parameters
    ----------
    step : int
        Which it is.
    tree : object
        Its tree, as parsed.
    state : State
        Its tensors.
    folder : Path
        Where it goes.
    force : bool
        Replace what an export wrote.
    threads : int
        How many threads decode.

    Raises
    ------
    Corrupt
        If the tree is damaged, or names a tensor that is not there.
    DestinationExists, InvalidDestination
        If the folder cannot be made, or one is there that no export wrote.
    """
    files: dict[str, dict[str, str]] = {}  # of each file, which tensor has which name there
    stems: dict[str, str] = {}  # of each key of the state, what its file is called
    parts = is_mapping(tree)

    def place(path: tuple[str, ...], tensor: str) -> list[str]:
        stem = "state"
        if parts:
            stem, path = stems.setdefault(path[0], _stem(path[0], stems)), path[1:]
        names = files.setdefault(f"{stem}{SAFETENSORS}", {})
        name = "/".join(path) or "tensor"
        others = (f"{name}'{number}" for number in itertools.count(len(names)))
        free = next(it for it in itertools.chain([name], others) if it not in {"__metadata__", *names})
        names[free] = tensor
        return [f"{stem}{SAFETENSORS}", free]

    rest = map_tensors(tree, place, one_of({key[1] for key in state.specs}), state.name)
    with new_folder(folder, _written_before(folder, {*files, REST}), force=force) as new:
        for file, names in files.items():
            _write(new / file, names, state, threads)
        text = json.dumps({"step": step, "state": rest}, ensure_ascii=False)
        write_file(new / REST, f"{text}\n".encode())


def _written_before(folder: Path, ours: Collection[str]) -> set[str]:
    """The files that an export wrote into a folder. None of one behind a link, which is replaced itself.

    Raises
    ------
    InvalidDestination
        If it has files of our names, and no export wrote them.
    """
    if folder.is_symlink():
        return set()
    try:
        return _files_of(folder / REST)
    except (InvalidInput, Corrupt):
        here = next((name for name in sorted(ours) if os.path.lexists(folder / name)), None)
    if here is None:
        return set()
    raise InvalidDestination(
        f"`{folder}` holds `{here}`, which would be lost, and no `{REST}` of an export",
        hint="remove the folder yourself, or choose another destination",
        where=str(folder),
    )


def _files_of(rest: Path) -> set[str]:
    """The files of an export, which its `state.json` names, and this one.

    Raises
    ------
    InvalidInput, Corrupt
        If it is not of an export.
    """
    found, names = json_object(rest)[1], {REST}
    if set(found) != {"step", "state"}:
        raise damaged(str(rest), ValueError("it has no step, or no state"))
    map_tensors(found["state"], lambda path, place: names.add(place[0]), _is_place, str(rest))
    return names


def _is_place(value: Any) -> bool:
    """Whether a value is a file and a name in it, as an export names them."""
    if not isinstance(value, list) or len(value) != 2 or not all(isinstance(it, str) for it in value):
        return False
    return "/" not in value[0] and value[0].endswith(SAFETENSORS) and is_inside(value[0])


def _stem(key: str, stems: Mapping[str, str]) -> str:
    """What the file of a key is called: the key, where that can be a file's name."""
    fits = "/" not in key and is_inside(f"{key}{SAFETENSORS}", everywhere=True) and not key.startswith(".")
    free = (f"part-{number}" for number in itertools.count())
    return next(it for it in itertools.chain([key] * fits, free) if it not in stems.values())


def _write(path: Path, names: Mapping[str, str], state: State, threads: int) -> None:
    specs: dict[str, TensorSpec] = {name: state.specs["", tensor] for name, tensor in names.items()}
    header = canonical_header(specs, {"format": "pt"})
    write_weights(path, header, lambda name: state.read(("", names[name]), threads), str(path))
