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


def process(*args: object, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a user would, with what libraries print when they are imported."""
    return subprocess.run(
        [sys.executable, "-m", "tpde", *map(str, args)],
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
        env=os.environ | {"PYTHONIOENCODING": "utf-8"} | env,
        timeout=300,
    )
