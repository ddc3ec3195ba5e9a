"""The C API works from C, by its one header, as the example shows."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_example(tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    assert compiler, "a C compiler is needed to build the package, so it is there"
    program = tmp_path / "c_api"
    sources = sorted((ROOT / "csrc").glob("*.c"))
    command = [compiler, "-std=gnu11", "-O1", "-Wall", "-Werror", f"-I{ROOT / 'csrc'}"]
    command += [str(ROOT / "examples" / "c_api.c"), *map(str, sources), "-lpthread", "-o", str(program)]
    subprocess.run(command, check=True)
    result = subprocess.run([program], check=True, capture_output=True, text=True)
    assert "bit for bit (portable)" in result.stdout
