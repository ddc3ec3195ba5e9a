"""A command line to run, and small files to run it on."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
from support.cli import Outcome, Run, signals_kept, weights

from tpde.cli import main


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Run the command line in this process."""

    def call(*args: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["tpde", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            main()
        return Outcome(int(ended.value.code or 0), *capsys.readouterr())

    with signals_kept():
        yield call


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A safetensors file."""
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file(weights(), path, metadata={"format": "pt"})
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model directory of two shards."""
    folder = tmp_path / "model"
    folder.mkdir()
    index: dict[str, str] = {}
    for i in range(2):
        name = f"model-{i + 1:05}-of-00002.safetensors"
        tensors = {f"{i}.{k}": v for k, v in weights(i).items()}
        safetensors.torch.save_file(tensors, folder / name)
        index |= dict.fromkeys(tensors, name)
    text = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)
    (folder / "config.json").write_text('{"model_type": "test"}')
    return folder
