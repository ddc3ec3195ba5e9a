"""What is attacked: packing, unpacking, saving, replacing, checkpoints; from small sources to one place."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from support.changes import make_source
from support.contents import fill, spec_of
from support.files import safetensors_bytes

from tpde.files.operations import pack, unpack
from tpde.format.constants import MANIFEST
from tpde.numpy import save_file
from tpde.store.checkpoints import CheckpointStore

Picture = dict[str, tuple[str, int, object]]

SOURCE, PLACE, THERE, OTHER = "source", "place", "there", "other"
SPEC = spec_of("BF16", 3000)
ONE = "model.safetensors"


def _weights() -> dict[str, np.ndarray]:
    return {
        "a": np.frombuffer(fill("normal", spec_of("F32", 2000)), np.float32).copy(),
        "b": np.arange(30, dtype=np.int64),
    }


def make_sources(folder: Path) -> None:
    """Everything that operations start from."""
    make_source(folder / "model")
    (folder / "model" / "sub" / "run.sh").write_text("#!/bin/sh\n")
    (folder / "model" / "sub" / "run.sh").chmod(0o755)
    tensors = {"w": (SPEC, fill("normal", SPEC)), "v": (SPEC, fill("random", SPEC))}
    (folder / ONE).write_bytes(safetensors_bytes(tensors, {"format": "pt"}))
    pack(folder / ONE, folder / "packed.safetensors", threads=1)
    pack(folder / "model", folder / "packed", threads=1)
    shutil.copytree(folder / "packed", folder / "resaved", symlinks=True)
    (folder / "resaved" / MANIFEST).unlink()
    _store(folder / "store")
    (folder / "small").mkdir()
    spec = spec_of("F32", 4)
    (folder / "small" / ONE).write_bytes(safetensors_bytes({"w": (spec, fill("normal", spec))}))


def _nothing(there: Path) -> None:
    pass


def _old_file(there: Path) -> None:
    there.write_bytes(b"an old file, complete")
    there.chmod(0o640)


def _old_link(there: Path) -> None:
    there.with_name("kept").write_text("what the link leads to")
    there.symlink_to("kept")


def _old_folder(there: Path) -> None:
    """An older model, and what is not of it."""
    (there / ".cache" / "deep").mkdir(parents=True)
    (there / "config.json").write_text('{"a": "old"}')
    (there / ".cache" / "deep" / "notes").write_text("notes")
    (there / "sub").mkdir()
    (there / "sub" / "notes.txt").write_text("old notes")
    (there / "sub" / "elsewhere").symlink_to("/nowhere")
    (there / "mine").mkdir()
    (there / "mine" / "link").symlink_to("../config.json")


def picture(path: Path) -> Picture:
    """Everything at a path, by relative names: kind, permissions and content."""
    found: Picture = {}
    pending = [path] if os.path.lexists(path) else []
    while pending:
        it = pending.pop()
        name = it.relative_to(path).as_posix()
        if it.is_symlink():
            found[name] = "link", 0o777, os.readlink(it)
        elif it.is_dir():
            found[name] = "folder", it.stat().st_mode & 0o7777, None
            pending += it.iterdir()
        else:
            found[name] = "file", it.stat().st_mode & 0o7777, it.read_bytes()
    return found


@dataclass(frozen=True)
class Operation:
    """One thing that is done.

    Attributes
    ----------
    act : callable
        Does it, given the folder of the sources and the destination.
    old : callable
        Makes what is there before.
    flags : bool
        Whether there is `renameat2`.
    view : callable
        What is at the destination, as far as it matters: it must be that of before, or of afterwards.
    """

    act: Callable[[Path, Path], object]
    old: Callable[[Path], None] = _nothing
    flags: bool = True
    view: Callable[[Path], Picture] = picture


def _pack(name: str, *, force: bool, threads: int = 1) -> Callable[[Path, Path], object]:
    return lambda source, there: pack(source / name, there, force=force, threads=threads)


def _unpack(name: str, *, force: bool) -> Callable[[Path, Path], object]:
    return lambda source, there: unpack(source / name, there, force=force, threads=1)


def _save(source: Path, there: Path) -> None:
    save_file(_weights(), there, threads=1)


_STEPS = range(5)  # of the store that is there; a keyframe is every third


def _state(step: int) -> dict[str, object]:
    weight = np.frombuffer(fill("normal", spec_of("F32", 500)), np.float32).copy()
    weight[: step * 7] += 0.5
    return {"weight": weight, "step": step}


def _store(there: Path) -> None:
    """A store of a few steps."""
    with CheckpointStore(there, keyframe_every=3, threads=1) as store:
        for step in _STEPS:
            store.save(step, _state(step))


def _old_export(there: Path) -> None:
    """What an export wrote before."""
    there.mkdir()
    (there / "state.json").write_text('{"step": 1, "state": {}}')


def _save_step(*, keep: int | None = None, background: bool = False) -> Callable[[Path, Path], object]:
    def act(source: Path, there: Path) -> None:
        with CheckpointStore(there, keyframe_every=3, keep=keep, threads=1) as store:
            store.save(len(_STEPS), _state(len(_STEPS)), background=background)

    return act


def _prune(source: Path, there: Path) -> None:
    with CheckpointStore(there, keyframe_every=3, threads=1) as store:
        store.prune(3, drop=[3])


def _export(source: Path, there: Path) -> None:
    CheckpointStore(source / "store", threads=1).export(4, there, force=True)


def _steps(*must: int) -> Callable[[Path], Picture]:
    """A view of a store: these steps and the newest, if they load, and all that do not."""

    def view(there: Path) -> Picture:
        store = CheckpointStore(there, threads=1)
        steps, found = store.steps, dict[str, tuple[str, int, object]]()
        for step in steps:
            state, needed = store.load(step), _state(step)
            same = state["step"] == step and state["weight"].tobytes() == needed["weight"].tobytes()  # type: ignore[attr-defined]
            if not same or step in must or step == steps[-1]:
                found[f"step {step}"] = "right" if same else "wrong", 0, None
        if wrong := store.verify():
            found["wrong"] = "problems", 0, [it.message for it in wrong]
        return found

    return view


def _two_renames(operation: Operation) -> Operation:
    return Operation(operation.act, operation.old, flags=False)


_FORCED = Operation(_pack("model", force=True), _old_folder)
OPERATIONS: dict[str, Operation] = {
    "pack-file": Operation(_pack(ONE, force=False)),
    "pack-file-threads": Operation(_pack(ONE, force=False, threads=2)),
    "pack-file-force": Operation(_pack(ONE, force=True), _old_file),
    "pack-file-force-link": Operation(_pack(ONE, force=True), _old_link),
    "pack-file-renames": _two_renames(Operation(_pack(ONE, force=False))),
    "unpack-file": Operation(_unpack("packed.safetensors", force=False)),
    "unpack-file-force": Operation(_unpack("packed.safetensors", force=True), _old_file),
    "save": Operation(_save),
    "save-force": Operation(_save, _old_file),
    "pack-folder": Operation(_pack("model", force=False)),
    "pack-folder-renames": _two_renames(Operation(_pack("model", force=False))),
    "pack-folder-force": _FORCED,
    "pack-folder-force-renames": _two_renames(_FORCED),
    "pack-folder-force-link": Operation(_pack("model", force=True), _old_link),
    "unpack-folder": Operation(_unpack("packed", force=False)),
    "unpack-folder-force": Operation(_unpack("packed", force=True), _old_folder),
    "unpack-folder-force-renames": _two_renames(Operation(_unpack("packed", force=True), _old_folder)),
    "store-save": Operation(_save_step(), _store, view=_steps(*_STEPS)),
    "store-save-first": Operation(_save_step(), view=_steps()),
    "store-save-background": Operation(_save_step(background=True), _store, view=_steps(*_STEPS)),
    "store-save-keep": Operation(_save_step(keep=1), _store, view=_steps()),
    "store-prune": Operation(_prune, _store, view=_steps(1, 2, 4)),
    "store-export": Operation(_export, _old_export),
    "unpack-resaved": Operation(_unpack("resaved", force=True), _old_folder),
}
"""By name. `save_file` replaces a file that is there without being asked."""


def next_run(source: Path, place: Path) -> object:
    """What anybody does there next: it sets right what a killed process left."""
    if (place / OTHER).exists():
        shutil.rmtree(place / OTHER)
    return pack(source / "small", place / OTHER, threads=1)


def make_place(operation: Operation, place: Path) -> None:
    """An empty folder with what is there before."""
    if place.exists():
        shutil.rmtree(place)
    place.mkdir()
    operation.old(place / THERE)


def differences(found: dict[str, tuple[str, int, object]], needed: dict[str, tuple[str, int, object]]) -> str:
    """What is different, in a few words."""
    names = sorted(it for it in {*found, *needed} if found.get(it) != needed.get(it))
    words = []
    for name in names[:6]:
        is_there = [
            ("absent" if it is None else f"{it[0]} {it[1]:o}") for it in (found.get(name), needed.get(name))
        ]
        words.append(f"{name} ({is_there[0]}, needed {is_there[1]})")
    return json.dumps(words)
