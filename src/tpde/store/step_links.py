"""The small file that stands for a step of a store: a link (checkpoint-store.md 5)."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tpde.errors import InvalidInput
from tpde.files.documents import parse_json, read_document
from tpde.io.committed import committed
from tpde.io.sinks import FileSink
from tpde.store.arguments import is_state_id
from tpde.store.chain import MAX_STEP

LINK = "tpde.json"  # in a checkpoint that is a folder
_STEP, _ID = "tpde_step", "tpde_id"
_BEGIN = f'{{"{_STEP}"'.encode()
_MAX_BYTES = 100


class StepLink(NamedTuple):
    """What a link says.

    Attributes
    ----------
    step : int
        The number of a step.
    state_id : str or None
        The id of its state. None: of an early version, which takes any state of that number.
    """

    step: int
    state_id: str | None


def new_link(step: int) -> StepLink:
    """A link to a state that is saved now, which no other has."""
    return StepLink(step, secrets.token_hex(16))


def write_link(path: Path, link: StepLink) -> None:
    """Write a link, which replaces one that is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with committed(FileSink(path, force=True)) as sink:
        sink.write(0, [json.dumps({_STEP: link.step, _ID: link.state_id}).encode() + b"\n"])


def is_link(file: Path) -> bool:
    """Whether a file is a link, if perhaps a damaged one: others may lie beside."""
    if not file.is_file() or file.stat().st_size > _MAX_BYTES:
        return False
    return file.name == LINK or file.read_bytes().startswith(_BEGIN)


def read_link(path: Path) -> StepLink:
    """What a link says.

    Raises
    ------
    InvalidInput
        If it is no link.
    """
    found = parse_json(read_document(path), path)
    step, state_id = (found.get(_STEP), found.get(_ID)) if isinstance(found, dict) else (None, None)
    if type(step) is not int or not 0 <= step <= MAX_STEP or not (state_id is None or is_state_id(state_id)):
        raise InvalidInput(
            f"`{path}` does not name a step", hint="take another checkpoint", where=os.fspath(path)
        )
    return StepLink(step, state_id)


def refuse_overwritten(link: Path, files: Iterable[Path]) -> None:
    """Refuse a link beside files by which its checkpoint was saved again, without the store.

    Parameters
    ----------
    link : Path
        The link.
    files : iterable of Path
        What is written only where there is no store. They need not be there.

    Raises
    ------
    InvalidInput
        If one is newer than the link.
    """
    for file in files:
        with contextlib.suppress(FileNotFoundError):
            if file.stat().st_mtime_ns > link.stat().st_mtime_ns:
                raise InvalidInput(
                    f"`{file}` is newer than `{link.name}` beside it: the checkpoint was saved again, "
                    "without the store",
                    hint=f"remove `{link.name}` to load the files, or `{file.name}` to load what is stored",
                    where=os.fspath(link),
                )
