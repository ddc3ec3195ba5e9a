"""How commands end: exit codes, errors with what helps, interrupts, and output that nobody reads."""

from __future__ import annotations

import errno
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from support.cli import signals_kept

from tpde import errors
from tpde.cli import common
from tpde.cli import main as cli_main


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.Truncated("x"), 3),
        (errors.Corrupt("x"), 3),
        (errors.ReadError("x"), 4),
        (errors.InvalidInput("x"), 2),
        (errors.DestinationExists("x"), 2),
        (errors.UnsupportedVersion("x"), 2),
        (errors.OutOfMemory("x"), 2),
        (errors.NativeError("x"), 2),
        (PermissionError(errno.EACCES, "x"), 2),
        (OSError(errno.EIO, "x"), 4),
        (FileNotFoundError(errno.ENOENT, "x"), 4),
        (MemoryError(), 4),
    ],
)
def test_exit_codes_are_those_of_the_help(error: BaseException, code: int) -> None:
    assert common.exit_code(error) == code


@pytest.mark.parametrize(
    ("error", "lines"),
    [
        (MemoryError(), ["error: out of memory", "hint: use fewer `--threads`"]),
        (
            MemoryError("no memory for `w`"),
            [
                "error: no memory for `w`",
                "hint: take a machine with more memory, or use fewer `--threads`",
            ],
        ),
        (OSError("no file here"), ["error: no file here"]),
        (OSError(errno.EIO, "it failed", b"a\xff"), ["error: `a\\udcff`: it failed"]),
        (OSError(errno.EIO, None, "f"), ["error: `f`: [Errno 5] None: 'f'"]),
        (
            PermissionError(errno.EACCES, "denied", "f"),
            ["error: `f`: denied", "hint: change its permissions"],
        ),
        (
            OSError(errno.EDQUOT, "no", "f"),
            ["error: `f`: no", "hint: make room, or choose another destination"],
        ),
        (
            OSError(errno.EFBIG, "no", "f"),
            ["error: `f`: no", "hint: make room, or choose another destination"],
        ),
        (errors.Truncated("short"), ["error: short", "hint: fetch the rest of the file"]),
        (errors.UnsupportedVersion("new"), ["error: new", "hint: upgrade with `pip install --upgrade tpde`"]),
        (errors.NotSafetensors("x"), ["error: x", "hint: name a safetensors file, or fetch this one again"]),
        (
            errors.NativeError("x"),
            ["error: x", "hint: run `tpde doctor`, and report this if nothing is wrong there"],
        ),
        (errors.InvalidInput("x"), ["error: x"]),
        (errors.InvalidInput("x", hint="y"), ["error: x", "hint: y"]),
    ],
)
def test_errors_are_told_with_what_helps(
    error: BaseException, lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert common.fail(error) == common.exit_code(error)
    out, err = capsys.readouterr()
    assert (out, err.splitlines()) == ("", lines)


@pytest.mark.parametrize(
    ("result", "code"),
    [
        (None, 0),
        (0, 0),
        (1, 1),
        (KeyboardInterrupt(), 130),
        (errors.Corrupt("x"), 3),
        (OSError(errno.EIO, "x"), 4),
        (MemoryError(), 4),
    ],
)
def test_a_command_ends_with_its_exit_code(result: Any, code: int) -> None:
    def command() -> Any:
        r"""Help.

        \b
          an example
        """
        if isinstance(result, BaseException):
            raise result
        return result

    wrapped = common.guard(command)
    assert "\n\b\n" in (wrapped.__doc__ or "").replace("        ", "")
    with pytest.raises(typer.Exit) as ended:
        wrapped()
    assert ended.value.exit_code == code


def test_other_errors_are_bugs_and_stay_what_they_are() -> None:
    @common.guard
    def command() -> None:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        command()


def test_a_command_without_streams_ends_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    for result, code in ((None, 0), (errors.Corrupt("x"), 3)):

        def command(result: Any = result) -> None:
            if result is not None:
                raise result

        with pytest.raises(typer.Exit) as ended:
            common.guard(command)()
        assert ended.value.exit_code == code


def test_output_is_dropped_where_nobody_reads_it(tmp_path: Path) -> None:
    """So that Python has nothing to complain of as it ends."""

    @common.guard
    def unread() -> None:
        raise BrokenPipeError

    kept = os.dup(1)
    try:
        file = os.open(tmp_path / "x", os.O_WRONLY | os.O_CREAT)
        os.dup2(file, 1)
        with pytest.raises(typer.Exit) as ended:
            unread()
        os.write(1, b"lost")
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(file)
    assert ended.value.exit_code == common.OK
    assert (tmp_path / "x").read_bytes() == b""


# ---- the process


@pytest.mark.parametrize(
    ("args", "code"),
    [(["--version"], 0), (["bench"], 2), (["no-such"], 2), (["patch", "--help"], 0), ([], 2)],
)
def test_the_process_ends_with_a_number(
    args: list[str], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(sys, "argv", ["tpde", *args])
    with signals_kept():
        with pytest.raises(SystemExit) as ended:
            cli_main()
        assert signal.getsignal(signal.SIGTERM) is not before
    assert ended.value.code in ((code, 0) if not args or args == ["bench"] else (code,))
    out, err = capsys.readouterr()
    if args == ["no-such"]:
        assert err.splitlines()[1] == "hint: `tpde --help` shows what there is"
    else:
        assert "tpde" in out + err


def test_an_interrupt_before_a_command_begins_has_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(list[str]):
        """Arguments during whose reading Ctrl-C is pressed."""

        def __getitem__(self, which: Any) -> Any:
            raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", Interrupted(["tpde", "doctor"]))
    with signals_kept(), pytest.raises(SystemExit) as ended:
        cli_main()
    assert ended.value.code == common.INTERRUPTED
