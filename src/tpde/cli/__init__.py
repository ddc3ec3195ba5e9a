"""The command line. Each command has a file of its own, and imports what it needs when it runs."""

from __future__ import annotations

import contextlib
import signal
import sys
from typing import Annotated, Any

import typer

from tpde.cli import bench, ckpt, common, diff, doctor, inspect, pack, patch, plan, run, tune, unpack, verify

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
app.command("pack")(pack.pack)
app.command("unpack")(unpack.unpack)
app.command("diff")(diff.diff)
app.command("patch")(patch.patch)
app.command("verify")(verify.verify)
app.command("inspect")(inspect.inspect)
app.command("run")(run.run)
app.command("plan")(plan.plan)
app.command("tune")(tune.tune)
app.add_typer(ckpt.app, name="ckpt")
app.add_typer(bench.app, name="bench")
app.command("doctor")(doctor.doctor)

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


def _terminated(number: int, frame: object) -> None:
    """Leave as an exception would, so that temporary files go."""
    sys.exit(128 + number)


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
    sys.exit(code if isinstance(code, int) else common.OK)


def _usage(error: Any) -> int:
    """Report a command line that is no command."""
    if type(error).__name__ == "NoArgsIsHelpError":
        print(error.ctx.get_help(), file=sys.stderr)
        return common.USAGE
    common.say("error", error.format_message(), "1;31")
    where = error.ctx.command_path if error.ctx is not None else "tpde"
    common.say("hint", f"`{where} --help` shows what there is", "1;36")
    return common.USAGE
