"""A model, an older one where it goes, and the ways in which systems replace."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support import renames
from support.contents import fill, spec_of
from support.files import safetensors_bytes


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Give a model of one file."""
    folder = tmp_path / "model"
    folder.mkdir()
    spec = spec_of("BF16", 2_000)
    tensors = {"w": (spec, fill("normal", spec))}
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    (folder / "config.json").write_text('{"a": "new"}')
    return folder


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """Give an older model where the new one goes, with things in it that are not the model's."""
    folder = tmp_path / "there"
    (folder / ".cache" / "deep").mkdir(parents=True)
    (folder / "config.json").write_text('{"a": "old"}')
    (folder / ".cache" / "deep" / "notes").write_text("notes")
    (folder / "link").symlink_to("/nowhere")
    os.mkfifo(folder / "pipe")
    (folder / "logs").mkdir()
    return folder


@pytest.fixture(params=["exchange", "two renames"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Replace as this system can, and as others do."""
    if request.param == "two renames":
        renames.missing(monkeypatch)
    return str(request.param)
