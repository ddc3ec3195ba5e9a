"""What vLLM logs."""

from __future__ import annotations

import re
from pathlib import Path


class Log:
    """A file that vLLM writes to.

    Parameters
    ----------
    path : Path
        Where it is.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, line: str) -> None:
        """Write a line that came another way."""
        with self.path.open("a") as out:
            out.write(line)

    def lines(self) -> list[str]:
        """What there is so far."""
        return self.path.read_text(errors="replace").splitlines()

    def reason(self) -> str:
        """The error that it ended with: the first that a line names after what vLLM puts before it."""
        names = r"(?:\w+\.)*(?:\w*Error|\w*Exception|InvalidInput|UnsupportedDevice|MissingDependency)"
        lines = self.lines()
        for line, after in zip(lines, [*lines[1:], ""], strict=True):
            if found := re.search(rf"(?:^|\] |\) )({names}: .*)", line):
                more = f" {after.strip()}" if "validation error" in line else ""
                return f"{found.group(1)}{more}"[:160]
        return "it ended, and named no error"

    def figure(self, pattern: str) -> str:
        """What it says, by a pattern with a group; `-` if nothing."""
        for line in self.lines():
            if found := re.search(pattern, line):
                return found.group(1)
        return "-"
