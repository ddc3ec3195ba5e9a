"""Single random changes to the files of a directory, and what must come of them."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.contents import fill, spec_of
from support.files import safetensors_bytes
from tpde.errors import TpdeError
from tpde.files.operations import pack, unpack, verify
from tpde.format.constants import MANIFEST


def make_source(folder: Path) -> Path:
    """A model directory with something of everything that is packed, changed or copied."""
    (folder / "sub" / "empty").mkdir(parents=True)
    weight_map = {}
    for i, (content, dtype) in enumerate((("normal", "BF16"), ("random", "F16"))):
        name, spec = f"model-{i + 1:05}-of-00002.safetensors", spec_of(dtype, 700)
        tensors = {f"{i}.a": (spec, fill(content, spec)), f"{i}.b": (spec, fill("constant", spec))}
        (folder / name).write_bytes(safetensors_bytes(tensors, {"format": "pt"}))
        weight_map |= dict.fromkeys(tensors, name)
    index = {"metadata": {"total_size": 5600}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text('{"model_type": "llama", "é": 1.0e5}')
    (folder / "sub" / "notes.txt").write_text("notes and more notes")
    (folder / "sub" / "none").touch()
    (folder / "link").symlink_to("sub/notes.txt")
    return folder


def content(folder: Path) -> dict[str, Any]:
    """Everything in a folder."""
    found: dict[str, Any] = {}
    for it in folder.rglob("*"):
        name = it.relative_to(folder).as_posix()
        if it.is_symlink():
            found[name] = os.readlink(it)
        else:
            found[name] = it.read_bytes() if it.is_file() else None
    return found


def change_bytes(data: bytes, draw: random.Random) -> bytes:
    """One change to some bytes: of a bit, a byte, a run; inserted, removed, doubled or exchanged."""
    at = draw.randrange(len(data) + 1)
    end = min(len(data), at + draw.choice((1, 1, 1, 2, 4, 16, 64, 1000)))
    some = draw.randbytes(max(1, end - at))
    changes: list[Callable[[], bytes]] = [
        lambda: data[:at] + bytes(b ^ 1 << draw.randrange(8) for b in data[at : at + 1]) + data[at + 1 :],
        lambda: data[:at] + some + data[end:],
        lambda: data[:at] + bytes(end - at) + data[end:],
        lambda: data[:at] + some + data[at:],
        lambda: data[:at] + data[end:],
        lambda: data[:end] + data[at:],
        lambda: data[:at],
        lambda: data[end : 2 * end - at] + data[at:end] + data[2 * end - at :],
    ]
    return draw.choice(changes)()


def change_value(value: Any, draw: random.Random) -> Any:
    """One change to a value of JSON, at any depth."""
    if isinstance(value, dict) and value and draw.random() < 0.8:
        key = draw.choice(sorted(value))
        other = draw.choice(sorted(value))
        what = draw.randrange(8)
        if what == 0:
            return {k: v for k, v in value.items() if k != key}
        if what == 1:
            return {key + "x" if k == key else k: v for k, v in value.items()}
        if what == 2:
            return value | {key: value[other]}
        if what == 3:
            return value | {key: value[other], other: value[key]}
        return value | {key: change_value(value[key], draw)}
    if isinstance(value, str) and value:
        at = draw.randrange(len(value))
        return value[:at] + draw.choice('0a\n\\:/."{') + value[at + 1 :]
    return draw.choice((0, 1, 1.0, True, None, "", [], {}, "sub", ["sub"], {"link": "x"}, -1))


def change(packed: Path, draw: random.Random) -> str:
    """Change one file of a directory; returns which, and how."""
    files = sorted(it for it in packed.rglob("*") if it.is_file() and not it.is_symlink())
    path = draw.choice(files)
    name = path.relative_to(packed).as_posix()
    if path.suffix == ".json" and draw.random() < 0.5:
        with contextlib.suppress(ValueError):  # it was changed before, and is no JSON
            path.write_text(json.dumps(change_value(json.loads(path.read_text()), draw)))
            return f"{name}: a value of JSON"
    if draw.random() < 0.05:
        path.unlink()
        return f"{name}: removed"
    if draw.random() < 0.05:
        path.write_bytes(draw.choice(files).read_bytes())
        return f"{name}: another file"
    path.write_bytes(change_bytes(path.read_bytes(), draw))
    return f"{name}: bytes"


def is_found(packed: Path) -> bool:
    """Whether verify finds something wrong; no other exception than ours may come of it."""
    try:
        return bool(verify(packed, threads=1))
    except TpdeError:
        return True


def campaign(folder: Path, seed: int, count: int) -> dict[str, int]:
    """Change a packed directory again and again, one change at a time.

    Returns how many changes were found, and how many made no difference.

    Raises
    ------
    AssertionError
        If one was neither found, nor is what is unpacked what was packed; names it.
    """
    source = make_source(folder / "source")
    pack(source, folder / "packed", threads=1)
    expected, draw = content(source), random.Random(seed)
    assert not is_found(folder / "packed")
    tally = {"found": 0, "harmless": 0}
    for number in range(count):
        changed, back = folder / "changed", folder / "back"
        shutil.copytree(folder / "packed", changed, symlinks=True)
        what = change(changed, draw)
        if is_found(changed):
            tally["found"] += 1
        else:
            tally["harmless"] += 1
            unpack(changed, back, threads=1)
            assert content(back) == expected, f"seed {seed}, change {number}: {what}"
            shutil.rmtree(back)
        shutil.rmtree(changed)
    assert (folder / "packed" / MANIFEST).is_file()
    return tally
