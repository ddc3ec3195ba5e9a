"""What commands have in common: exit codes, hints, bars, tables; and parts of `plan` and `doctor`."""

from __future__ import annotations

import dataclasses
import errno
import importlib.metadata
import importlib.util
import io
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from support.backends import MadeBackend
from support.commands import invoke

from tpde import errors
from tpde.cli import common, doctor
from tpde.cli import main as cli_main
from tpde.errors import bounded, printable

# ---- errors


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


# ---- terminals


class Screen(io.StringIO):
    """What says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "env", "draws", "colours"),
    [
        (None, {"TERM": "xterm"}, False, False),
        (io.StringIO(), {"TERM": "xterm"}, False, False),
        (Screen(), {}, False, False),
        (Screen(), {"TERM": "dumb"}, False, False),
        (Screen(), {"TERM": "xterm"}, True, True),
        (Screen(), {"TERM": "xterm", "NO_COLOR": ""}, True, True),
        (Screen(), {"TERM": "xterm", "NO_COLOR": "1"}, True, False),
    ],
)
def test_what_is_a_terminal(
    stream: Any, env: dict[str, str], draws: bool, colours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TERM", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert (common.terminal(stream), common.coloured(stream)) == (draws, colours)


def test_lines_are_coloured_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    for stream, needed in ((Screen(), "\033[7mnote:\033[0m a\\x1bb\n"), (io.StringIO(), "note: a\\x1bb\n")):
        monkeypatch.setattr(sys, "stderr", stream)
        common.say("note", "a\x1bb", "7")
        assert stream.getvalue() == needed


def test_a_bar_is_drawn_on_a_terminal_and_moves_by_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    import rich.progress

    events: list[Any] = []
    shown: list[str] = []

    class Bar:
        def __init__(self, *columns: Any, console: Any, transient: bool) -> None:
            shown[:] = [type(it).__name__ for it in columns]
            assert console.stderr
            assert transient

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: Any) -> None:
            events.append("gone")

        def add_task(self, label: str, total: int | None) -> str:
            events.append((label, total))
            return "task"

        def advance(self, task: str, size: int) -> None:
            assert task == "task"
            events.append(size)

    monkeypatch.setattr(rich.progress, "Progress", Bar)
    with common.progress_bar("packing", lambda: pytest.fail("nobody sees it")) as progress:
        progress(1 << 30)
    assert events == []
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Screen())
    with common.progress_bar("packing", lambda: 1 << 20) as progress:
        for size in (100 << 10, 100 << 10, 56 << 10, 1, (256 << 10) - 2, 1, 5 << 20):
            progress(size)
    assert events == [("packing", 1 << 20), 256 << 10, 256 << 10, 5 << 20, "gone"]

    assert "DownloadColumn" in shown
    events.clear()
    with common.progress_bar("timing", lambda: 2, steps=True) as progress:
        progress(1)
        progress(1)
    assert events == [("timing", 2), 1, 1, "gone"]
    assert "MofNCompleteColumn" in shown
    assert "DownloadColumn" not in shown

    def failing() -> int:
        raise errors.Truncated("the command meets it")

    def missing() -> int:
        raise FileNotFoundError

    for total in (failing, missing, lambda: 0):
        events.clear()
        with common.progress_bar("packing", total):
            pass
        assert events == [("packing", None), "gone"]


# ---- texts


def test_sizes_change_their_unit_at_1024() -> None:
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    assert [common.size(n) for n in (0, 1, 1023)] == ["0 B", "1 B", "1023 B"]
    for power, unit in enumerate(units[1:], 1):
        assert common.size(1 << 10 * power) == f"1.0 {unit}"
        assert common.size(1023 << 10 * power) == f"1023.0 {unit}"
    assert common.size(1 << 51) == "2048.0 TiB"
    assert [common.plural(n, "tensor") for n in (0, 1, 2)] == ["0 tensors", "1 tensor", "2 tensors"]


def test_columns_are_aligned_to_the_left_as_many_as_are_asked_for() -> None:
    rows = [("a", "bb", "1"), ("aaa", "b", "22")]
    assert common.table(("x", "y", "z"), rows, left=2).splitlines() == [
        "x    y    z",
        "a    bb   1",
        "aaa  b   22",
    ]
    assert common.table(("x", "y", "z"), rows).splitlines() == ["x     y   z", "a    bb   1", "aaa   b  22"]


def test_cells_have_at_most_120_characters() -> None:
    for size in (120, 121):
        cell = common.table(("n",), [("x" * size,)]).splitlines()[1]
        assert cell == ("x" * 120 if size == 120 else "x" * 60 + "…" + "x" * 59)


@pytest.mark.parametrize(
    ("size", "most"), [(10, 10), (10, 11), (11, 10), (11, 11), (50, 10), (50, 11), (3, 1)]
)
def test_bounded_texts_show_their_start_and_their_end(size: int, most: int) -> None:
    text = "".join(chr(ord("0") + i) for i in range(size))
    found = bounded(text, most)
    if size <= most:
        assert found == text
        return
    assert len(found) == most
    start, end = found.split("…")
    assert text.startswith(start)
    assert text.endswith(end)
    assert 0 <= len(start) - len(end) <= 1


def test_messages_are_bounded_and_names_are_printable() -> None:
    assert printable("aé😀") == "aé😀"
    assert printable("a\nb\x1b\u202e") == "a\\nb\\x1b\\u202e"
    assert printable(7) == "7"
    for size in (2000, 2001):
        assert len(errors.Corrupt("x" * size).message) == 2000
    assert len(errors.Corrupt("\x1b" * 1500).message) == 2000
    assert len(errors.Corrupt("x" * 1990).prefixed("y" * 100).message) == 2000
    log = "line\n" * 3000
    assert errors.CompileError(log).message == log


@pytest.mark.parametrize("count", [1, 999, 1000, 1001, 2500])
def test_json_of_many_records_is_one_to_a_line(count: int, capsys: pytest.CaptureFixture[str]) -> None:
    records = [doctor.Check(f'}}\0{{"{i}", }}, {{', "\0\n", True, "d", "\\u0000", None) for i in range(count)]
    common.print_json({"before": ["\0", 1], "checks": records, "after": {"a": [1, 2]}})
    text = capsys.readouterr().out
    expected = [dataclasses.asdict(record) for record in records]
    assert json.loads(text) == {"before": ["\0", 1], "checks": expected, "after": {"a": [1, 2]}}
    lines = text.splitlines()
    assert lines[6 : 6 + count] == [
        "    " + json.dumps(record) + "," * (i + 1 < count) for i, record in enumerate(expected)
    ]
    assert lines[-2] == '  "after": {"a": [1, 2]}'


def test_json_is_one_item_to_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    common.print_json({"a": [1, {"b": "é"}], "c": [], "d": (), "e": ("x",)})
    out = capsys.readouterr().out
    assert out == (
        '{\n  "a": [\n    1,\n    {"b": "\\u00e9"}\n  ],\n  "c": [],\n  "d": [],\n  "e": [\n    "x"\n  ]\n}\n'
    )
    common.print_json(errors_as_check := doctor.Check("n", "ok", True, "d", "f", None))
    assert json.loads(capsys.readouterr().out) == {
        "name": "n", "status": "ok", "required": True, "detail": "d", "needed_for": "f", "command": None,
    }  # fmt: skip
    assert errors_as_check.required


# ---- the process


@pytest.mark.parametrize(
    ("args", "code"),
    [(["--version"], 0), (["bench"], 2), (["no-such"], 2), (["patch", "--help"], 0), ([], 2)],
)
def test_the_process_ends_with_a_number(
    args: list[str], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import signal

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(sys, "argv", ["tpde", *args])
    try:
        with pytest.raises(SystemExit) as ended:
            cli_main()
        assert signal.getsignal(signal.SIGTERM) is not before
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code in ((code, 0) if not args or args == ["bench"] else (code,))
    out, err = capsys.readouterr()
    if args == ["no-such"]:
        assert err.splitlines()[1] == "hint: `tpde --help` shows what there is"
    else:
        assert "tpde" in out + err


def test_an_interrupt_before_a_command_begins_has_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    import signal

    class Interrupted(list[str]):
        """Arguments during whose reading Ctrl-C is pressed."""

        def __getitem__(self, which: Any) -> Any:
            raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(sys, "argv", Interrupted(["tpde", "doctor"]))
    try:
        with pytest.raises(SystemExit) as ended:
            cli_main()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == common.INTERRUPTED


# ---- `tpde doctor`


def checks(code: int = 0) -> dict[str, doctor.Check]:
    """What `tpde doctor` finds, by names."""
    done = invoke("doctor", "--json")
    assert done.exit_code == code, done.output
    found = json.loads(done.stdout)
    assert found["ok"] == (code == 0)
    return {it["name"]: doctor.Check(**it) for it in found["checks"]}


def test_a_package_without_its_module_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "1.2")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "torch" else real(name, *rest)
    )
    found = checks()["torch"]
    assert (found.status, found.detail) == ("broken", "version 1.2 is installed without its module")
    assert (found.required, found.command) == (False, 'pip install "tpde[torch]"')
    assert found.needed_for == "tpde.pack_module, tpde.torch, packing .bin and .pt files"


def test_required_packages_are_imported_and_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("xxhash", "matplotlib"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('first line\\nsecond line')")
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "1.2")
    found = checks(common.DAMAGE)
    assert (found["matplotlib"].status, found["matplotlib"].detail) == ("ok", "1.2")
    broken = found["xxhash"]
    assert (broken.status, broken.required, broken.detail) == ("broken", True, "first line")
    assert broken.command == "pip install --force-reinstall tpde"


def test_an_old_python_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, status in (((3, 9, 18), "broken"), ((3, 10, 0), "ok")):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "version_info", version)
            found = checks(common.DAMAGE if status == "broken" else common.OK)
        own, python = found["tpde"], found["Python"]
        assert (own.status, own.required) == ("ok", True)
        assert (python.status, python.required) == (status, True)
        assert (python.command is None) is (status == "ok")


def test_the_gpu_is_told_whatever_asking_for_it_raises(launch_on: Any) -> None:
    for error, status, detail in (
        (errors.MissingDependency("x"), "missing", "not asked: cuda-bindings is missing"),
        (errors.UnsupportedDevice("no driver", hint="y"), "missing", "no driver"),
        (RuntimeError("a\nb"), "broken", "a"),
    ):
        launch_on(MadeBackend(facts=error))
        found = checks()["GPU"]
        assert (found.status, found.detail, found.required) == (status, detail, False)


def test_the_core_is_tested_on_every_path_and_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    from tpde.codec import native
    from tpde.files.reader import PackedFile

    before, tried = native.simd(), list[str]()
    read = PackedFile.read

    def noted(self: PackedFile, name: str, threads: int) -> Any:
        tried.append(native.simd())
        return read(self, name, threads)

    monkeypatch.setattr(PackedFile, "read", noted)
    found = checks()
    assert native.simd() == before
    paths = list(native.simd_available())
    assert [*dict.fromkeys(tried)] == paths
    core = [found[it] for it in ("core", "SIMD", *(f"self test, {path}" for path in paths))]
    assert {(it.status, it.required) for it in core} == {("ok", True)}
    assert f"{before} (selected)" in found["SIMD"].detail
    assert found["SIMD"].detail.count("(selected)") == 1

    def interrupted(self: PackedFile, name: str, threads: int) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(PackedFile, "read", interrupted)
    assert invoke("doctor").exit_code == common.INTERRUPTED
    assert native.simd() == before


def test_a_core_that_is_not_there_is_a_line_of_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    from tpde.codec import native

    def missing() -> str:
        raise errors.NativeError("no core")

    monkeypatch.setattr(native, "simd", missing)
    found = checks(common.DAMAGE)
    assert [it for it in found if it in ("core", "SIMD") or it.startswith("self test")] == ["core"]
    core = found["core"]
    assert (core.status, core.required, core.detail) == ("broken", True, "no core")


@pytest.mark.parametrize(
    ("method", "does", "says"),
    [
        ("packed_names", lambda file: ["bf16"], "a tensor that should shrink did not"),
        ("read", lambda *_, **__: 1 / 0, "ZeroDivisionError: division by zero"),
        ("read", "another byte", "tensor `i32` came back with other bytes"),
    ],
)
def test_a_core_that_fails_is_told(
    method: str, does: Any, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What did not shrink, what fails, and what differs."""
    from tpde.files.reader import PackedFile

    real = PackedFile.read

    def other(self: PackedFile, name: str, threads: int) -> Any:
        data = real(self, name, threads)
        data[-1] ^= name == "i32"
        return data

    monkeypatch.setattr(PackedFile, method, other if does == "another byte" else does)
    found = [it for name, it in checks(common.DAMAGE).items() if name.startswith("self test")]
    assert {(it.status, it.required, it.detail) for it in found} == {("broken", True, says)}
    assert all(it.command for it in found)


# ---- `tpde plan`


class Measured:
    """Notes what is measured, of a machine of round numbers."""

    def __init__(self) -> None:
        from tpde.streaming.rates import Meters

        self.log: list[Any] = []
        self.meters = Meters(self._copy, lambda device: 6e-6, self._disk)

    def _copy(self, device: Any) -> tuple[float, float]:
        self.log.append(str(device))
        return 1e9, 4e9

    def _disk(self, files: Any) -> float:
        self.log.append(list(files))
        return 3e9


@pytest.fixture
def measured(launch_on: Any) -> Measured:
    """Give what was measured, on a machine of two GPUs."""
    pytest.importorskip("torch", reason="needs torch")
    launch_on(MadeBackend())
    return Measured()


@pytest.fixture
def gpus(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let PyTorch see two GPUs, of which it uses the first."""
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


FILES = [Path("a")]


@pytest.mark.parametrize(
    ("given", "measures", "rates"),
    [
        ({"copy": 10.0, "memory": 20.0}, [FILES], (10e9, 3e9, 20e9)),
        ({"copy": 10.0, "memory": 20.0, "disk": 7.0}, [], (10e9, 7e9, 20e9)),
        ({"copy": 10.0}, ["cuda:0", FILES], (10e9, 3e9, 4e9)),
        ({"memory": 20.0, "disk": 7.0}, ["cuda:0"], (1e9, 7e9, 20e9)),
        ({"device": "cuda:1"}, ["cuda:1", FILES], (1e9, 3e9, 4e9)),
    ],
)
def test_rates_that_are_given_are_not_measured(
    given: dict[str, Any], measures: list[Any], rates: tuple[float, ...], measured: Measured, gpus: None
) -> None:
    from tpde.cli.plan import _rates

    every = dict.fromkeys(("device", "copy", "memory", "disk", "call")) | given
    found = _rates(*every.values(), FILES, measured.meters)
    assert measured.log == measures
    assert (found.copy, found.disk, found.memory) == rates
    called = _rates(*(every | {"call": 50.0}).values(), FILES, measured.meters)
    assert called.launch == pytest.approx(50e-6)
    assert called.launch != found.launch


def test_without_files_no_disk_is_measured(measured: Measured) -> None:
    from tpde.cli.plan import _rates

    found = _rates(None, 10.0, 20.0, None, None, [], measured.meters)
    assert (measured.log, found.disk) == ([], float("inf"))


def test_without_a_gpu_its_rates_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that is named is looked for."""
    torch = pytest.importorskip("torch", reason="needs torch")

    from tpde.cli.plan import _rates

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for given, missing in (((10.0, None), "--memory-rate"), ((None, 10.0), "--copy-rate")):
        with pytest.raises(errors.InvalidInput, match=f"no GPU to measure, and `{missing}` is not") as caught:
            _rates(None, *given, None, None, [])
        hint = str(caught.value.hint)
        assert (hint.count("-rate`"), f"name `{missing}`" in hint, caught.value.where) == (1, True, missing)
    with pytest.raises(errors.InvalidInput, match="there is no GPU to measure") as caught:
        _rates(None, None, None, None, None, [])
    assert "`--copy-rate` (" in str(caught.value.hint)
    assert "`--memory-rate` (" in str(caught.value.hint)
    with pytest.raises(errors.UnsupportedDevice, match="no CUDA device that PyTorch can use") as refused:
        _rates("cuda:0", None, None, None, None, [])
    assert "`--copy-rate` (" in str(refused.value.hint)
    with pytest.raises(errors.InvalidInput, match="`--device` is what is measured"):
        _rates("cuda:0", 1.0, 2.0, None, None, [])


def test_a_plan_as_json_and_as_text_has_all_of_it() -> None:
    from tpde.cli.plan import as_dict, render
    from tpde.planning.units import Placement, Rates, Unit

    units = [Unit("embed", 10, 20, 1), Unit("layers.0", 30, 40, 1), Unit("layers.1", 50, 60, 1)]
    plan = SimpleNamespace(
        placements={"embed": Placement.HOST, "layers.0": Placement.DISK, "layers.1": Placement.HOST},
        tiled=("embed",), vram=1 << 30, ram=None, workspace=7, slots=2, piece=3,
        parts={"plain": 2048, "ring": 0},
        used=3072, host=4096, staging=0, times={"copy": 0.25, "disk": 0.0}, seconds=0.25, limit="copy",
    )  # fmt: skip
    rates = Rates(1e9, float("inf"), 4e9, 5e9, 6e-6, 7e9)
    budget = SimpleNamespace(max_tokens=11, max_batch=3)
    found = as_dict(plan, units, budget, rates, "m")  # type: ignore[arg-type]
    assert found == {
        "model": "m", "vram": 1 << 30, "ram": None, "max_tokens": 11, "max_batch": 3,
        "placements": [
            {"placement": "host", "units": ["embed", "layers.1"], "packed_bytes": 60, "plain_bytes": 80},
            {"placement": "disk", "units": ["layers.0"], "packed_bytes": 30, "plain_bytes": 40},
        ],
        "tiled": ["embed"], "workspace_bytes": 7, "ring_slots": 2, "piece_bytes": 3,
        "device_bytes": {"plain": 2048, "ring": 0}, "used_bytes": 3072, "host_bytes": 4096,
        "staging_bytes": 0,
        "seconds": {"copy": 0.25, "disk": 0.0}, "seconds_per_token": 0.25, "tokens_per_second": 4.0,
        "limit": "copy",
        "rates": {"copy": 1e9, "memory": 4e9, "decode": 5e9, "windows": 7e9, "launch_seconds": 6e-6},
    }  # fmt: skip
    text = render(plan, units, 11)  # type: ignore[arg-type]
    lines = [line.split() for line in text.splitlines()]
    assert ["host", "2", "60", "B", "80", "B"] in lines
    assert ["in", "all", "3.0", "KiB"] in lines
    assert ["of", "1.0", "GiB"] in lines
    assert ["plain", "weights", "and", "buffers", "2.0", "KiB"] in lines
    assert ["copying", "from", "host", "memory", "250.00"] in lines
    assert "ring, to copy to" not in text
    assert "reading from the disk" not in text
    assert "used row by row, since they do not fit whole: embed" in text
    assert "host memory: 4.0 KiB page-locked\n" in text
    assert text.endswith(
        "250.0 ms for each token, 4.0 tokens/s, for up to 11 tokens; limited by copying from host memory"
    )
    plan.tiled, plan.staging, plan.ram = (), 1024, 2048
    text = render(plan, units, 11)  # type: ignore[arg-type]
    assert "row by row" not in text
    assert "host memory: 4.0 KiB page-locked, 1.0 KiB to read files to, of 2.0 KiB\n" in text


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
