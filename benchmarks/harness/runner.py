"""The command line: which benchmarks there are, their options, and what a run leaves."""

from __future__ import annotations

import argparse
import ast
import importlib
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.harness import machine
from benchmarks.harness.gpu import need_cuda
from benchmarks.harness.report import Page, note

FOLDER = Path(__file__).parents[1]
ROOMS = ("harness", "data", "peers")


def names() -> dict[str, str]:
    """Benchmarks, and what each measures: the first line of its docstring, read without importing it."""
    files = {it.stem: it for it in FOLDER.glob("[a-z]*.py")}
    files |= {it.parent.name: it for it in FOLDER.glob("[a-z]*/__init__.py") if it.parent.name not in ROOMS}
    about = {name: ast.get_docstring(ast.parse(it.read_text("utf-8"))) for name, it in sorted(files.items())}
    return {name: (text or "").split("\n")[0] for name, text in about.items()}


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """Let SIGTERM leave as an exception does: folders are removed, other processes end."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _choose(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Run one benchmark.")
    parser.add_argument("--list", action="store_true", help="say which there are")
    parser.add_argument("name", nargs="?", choices=list(names()), metavar="NAME", help="see --list")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="its options: NAME --help")
    chosen = parser.parse_args(arguments)
    if not chosen.list and chosen.name is None:
        parser.error("name a benchmark, or use `--list`")
    return chosen


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a benchmark; returns 1 if a bar is missed or a bit differs."""
    chosen = _choose(sys.argv[1:] if arguments is None else arguments)
    if chosen.list:
        for name, about in names().items():
            print(f"{name:16}{about}")
        return 0
    module = importlib.import_module(f"benchmarks.{chosen.name}")
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {chosen.name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, help="also write the result to this Markdown file")
    parser.add_argument("--json", type=Path, help="also write it to this JSON file, with what tables round")
    module.options(parser)
    options = parser.parse_args(chosen.rest)
    page = Page(module.TITLE, machine.facts(chosen.name, chosen.rest), options.out, options.json)
    if getattr(module, "NEEDS_GPU", False):
        need_cuda()
        page.facts["GPU"] = machine.gpu()
    with _ended_in_order():
        try:
            module.run(options, page)
            page.save()
        finally:
            if page.parts:
                page.show()
    for what in page.missed:
        note(f"missed: {what}")
    return 1 if page.missed else 0
