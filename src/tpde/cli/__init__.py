"""The command line. Each command has a file of its own, and imports what it needs when it runs."""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import sys
import time
from typing import Annotated, Any

import typer

from tpde.cli import bench, ckpt, common, diff, doctor, inspect, pack, patch, plan, run, tune, unpack, verify
from tpde.cli.command import Command

app = typer.Typer(
    name="tpde",
    help="Make neural-network weights small without changing one bit.\n\n"
    "Example: tpde pack model.safetensors packed.safetensors",
    epilog=common.EXIT_CODES,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("pack", cls=Command)(pack.pack)
app.command("unpack", cls=Command)(unpack.unpack)
app.command("diff", cls=Command)(diff.diff)
app.command("patch", cls=Command)(patch.patch)
app.command("verify", cls=Command)(verify.verify)
app.command("inspect", cls=Command)(inspect.inspect)
app.command("run", cls=Command)(run.run)
app.command("plan", cls=Command)(plan.plan)
app.command("tune", cls=Command)(tune.tune)
app.add_typer(ckpt.app, name="ckpt")
app.add_typer(bench.app, name="bench")
app.command("doctor")(doctor.doctor)

_PAUSE = 0.01  # seconds until a process that could not be terminated is told again

_UsageError: Any = typer.BadParameter.__mro__[1]  # typer has click's, but not always from click


def _version(wanted: bool) -> None:
    if wanted:
        from tpde import __version__

        print(f"tpde {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


class _Terminated(SystemExit):
    """A signal that ends this process as an exception would, so that temporary files go."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number


def _terminated(number: int, frame: object) -> None:
    sys.unraisablehook = _swallowed
    raise _Terminated(number)


def _swallowed(found: Any) -> None:
    """Try again when Python has ignored it, as it ignores all that is raised in a finalizer."""
    if isinstance(found.exc_value, _Terminated):
        # Not here, which is in the finalizer; and by no `Thread`, whose locks it may have come upon.
        _thread.start_new_thread(_again, (found.exc_value.number,))
    else:
        sys.__unraisablehook__(found)


def _again(number: int) -> None:
    time.sleep(_PAUSE)
    os.kill(os.getpid(), number)


def _end_when_told() -> None:
    """Let termination end this process, and a terminal that is closed, unless that is to be ignored."""
    signal.signal(signal.SIGTERM, _terminated)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under `nohup`
        signal.signal(signal.SIGHUP, _terminated)


def main() -> None:
    """Run the command that the process's arguments name, and exit."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):  # names that the locale cannot write are escaped
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    _end_when_told()
    try:
        code = app(prog_name="tpde", standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()
    except KeyboardInterrupt:
        code = common.INTERRUPTED
    except _UsageError as error:
        code = _usage(error)
    except OSError as error:  # of help and the version; commands tell their own
        code = common.unwritten(error)
    except SystemExit as error:  # by which typer ends a process that nobody listens to, with 1
        if isinstance(error, _Terminated) or not isinstance(error.__context__, BrokenPipeError):
            raise
        code = common.unwritten(error.__context__)
    sys.exit(code if isinstance(code, int) else common.OK)


def _usage(error: Any) -> int:
    """Report a command line that is no command."""
    if type(error).__name__ == "NoArgsIsHelpError":
        common.tell(error.ctx.get_help())
        return common.USAGE
    common.say("error", error.format_message(), "1;31")
    where = error.ctx.command_path if error.ctx is not None else "tpde"
    common.say("hint", f"`{where} --help` shows what there is", "1;36")
    return common.USAGE
