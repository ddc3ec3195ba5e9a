"""Copies of the tree, and the shared library of one whose C was changed."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import subprocess
from pathlib import Path

from .mutant import ROOT, Mutant

# What tests read beside the package; the rest of the repository is of no use to them.
_PARTS = ("src", "csrc", "tests", "docs", "benchmarks", "examples", "pyproject.toml", "CMakeLists.txt")
_FILES = ("README.md", "constraints.txt", "Makefile", "CONTRIBUTING.md", "CHANGELOG.md", "mkdocs.yml")
_LIBRARY = "src/tpde/libtpde.so"
# As in CMakeLists.txt, but for -O3, which takes three times as long to compile and changes no result.
_FLAGS = ["-std=gnu11", "-O1", "-fPIC", "-fvisibility=hidden", "-pthread"]
_SETS = {
    "kernels_avx2": ["-mavx2", "-mbmi2"],
    "kernels_avx512": ["-mavx512f", "-mavx512bw", "-mavx512vbmi2", "-mbmi2"],
}
_X86 = platform.machine() in ("x86_64", "AMD64")


class DoesNotCompile(Exception):
    """A mutant of the core is no C."""


def copy_tree(source: Path, target: Path) -> None:
    """Copy what the tests need."""
    for name in (*_PARTS, *_FILES):
        path = source / name
        if path.is_dir():
            shutil.copytree(path, target / name)
        elif path.exists():
            target.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target / name)


def copy_library(target: Path) -> None:
    """Put the library of the package that is installed into a copy that has none.

    Raises
    ------
    FileNotFoundError
        If it is nowhere.
    """
    if not (target / _LIBRARY).exists():
        # Imported here, the package would be that of forked runs, too.
        package = importlib.util.find_spec("tpde")
        if package is None or package.origin is None:
            raise FileNotFoundError("tpde is not installed: its library is not found")
        shutil.copy2(Path(package.origin).parent / "libtpde.so", target / _LIBRARY)


class Core:
    """Compiles the core; files that a mutant leaves alone are compiled once.

    Parameters
    ----------
    folder : Path
        Where objects are kept.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def build(self, tree: Path, mutant: Mutant) -> None:
        """Put the library of a changed tree into it.

        Raises
        ------
        DoesNotCompile
            With what the compiler says.
        """
        objects = []
        for source in sorted((ROOT / "csrc").glob("*.c")):
            if source.stem in _SETS and not _X86:
                continue
            same = mutant.file.endswith(".c") and not mutant.file.endswith(f"/{source.name}")
            made = (self._folder if same else tree) / f"{source.stem}.o"
            if not made.exists():
                _compile((ROOT if same else tree) / "csrc" / source.name, made)
            objects.append(made)
        _run(["cc", "-shared", "-pthread", "-o", str(tree / _LIBRARY), *map(str, objects)])


def _compile(source: Path, made: Path) -> None:
    have = ["-DTPDE_HAVE_AVX2", "-DTPDE_HAVE_AVX512"] if _X86 else []
    _run(["cc", *_FLAGS, *have, *_SETS.get(source.stem, []), "-c", str(source), "-o", str(made)])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise DoesNotCompile(done.stderr)
