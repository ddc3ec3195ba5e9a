"""Where operations are attacked: their sources, what each of them makes, and what may be there afterwards."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tpde.files.operations import verify
from tpde.format.constants import MANIFEST

from .operations import (
    OPERATIONS,
    OTHER,
    PLACE,
    SOURCE,
    THERE,
    Picture,
    differences,
    make_place,
    make_sources,
    picture,
)
from .server import NEXT_RUN, Outcome, Server
from .shim import Arming

TEMPORARY = ".tpde-tmp"


@dataclass(frozen=True)
class Finding:
    """What should not have happened.

    Attributes
    ----------
    case : str
        What was tried: `--case` tries it again.
    text : str
        What came of it.
    """

    case: str
    text: str


@dataclass(frozen=True)
class Known:
    """An operation that nothing attacks: what was there, what is then, its time, and its calls."""

    old: Picture
    new: Picture
    seconds: float
    calls: list[str]
    changes: list[str]


class Field:
    """A folder with the sources, and a server that acts in it.

    Parameters
    ----------
    root : Path
        An empty folder.
    server : Server
        Who acts.
    """

    def __init__(self, root: Path, server: Server) -> None:
        self.root, self.server = root, server
        self.log = root.with_name(f"{root.name}.log")
        (root / SOURCE).mkdir(parents=True)
        make_sources(root / SOURCE)
        self._sources = picture(root / SOURCE)
        self._known: dict[str, Known] = {}

    @property
    def there(self) -> Path:
        """The destination."""
        return self.root / PLACE / THERE

    def prepare(self, name: str) -> None:
        """An empty place with what is there before, and no log."""
        make_place(OPERATIONS[name], self.root / PLACE)
        for it in (self.log, Path(f"{self.log}.data")):
            it.unlink(missing_ok=True)

    def run(self, name: str, arming: Arming, *, log: bool = False, moment: float | None = None) -> Outcome:
        """Act in the place as it is; killed after `moment` seconds."""
        return self.server.run(name, self.root, arming, self.log if log else None, moment)

    def known(self, name: str) -> Known:
        """What an operation makes when nothing attacks it."""
        if name not in self._known:
            flags, counted = OPERATIONS[name].flags, []
            for changes in (False, True):
                self.prepare(name)
                old, began = self.view(name), time.perf_counter()
                outcome = self.run(name, Arming(changes=changes, flags=flags), log=True)
                seconds = time.perf_counter() - began
                assert outcome.how == "done", outcome.text
                assert self.left() == [], self.left()
                assert not name.startswith("pack") or not verify(self.there, threads=1)
                lines = self.log.read_bytes().split(b"\n")
                counted.append([it[2:].decode() for it in lines if it.startswith(b"#\t")])
            self._known[name] = Known(old, self.view(name), seconds, *counted)
        return self._known[name]

    def view(self, name: str) -> Picture:
        """What is at the destination, as far as it matters to an operation."""
        return OPERATIONS[name].view(self.there)

    def left(self) -> list[str]:
        """Temporary files and folders in the place."""
        return sorted(it for it in os.listdir(self.root / PLACE) if it.endswith(TEMPORARY))

    def state(self, name: str) -> str:
        """`old`, `new`, or what is wrong with what is there."""
        known, found = self.known(name), self.view(name)
        if found == known.new:
            return "new"
        if found == known.old:
            return "old"
        return f"neither old nor new: {differences(found, known.new)}"

    def _says_so(self, name: str, outcome: Outcome) -> bool:
        """Whether what is missing of the new is what could not be read, as it says."""
        new, found = self.known(name).new, self.view(name)
        missing = [it for it in new if found.get(it) != new[it] and it != MANIFEST and new[it][0] != "link"]
        return bool(outcome.left_out) and all(
            any(it == left or it.startswith(f"{left}/") for left in outcome.left_out) for it in missing
        )

    def problems(
        self,
        name: str,
        outcome: Outcome,
        *,
        failing: str = "",
        lasting: bool = False,
        may_leave: bool = False,
    ) -> Iterator[str]:
        """What is wrong after an operation.

        Parameters
        ----------
        name : str
            The operation.
        outcome : Outcome
            How it ended.
        failing : str
            The name of the error of a call.
        lasting : bool
            Whether something went on failing, so that little could be done about it.
        may_leave : bool
            Whether temporary files may be left, which the next run then removes.
        """
        killed, flags = outcome.how == "killed", OPERATIONS[name].flags
        if outcome.how == "crash" or not outcome.expected:
            yield outcome.text
        state = self.state(name)
        between = (killed or lasting) and not flags and not picture(self.there)  # of two renames
        said = failing == "EACCES" and self._says_so(
            name, outcome
        )  # other errors are no reason to leave it out
        if state not in ("old", "new") and not between and not said:
            yield state
        if outcome.how == "done" and state == "old" and self.known(name).old != self.known(name).new:
            yield "it says that it is done, and nothing is"
        if (left := self.left()) and not (killed or lasting or may_leave):
            yield f"it leaves {', '.join(left)}"
        strange = set(os.listdir(self.root / PLACE)) - {THERE, "kept", *left}
        if failing:  # what could not be carried over is kept beside it, and said
            strange = {it for it in strange if not it.startswith(f"{THERE}.replaced-")}
        if strange:
            yield f"it makes {', '.join(strange)}"
        if killed or left:
            yield from self._after_next_run(name, state)
        if (found := picture(self.root / SOURCE)) != self._sources:
            shutil.rmtree(self.root / SOURCE)
            (self.root / SOURCE).mkdir()
            make_sources(self.root / SOURCE)
            yield f"the source changed: {differences(found, self._sources)}"

    def _after_next_run(self, name: str, before: str) -> Iterator[str]:
        outcome = self.run(NEXT_RUN, Arming())
        if outcome.how != "done":
            yield f"the next run fails: {outcome.text}"
        state = self.state(name)
        if state not in ("old", "new"):
            yield f"after the next run: {state}"
        elif before in ("old", "new") and state != before:
            yield f"the next run makes {state} of {before}"
        if left := self.left():
            yield f"the next run leaves {', '.join(left)}"
        if not (self.root / PLACE / OTHER).is_dir():
            yield "the next run made nothing"
