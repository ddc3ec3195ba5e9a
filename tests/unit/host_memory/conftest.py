"""Page-locking without a device, and a file that goes to host memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.host import MIB
from support.locking import FakeLock

from tpde.io.sources import FileSource


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeLock:
    monkeypatch.delenv("TPDE_HOST_MEMORY", raising=False)
    return FakeLock()


@pytest.fixture
def source(tmp_path: Path) -> Iterator[FileSource]:
    (tmp_path / "blobs").write_bytes(os.urandom(5 * MIB + 77))
    made = FileSource(tmp_path / "blobs")
    yield made
    made.close()
