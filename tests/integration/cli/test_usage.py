"""Commands and options that cannot be, packages that are missing, and help."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.cli import Run

from tpde.cli import common


@pytest.mark.parametrize("command", [("run", "--embed", "x"), ("plan", "--vram", "1GiB"), ("tune",)])
@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_running_without_its_packages(tmp_path: Path, package: str, command: tuple[str, ...]) -> None:
    code = (
        f"import sys; sys.modules['{package}'] = None; sys.argv = {['tpde', command[0], 'm', *command[1:]]}; "
        "from tpde.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(
        rf"error: running models needs {package}.*\nhint: run `pip install \"tpde\[transformers\]\"`\n",
        done.stderr,
    )


def test_hub_id_without_the_hub(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    run("pack", "org/no-such-model", tmp_path / "t").failed(
        2, "is no path here", r'pip install "tpde\[hub\]"'
    )


def test_plot_without_matplotlib(run: Run, plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    run("inspect", plain, "--plot", "x.png").failed(2, "needs matplotlib", r'pip install "tpde\[plot\]"')


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (["no-such-command"], "No such command"),
        (["pack"], "Missing argument"),
        (["pack", "a", "b", "--threads", "0"], "--threads"),
        (["pack", "a", "b", "--codec", "lz4"], "lz4"),
        (["verify", "a", "--no-such-option"], "--no-such-option"),
    ],
)
def test_usage(run: Run, args: list[str], error: str) -> None:
    run(*args).failed(2, error, "--help` shows what there is")


@pytest.mark.parametrize(
    "args",
    [
        ["pack", "a", ""],
        ["pack", "", "a"],
        ["unpack", "a", ""],
        ["diff", "a", "b", ""],
        ["patch", "a", "", "b"],
        ["verify", "", "--json"],
        ["verify", "a", "--against", ""],
        ["verify", "a", "--base="],
        ["inspect", "a", "--plot", ""],
        ["tune", "--output", ""],
        ["run", "a", "--prompt", "x", "--trace", ""],
        ["inspect", ""],
        ["run", "", "--prompt", "x"],
        ["ckpt", "list", ""],
    ],
)
def test_empty_names_are_not_the_current_folder(run: Run, args: list[str]) -> None:
    """As variables of a shell that are not set give them."""
    run(*args).failed(2, "the name is empty", "--help` shows what there is")


@pytest.mark.parametrize("args", [[], ["bench"]])
def test_no_arguments_show_help(run: Run, args: list[str]) -> None:
    done = run(*args)
    assert "Commands:" in done.out + done.err
    assert done.code in (0, 2)  # by the version of click


@pytest.mark.parametrize("group", [[], ["ckpt"], ["bench"]])
def test_lists_of_commands_cut_no_description(
    run: Run, group: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = run(*group, "--help")
    listed = done.out.partition("\nCommands:\n")[2].partition("\n\n")[0].splitlines()
    assert listed
    assert [line for line in listed if not line.endswith(".") or line.endswith("...")] == []


@pytest.mark.parametrize("threads", [0, 100_000, 1 << 31, (1 << 32) + 1])
def test_numbers_of_threads_that_cannot_be(threads: int, run: Run, plain: Path, tmp_path: Path) -> None:
    for command in (
        ("pack", plain, tmp_path / "out"),
        ("verify", plain),
        ("unpack", plain, tmp_path / "out"),
        ("diff", plain, plain, tmp_path / "out"),
        ("patch", plain, plain, tmp_path / "out"),
    ):
        found = run(*command, "--threads", threads)
        found.failed(common.USAGE, "'--threads'", "--help")
