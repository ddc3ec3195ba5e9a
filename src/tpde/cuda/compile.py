"""Compiling kernels with NVRTC at first use, and keeping them on disk.

A cache entry is a file named by the hash of all that it depends on: source, options, architecture and
NVRTC's version. It starts with the hash of what follows, so that a damaged entry is a miss. Entries are
written under another name and renamed: several processes may do so at once.
"""

from __future__ import annotations

import functools
import hashlib
import io
import os
import re
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from tpde.cuda.capability import INSTALL, bindings, cuda_core
from tpde.errors import CompileError, InvalidDestination, InvalidInput, MissingDependency
from tpde.io.sinks import FileSink
from tpde.io.sources import open_regular

_MOST_BYTES = 64 << 20  # of an entry; kernels have less than 1 MiB


@functools.cache
def source_text(source: str) -> str:
    """The text of a kernel file, with the texts of those that it includes by `#include "NAME"`."""
    text = (Path(__file__).parent / "kernels" / source).read_text(encoding="utf-8")
    return re.sub(r'^#include "([\w.]+)"$', lambda found: source_text(found[1]), text, flags=re.MULTILINE)


class Compiler(Protocol):
    """What compiles kernels."""

    def text(self, source: str) -> str:
        """The text of a file of `tpde/cuda/kernels`, and of what it includes."""

    def version(self) -> tuple[int, int]:
        """The CUDA version that it is of.

        Raises
        ------
        MissingDependency
            If it is not installed.
        """

    def cubin(self, source: str, defines: Mapping[str, int], arch: str) -> tuple[bytes, str]:
        """Compile a kernel file; needs neither a GPU nor a driver.

        Parameters
        ----------
        source : str
            A file of `tpde/cuda/kernels`.
        defines : mapping of str to int
            Macros.
        arch : str
            `sm_90`, for example; `sm_90a` for what only such devices run.

        Returns
        -------
        code : bytes
            The cubin.
        log : str
            What the assembler says of registers, spills and shared memory.

        Raises
        ------
        CompileError
            With the compiler's log.
        """


class Nvrtc:
    """NVRTC.

    Parameters
    ----------
    calls : module, optional
        How it is asked for its version; by default `cuda.bindings.nvrtc`, loaded when it is first needed.
    """

    def __init__(self, calls: Any = None) -> None:
        self._calls = calls
        self._version: tuple[int, int] | None = None

    def text(self, source: str) -> str:
        """The text of a kernel file: see `source_text`."""
        return source_text(source)

    def version(self) -> tuple[int, int]:
        """The version of the NVRTC at hand."""
        if self._version is None:
            nvrtc = bindings()[1] if self._calls is None else self._calls
            try:
                code, major, minor = nvrtc.nvrtcVersion()
            except RuntimeError as error:  # DynamicLibNotFoundError among them
                raise MissingDependency(
                    f"kernels are compiled by NVRTC, whose library was not found ({error})",
                    hint=f"{INSTALL}, or install `nvidia-cuda-nvrtc` of the driver's major version",
                ) from error
            if int(code):
                raise MissingDependency(f"NVRTC does not work: {code.name}", hint=f"reinstall it: {INSTALL}")
            self._version = int(major), int(minor)
        return self._version

    def cubin(self, source: str, defines: Mapping[str, int], arch: str) -> tuple[bytes, str]:
        """Compile a kernel file; needs neither a GPU nor a driver."""
        version = self.version()
        log = io.StringIO()
        options = cuda_core().ProgramOptions(
            name=source,
            arch=arch,
            std="c++17",
            define_macro=[(name, str(value)) for name, value in sorted(defines.items())] or None,
            ptxas_options="-v",
        )
        try:
            program = cuda_core().Program(self.text(source), "c++", options)
            made = program.compile("cubin", logs=log)
        except Exception as error:  # cuda.core raises classes of its own, of bindings and of the linker
            raise CompileError(
                f"NVRTC {'.'.join(map(str, version))} refused {source} for {arch}: {error}"
            ) from error
        return bytes(made.code), log.getvalue()


def cache_directory() -> Path:
    """Where compiled kernels are kept: `TPDE_CACHE_DIR`, or `tpde` in the user's cache directory."""
    chosen = os.environ.get("TPDE_CACHE_DIR")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or _home() / ".cache") / "tpde"


def _home() -> Path:
    """The user's home; where nothing can be kept, if none is known, as of a number without a name."""
    try:
        return Path.home()
    except RuntimeError:
        return Path(os.devnull)


class Cubins:
    """Compiled kernels, kept on the disk.

    Parameters
    ----------
    compiler : Compiler
        What compiles those that are not there.
    """

    def __init__(self, compiler: Compiler) -> None:
        self.compiler = compiler
        self._said: set[str] = set()
        self._lock = threading.Lock()
        self._being_made: dict[Path, threading.Lock] = {}  # several kernels may be in one of them

    def get(self, source: str, defines: Mapping[str, int], arch: str) -> bytes:
        """A kernel file, compiled, from the disk if it is there: see `Compiler.cubin`."""
        compiler = self.compiler
        facts_of_it = repr((compiler.text(source), sorted(defines.items()), arch, compiler.version()))
        path = cache_directory() / "kernels" / f"{hashlib.sha256(facts_of_it.encode()).hexdigest()}.cubin"
        with self._lock:
            making = self._being_made.setdefault(path, threading.Lock())
        with making:
            return self._kept(path) or self._made(path, source, defines, arch)

    def _kept(self, path: Path) -> bytes:
        """An entry that is there and whole, or nothing."""
        try:
            with os.fdopen(open_regular(path), "rb") as file:
                entry = file.read(_MOST_BYTES + 1)
        except (OSError, InvalidInput):
            return b""
        if len(entry) > _MOST_BYTES:
            return b""
        if len(entry) > 32 and hashlib.sha256(entry[32:]).digest() == entry[:32]:
            return entry[32:]
        return b""

    def _made(self, path: Path, source: str, defines: Mapping[str, int], arch: str) -> bytes:
        code, _ = self.compiler.cubin(source, defines, arch)
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            sink = FileSink(path, force=True)
            try:
                sink.write(0, [hashlib.sha256(code).digest(), code])
                sink.commit()
            finally:
                sink.abort()  # nothing, once it is committed
        except (OSError, InvalidDestination) as error:
            self._warn_once(
                f"compiled kernels cannot be kept in `{path.parent}` ({error}); every process compiles them "
                "again: set TPDE_CACHE_DIR to a directory that can be written"
            )
        return code

    def _warn_once(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            warnings.warn(message, RuntimeWarning, stacklevel=4)
