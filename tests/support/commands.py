"""The command line from tests: in this process, or in one of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any


def invoke(*args: object) -> Any:
    """Run a command in this process: a new one takes seconds to import torch and transformers."""
    from typer.testing import CliRunner

    from tpde.cli import app

    return CliRunner().invoke(app, [*map(str, args)])


def process(*args: object, code: str | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command as a user would, or code that does; with what libraries print when they are imported.

    `options` are those of `subprocess.run`.
    """
    how = ["-c", code] if code is not None else ["-m", "tpde"]
    defaults = {"capture_output": True, "timeout": 300, "env": os.environ | {"PYTHONIOENCODING": "utf-8"}}
    return subprocess.run(
        [sys.executable, *how, *map(str, args)], encoding="utf-8", check=False, **(defaults | options)
    )
