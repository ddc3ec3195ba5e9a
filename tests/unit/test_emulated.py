"""Kernels on the CPU: how they are compiled for tests."""

from __future__ import annotations

import shutil
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from support import emulated


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_a_kernel_that_several_threads_ask_for_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one loads a file that another is writing."""
    ran, begin = list[Any](), threading.Barrier(4)

    def run(*given: Any, **more: Any) -> Any:
        ran.append(given)
        return subprocess.run(*given, **more)  # noqa: PLW1510

    def ask(number: int) -> Any:
        begin.wait()
        return emulated.compiled("digest.cu", (("FOR_THREADS", 1),))

    monkeypatch.setattr(emulated, "subprocess", SimpleNamespace(run=run))
    with ThreadPoolExecutor(4) as threads:
        libraries = list(threads.map(ask, range(4)))
    assert all(it is libraries[0] for it in libraries)
    assert len(ran) == 1
