"""What a mutant is, and how it is put into a file."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Stale(Exception):
    """The list names something that the tree does not have any more."""


class Mutant(NamedTuple):
    """One fault.

    Attributes
    ----------
    name : str
        Of this one alone.
    file : str
        Which it is in: below `csrc` or `src/tpde`.
    old, new : str
        What takes the place of what; the old text occurs once in the file.
    breaks : str
        What is wrong then.
    tests : tuple of str
        Below `tests`: files, or `file::test`, that should fail.
    """

    name: str
    file: str
    old: str
    new: str
    breaks: str
    tests: tuple[str, ...]

    @property
    def in_core(self) -> bool:
        """Whether it is in C, which has to be compiled."""
        return self.file.startswith("csrc/")

    @property
    def path(self) -> str:
        """Of its file, from the repository's root."""
        return self.file if self.in_core else f"src/tpde/{self.file}"

    def changed(self, root: Path) -> str:
        """The file's text with the fault in it.

        Raises
        ------
        Stale
            If the old text is not there exactly once.
        """
        text = (root / self.path).read_text(encoding="utf-8")
        count = text.count(self.old)
        if count != 1:
            raise Stale(f"`{self.name}`: its old text occurs {count} times in {self.path}, not once")
        return text.replace(self.old, self.new)

    def require_tests(self, root: Path) -> None:
        """Refuse names of tests that are not there.

        Raises
        ------
        Stale
            Naming the test.
        """
        for test in self.tests:
            file, _, function = test.partition("::")
            path = root / "tests" / file
            if not path.is_file() or (function and f"def {function}(" not in path.read_text("utf-8")):
                raise Stale(f"`{self.name}`: there is no `{test}` below tests")


def mutant(name: str, file: str, old: str, new: str, breaks: str, *tests: str) -> Mutant:
    """Name a fault, and the tests that should fail."""
    return Mutant(name, file, old, new, breaks, tests)
