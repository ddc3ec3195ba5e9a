"""What all commands share: errors and exit codes, the progress bar, sizes, tables and JSON.

Data goes to stdout, everything else to stderr. Nothing here imports more than the standard library and
typer until it is needed, so that `tpde --help` stays quick.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import errno
import functools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

import typer

from tpde import errors
from tpde.errors import bounded, printable

if TYPE_CHECKING:
    from tpde.files.progress import Progress
    from tpde.files.walk import LeftOut

OK, DAMAGE, USAGE, DAMAGED_INPUT, IO_ERROR, INTERRUPTED = 0, 1, 2, 3, 4, 130

EXIT_CODES = """Exit codes:

\b
  0    all is well
  1    `verify` found damage, or `doctor` a broken part
  2    the command, the source or the destination cannot be used
  3    the source is damaged or incomplete
  4    reading or writing failed, as on a full disk
  130  interrupted (Ctrl-C); no half-written file is left"""

P = ParamSpec("P")

# Hints for errors that bring none of their own.
_HINTS: dict[type[BaseException], str] = {
    errors.Truncated: "fetch the rest of the file",
    errors.Corrupt: "fetch the file again",
    errors.UnsupportedVersion: "upgrade with `pip install --upgrade tpde`",
    errors.NotSafetensors: "name a safetensors file, or fetch this one again",
    PermissionError: "change its permissions",
    errors.NativeError: "run `tpde doctor`, and report this if nothing is wrong there",
}

MAX_CELL = 120  # characters of a table's cell, which all others of the column are padded to

_STEP = 256 << 10  # bytes by which a bar moves: a move takes longer than a small tensor
_BETWEEN = "\0"  # what stands between items of JSON until they are cut into lines
_ITEMS = 1000  # of a list that are encoded as JSON at once

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class CodecChoice(str, enum.Enum):
    """Codecs to choose from."""

    auto = "auto"
    prefix = "prefix"
    zstd = "zstd"


def clean(text: str) -> str:
    """Lines without control characters: a name in a file must not steer the terminal."""
    return "\n".join(printable(line) for line in text.split("\n"))


def terminal(stream: Any) -> bool:
    """Whether a stream is a terminal that can redraw a line."""
    return bool(stream is not None and stream.isatty() and os.environ.get("TERM", "dumb") != "dumb")


def coloured(stream: Any) -> bool:
    """Whether to colour what goes to a stream (https://no-color.org)."""
    return terminal(stream) and not os.environ.get("NO_COLOR")


def tell(text: str) -> None:
    """Print on stderr. What cannot be said there, as on a full disk, is not said, and nothing fails."""
    if sys.stderr is not None:  # closed by the caller; `print` would take stdout
        with contextlib.suppress(OSError):
            print(text, file=sys.stderr, flush=True)


def say(kind: str, text: str, colour: str = "1") -> None:
    """Print a line such as `error: ...` on stderr."""
    label = f"\033[{colour}m{kind}:\033[0m" if coloured(sys.stderr) else f"{kind}:"
    tell(f"{label} {clean(text)}")


def say_left_out(things: Sequence[LeftOut]) -> None:
    """Print what of a directory was not taken, one to a line, on stderr."""
    for it in things:
        say("note", f"`{it.name}` is left out: {it.reason}")


def say_unmatched(patterns: Iterable[str], source: object) -> None:
    """Print which patterns of `--exclude` did nothing, one to a line, on stderr."""
    for it in patterns:
        say("note", f"`--exclude {it}` leaves nothing out: nothing in `{source}` matches it")


def exit_code(error: BaseException) -> int:
    """The exit code that an error stands for."""
    if isinstance(error, (errors.Truncated, errors.Corrupt)):
        return DAMAGED_INPUT
    if isinstance(error, errors.ReadError):
        return IO_ERROR
    if isinstance(error, (errors.TpdeError, PermissionError)):
        return USAGE
    return IO_ERROR


def fail(error: BaseException) -> int:
    """Print an error and its hint on stderr; returns the exit code."""
    hint = next((h for kind, h in _HINTS.items() if isinstance(error, kind)), "")
    if isinstance(error, errors.TpdeError):
        message, hint = error.message, error.hint or hint
    elif isinstance(error, MemoryError):
        message, hint = "out of memory", "use fewer `--threads`"
        if text := str(error):
            message, hint = text, f"take a machine with more memory, or {hint}"
    elif isinstance(error, OSError) and error.filename is not None:
        message = f"`{os.fsdecode(error.filename)}`: {error.strerror or error}"
        if error.errno in _NO_ROOM:
            hint = "make room, or choose another destination"
    elif isinstance(error, OSError) and error.errno in _NO_ROOM:  # files are named, stdout has no name
        message = f"the output cannot be printed: {error.strerror}"
        hint = "make room, or send it elsewhere"
    else:
        message = str(error)
    say("error", message, "1;31")
    if hint:
        say("hint", hint, "1;36")
    return exit_code(error)


def _drop_output() -> None:
    """Write what stdout still holds to nowhere: Python would complain at exit, with a code of its own."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def unwritten(error: OSError) -> int:
    """Report output that could not be written, and drop it; returns the exit code."""
    # The reader that went away, such as `head`, has what it wanted.
    code = OK if isinstance(error, BrokenPipeError) else fail(error)
    _drop_output()
    return code


def guard(command: Callable[P, int | None]) -> Callable[P, None]:
    """Turn the errors of a command into messages and exit codes."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            code = command(*args, **kwargs) or OK
            if sys.stdout is not None:  # closed by the caller
                sys.stdout.flush()
        except KeyboardInterrupt:
            tell("interrupted; no half-written file is left")
            code = INTERRUPTED
        except BrokenPipeError as error:
            code = unwritten(error)
        except (errors.TpdeError, OSError, MemoryError) as error:
            code = fail(error)
            try:
                if sys.stdout is not None:
                    sys.stdout.flush()
            except OSError:  # that was the error
                _drop_output()
        raise typer.Exit(code)

    # Help is the docstring, and a backspace alone on a line keeps what follows from being wrapped.
    wrapped.__doc__ = (command.__doc__ or "").replace("\\b\n", "\b\n")
    return wrapped


def named(text: str) -> Path:
    """Take the path that an option names, for `typer.Option`: an empty one would be the current folder."""
    if not text:
        raise typer.BadParameter("the name is empty")
    return Path(text)


def few_threads(threads: int | None) -> int | None:
    """Check a number of threads where the command line is read, for `typer.Option`."""
    from tpde.files.thread_count import check_threads

    try:
        check_threads(threads)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return threads


@contextlib.contextmanager
def progress_bar(label: str, total: Callable[[], int], *, steps: bool = False) -> Iterator[Progress]:
    """A bar with rate and time left on stderr if that is a terminal that can draw it; nothing otherwise.

    Parameters
    ----------
    label : str
        What is being done.
    total : callable
        Gives the number of bytes; asked only if there is a bar. Where it fails, the bar has no end.
    steps : bool
        What is counted are steps of some work, not bytes; they have no rate.
    """
    if not terminal(sys.stderr):
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    expected: int | None = None
    with contextlib.suppress(errors.TpdeError, OSError):  # the command itself meets it, and says so
        expected = total() or None
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        *([MofNCompleteColumn()] if steps else [DownloadColumn(binary_units=True), TransferSpeedColumn()]),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task, waiting = bar.add_task(label, total=expected), 0

        def advance(size: int) -> None:
            nonlocal waiting
            waiting += size
            if steps or waiting >= _STEP:
                bar.advance(task, waiting)
                waiting = 0

        yield advance


def size(count: float) -> str:
    """Write a number of bytes for people.

    Examples
    --------
    >>> size(512), size(45442040)
    ('512 B', '43.3 MiB')
    """
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} TiB"


def plural(count: int, noun: str) -> str:
    """Write a count with its noun: `1 tensor`, `2 tensors`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def table(titles: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Lay out a table in plain text; the first `left` columns are aligned left, the others right.

    Of a cell of more than `MAX_CELL` characters its start and its end are shown.
    """
    lines = [titles, *rows]
    widths = _widths(lines)
    if max(widths) > MAX_CELL or not all("".join(line).isprintable() for line in lines):
        lines = [[bounded(printable(cell), MAX_CELL) for cell in line] for line in lines]
        widths = _widths(lines)
    layout = "  ".join([f"%{'-' if i < left else ''}{width}s" for i, width in enumerate(widths)])
    return "\n".join([(layout % tuple(line)).rstrip() for line in lines])


def _widths(lines: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*lines, strict=True)]


def print_json(value: Any) -> None:
    """Print a dataclass or a mapping as JSON, lists one item to a line. Only ASCII, whatever the locale.

    Raises
    ------
    OSError
        If stdout is closed: what was asked for goes nowhere.
    """
    if sys.stdout is None:
        raise OSError("the JSON cannot be printed: stdout is closed")
    sys.stdout.writelines(_json(value if isinstance(value, dict) else _fields(value)))


def _json(fields: Mapping[str, Any]) -> Iterator[str]:
    # Many items at once: 300,000 tensors take 2.5 s instead of 2.9 one by one. No string holds the separator,
    # which JSON writes as an escape.
    encoder = json.JSONEncoder(
        allow_nan=False, check_circular=False, default=_fields, separators=(_BETWEEN, ": ")
    )
    lead = "{"
    for key, value in fields.items():
        yield f"{lead}\n  {encoder.encode(key)}: "
        lead = ","
        if isinstance(value, (list, tuple)) and value:
            before = "[\n    "
            for start in range(0, len(value), _ITEMS):
                yield before + _lines(encoder, value[start : start + _ITEMS])
                before = ",\n    "
            yield "\n  ]"
        else:
            yield encoder.encode(value).replace(_BETWEEN, ", ")
    yield "\n}\n"


def _lines(encoder: json.JSONEncoder, items: Sequence[Any]) -> str:
    """Items of a list, one to a line."""
    if dataclasses.is_dataclass(items[0]):
        text = encoder.encode(items)[1:-1].replace("}" + _BETWEEN + "{", "},\n    {")
    else:
        text = ",\n    ".join(map(encoder.encode, items))
    return text.replace(_BETWEEN, ", ")


def _fields(value: Any) -> dict[str, Any]:
    """What a dataclass holds."""
    return {name: getattr(value, name) for name in _names(value.__class__)}


@functools.cache
def _names(kind: Any) -> tuple[str, ...]:
    """The fields of a dataclass: `dataclasses.fields` looks through them at each call."""
    return tuple(field.name for field in dataclasses.fields(kind))
