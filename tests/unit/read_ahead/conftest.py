"""Page-locking without a device, and a file that is read ahead."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.locking import FakeLock
from support.read_ahead import SIZE, soon, threads

from tpde.io.sources import FileSource


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeLock]:
    """Afterwards nothing is locked, and no thread left."""
    monkeypatch.delenv("TPDE_HOST_MEMORY", raising=False)
    made = FakeLock()
    yield made
    gc.collect()
    soon(lambda: not threads(), "threads are left")
    assert not made.locked


@pytest.fixture(scope="module")
def data() -> bytes:
    return os.urandom(SIZE)


@pytest.fixture
def source(tmp_path: Path, data: bytes) -> Iterator[FileSource]:
    (tmp_path / "blobs").write_bytes(data)
    made = FileSource(tmp_path / "blobs")
    yield made
    made.close()
