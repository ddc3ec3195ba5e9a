"""Commands as processes: signals, terminals, pipes, what they import, completion."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from support.cli import Run
from support.commands import process
from support.folders import names

import tpde

# ---- signals

INTERRUPT = """
import os, signal, sys
from tpde.io.sinks import FileSink
write, calls = FileSink.write, 0

def interrupted(self, offset, buffers):
    global calls
    write(self, offset, buffers)
    calls += 1
    if calls == 2:
        os.kill(os.getpid(), {signal})

FileSink.write = interrupted
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # so does one under `nohup`
from tpde.cli import main
main()
"""


@pytest.mark.parametrize("command", ["pack", "unpack"])
@pytest.mark.parametrize("what", ["file", "directory"])
def test_interrupt_leaves_nothing(command: str, what: str, plain: Path, model: Path, tmp_path: Path) -> None:
    source = plain if what == "file" else model
    if command == "unpack":
        tpde.pack(source, tmp_path / "packed")
        source = tmp_path / "packed"
    before = names(tmp_path)
    done = process(command, source, tmp_path / "t", code=INTERRUPT.format(signal="signal.SIGINT"))
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "interrupted; no half-written file is left\n"
    assert names(tmp_path) == before


STARTING = """
import os, signal, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
signal.signal(signal.SIGINT, signal.default_int_handler)
from tpde.__main__ import main
main()
"""


def test_interrupt_while_the_command_line_is_imported() -> None:
    done = process("verify", "x", code=STARTING)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("what", [signal.SIGTERM, signal.SIGHUP])
def test_termination_leaves_nothing(what: int, plain: Path, tmp_path: Path) -> None:
    before = names(tmp_path)
    done = process("pack", plain, tmp_path / "t", code=INTERRUPT.format(signal=what))
    assert done.returncode == 128 + what
    assert names(tmp_path) == before


FINALIZED = """
import os, signal, sys, time
from tpde.io.sinks import FileSink
ended = 3

class Ending:
    def __del__(self):
        global ended
        ended -= 1
        if ended == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)

def finalizing(self):  # in the main thread, which signals come to
    while ended:
        Ending()
    time.sleep(10)

FileSink.commit = finalizing
from tpde.cli import main
main()
"""


def test_termination_in_finalizers_comes_again(plain: Path, tmp_path: Path) -> None:
    """Python ignores what is raised there; here, the second time too."""
    before = names(tmp_path)
    done = process("pack", plain, tmp_path / "t", code=FINALIZED)
    assert (done.returncode, done.stderr) == (128 + signal.SIGTERM, "")
    assert names(tmp_path) == before


def test_what_ignores_a_closed_terminal_goes_on(plain: Path, tmp_path: Path) -> None:
    code = INTERRUPT.replace("SIG_DFL", "SIG_IGN")  # as `nohup` does
    done = process("pack", plain, tmp_path / "t", code=code.format(signal="signal.SIGHUP"))
    assert done.returncode == 0
    assert (tmp_path / "t").is_file()


# ---- streams


def terminal(*args: object, **env: str) -> tuple[int, str, str]:
    """Run with a terminal as stderr: exit code, stdout, and what the terminal got."""
    ours, theirs = pty.openpty()
    clean = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    done = process(
        *args,
        env=clean | {"TERM": "xterm"} | env,
        stdout=subprocess.PIPE,
        stderr=theirs,
        capture_output=False,
    )
    os.close(theirs)
    got = b""
    try:
        while part := os.read(ours, 4096):
            got += part
    except OSError:  # Linux gives EIO at the end
        pass
    os.close(ours)
    return done.returncode, done.stdout, got.decode()


def test_progress_only_on_a_terminal(plain: Path, tmp_path: Path) -> None:
    code, out, err = terminal("pack", plain, tmp_path / "a")
    assert (code, out.count("\n")) == (0, 1)
    assert "packing" in err
    assert "MB/s" in err or "kB/s" in err or "?" in err
    assert "packing" not in out
    done = process("pack", plain, tmp_path / "b")
    assert (done.returncode, done.stderr) == (0, "")


def test_colour(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    assert terminal("pack", gone, "t")[2].startswith("\x1b[1;31merror:\x1b[0m `")
    for env in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        err = terminal("pack", gone, "t", **env)[2]
        assert err.startswith("error: `")
        assert "\x1b" not in err
    assert "\x1b" not in process("pack", gone, "t").stderr


def test_bar_without_colour(plain: Path, tmp_path: Path) -> None:
    colours = re.compile("\x1b\\[[0-9;]*3[0-9][0-9;]*m")
    assert colours.search(terminal("pack", plain, tmp_path / "a")[2])
    err = terminal("pack", plain, tmp_path / "b", NO_COLOR="1")[2]
    assert "packing" in err
    assert not colours.search(err)
    assert terminal("pack", plain, tmp_path / "c", TERM="dumb")[2] == ""


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("args", ["inspect", "--version", "--help", "pack --help"])
def test_reader_that_goes_away(args: str, unbuffered: str, packed: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    env = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    streams: dict[str, Any] = {"stdout": writer, "stderr": subprocess.PIPE, "capture_output": False}
    done = process(*args.split(), *([packed] * (args == "inspect")), env=env, **streams)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


NO_ROOM_TO_PRINT = """\
error: the output cannot be printed: No space left on device
hint: make room, or send it elsewhere
"""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs `/dev/full`")
@pytest.mark.parametrize("options", [[], ["--json"]])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_its_disk_has_no_room_for(options: list[str], unbuffered: str, packed: Path) -> None:
    """It is little: buffered, it waits in the process until its end."""
    env = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        streams: dict[str, Any] = {"stdout": full, "stderr": subprocess.PIPE, "capture_output": False}
        done = process("inspect", packed, *options, env=env, **streams)
    assert done.returncode == 4
    assert done.stderr == NO_ROOM_TO_PRINT


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs `/dev/full`")
@pytest.mark.parametrize("args", [["--version"], ["--help"], ["pack", "--help"]], ids=" ".join)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_help_that_its_disk_has_no_room_for(args: list[str], unbuffered: str) -> None:
    env = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        done = process(*args, env=env, stdout=full, stderr=subprocess.PIPE, capture_output=False)
    assert done.returncode == 4
    assert done.stderr == NO_ROOM_TO_PRINT


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs `/dev/full`")
@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize(
    ("args", "code", "lines"),
    [("pack none out", 2, 0), ("pack small out", 0, 1), ("pack --none", 2, 0), ("pack", 2, 0)],
)
def test_what_cannot_be_said_changes_no_exit_code(
    args: str, code: int, lines: int, closed: bool, tmp_path: Path
) -> None:
    """Nor is it said on stdout instead."""
    safetensors.torch.save_file({"a": torch.zeros(3)}, tmp_path / "small")
    with open("/dev/full", "w") as full:
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": full, "capture_output": False}
        if closed:
            streams["preexec_fn"] = lambda: os.close(2)
        done = process(*args.split(), cwd=tmp_path, **streams)
    assert (done.returncode, len(done.stdout.splitlines())) == (code, lines), done.stdout


def test_names_cannot_steer_the_terminal(run: Run, tmp_path: Path) -> None:
    source = tmp_path / "s.safetensors"
    safetensors.torch.save_file({"a\x1b[2Jb": torch.zeros(3)}, source)
    done = run("inspect", source)
    assert done.code == 0
    assert "a\\x1b[2Jb" in done.out
    assert "\x1b" not in done.out


def test_names_that_the_locale_cannot_write(tmp_path: Path) -> None:
    source = tmp_path / "s.safetensors"
    safetensors.torch.save_file({"größe": torch.zeros(3)}, source)
    done = process("inspect", source, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, "")
    assert "gr\\xf6\\xdfe" in done.stdout


# ---- imports and completion


def imported(*args: object) -> set[str]:
    """Run a command; which of the heavy packages did it import?"""
    heavy = {"numpy", "torch", "matplotlib", "safetensors", "huggingface_hub", "zstandard"}
    code = (
        "import sys, contextlib, io\nfrom tpde.cli import main\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n    main()\n"
        f"print(*sorted({heavy!r} & set(sys.modules)))"
    )
    done = process(*args, code=code)
    assert done.stderr == ""
    return set(done.stdout.split())


def test_help_imports_nothing_heavy() -> None:
    assert imported("--help") == set()
    assert imported("pack", "--help") == set()


def test_no_command_imports_torch(plain: Path, packed: Path, tmp_path: Path) -> None:
    for args in (
        ["pack", plain, tmp_path / "p"],
        ["unpack", packed, tmp_path / "u"],
        ["verify", packed],
        ["inspect", packed],
        ["doctor"],
        ["bench", "codec", "--size", "1MiB", "--threads", "1"],
    ):
        found = imported(*args)
        assert "numpy" in found  # the command ran
        assert "torch" not in found, args


def test_completion() -> None:
    env = os.environ | {"_TPDE_COMPLETE": "complete_bash", "COMP_WORDS": "tpde ver", "COMP_CWORD": "1"}
    assert process(env=env).stdout.split() == ["verify"]
    env = os.environ | {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    for shell in ("bash", "zsh", "fish"):
        done = process("--show-completion", shell, env=env)
        assert done.returncode == 0
        assert "_TPDE_COMPLETE" in done.stdout


def test_install_completion(tmp_path: Path) -> None:
    env = os.environ | {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1", "HOME": str(tmp_path)}
    done = process("--install-completion", "bash", env=env)
    assert done.returncode == 0, done.stderr
    assert "_TPDE_COMPLETE" in (tmp_path / ".bash_completions" / "tpde.sh").read_text()


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_closed_streams(plain: Path, tmp_path: Path, closed: str) -> None:
    code = f"import sys; sys.{closed} = None; from tpde.cli import main; main()"  # as Python starts without
    assert process("pack", plain, tmp_path / "t", code=code).returncode == 0
    assert process("verify", tmp_path / "t", code=code).returncode == 0


def test_json_needs_a_stream(plain: Path, tmp_path: Path) -> None:
    tpde.pack(plain, tmp_path / "packed")
    code = "import sys; sys.stdout = None; from tpde.cli import main; main()"
    for command in ("verify", "inspect"):
        done = process(command, tmp_path / "packed", "--json", code=code)
        assert done.returncode == 4
        assert done.stderr == "error: the JSON cannot be printed: stdout is closed\n"
