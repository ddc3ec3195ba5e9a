"""The page that names the files on a reader's way: short enough, and true."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from support.budgets import every, load, simulated
from support.checkpoints import checkpoint
from support.locking import FakeLock
from support.models import outputs, torch

from .conftest import DOCS, ROOT

SOURCES = ROOT / "src" / "tpde"
# How many files follow a heading at most; under a budget what stays resident is loaded, too.
MOST = {
    "Load a model": 20,
    "Run a block": 8,
    "Load a model under a budget": 35 - 20,
    "Run a streamed block": 12,
}
ON_GPUS = {"weights/launch.py", "cuda/decode.py", "cuda/kernels/decode.cu"}
SIMULATED = {"streaming/cuda_device.py", "planning/budget.py"}  # `support.budgets` has its own


def _ways() -> dict[str, list[tuple[str, str]]]:
    _, *sections = re.split(r"^## ", (DOCS / "notes/reading.md").read_text("utf-8"), flags=re.MULTILINE)
    return {
        it.split("\n", 1)[0]: re.findall(r"^\d+\. `(\S+)`, `(\S+)`:", it, re.MULTILINE) for it in sections
    }


def _names(file: Path) -> set[str]:
    if file.suffix == ".cu":
        return set(re.findall(r"\b(\w+)\(", file.read_text("utf-8")))
    found = set()
    for node in ast.parse(file.read_text("utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{it.name}" for it in node.body if isinstance(it, ast.FunctionDef)}
    return found


def test_ways_are_short() -> None:
    ways = _ways()
    assert list(ways) == list(MOST)
    for heading, way in ways.items():
        assert 0 < len(way) <= MOST[heading]
        assert len({file for file, _ in way}) == len(way)
    assert not {it for it, _ in ways["Load a model"]} & {it for it, _ in ways["Load a model under a budget"]}


@pytest.mark.parametrize("heading", MOST)
def test_files_have_what_is_named(heading: str) -> None:
    for file, name in _ways()[heading]:
        assert name in _names(SOURCES / file), f"{file}: {name}"


_RUN = """
import sys, threading
import torch, typer.testing
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from tokenizers import Tokenizer, models
import tpde
from tpde.cli import app

config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
LlamaForCausalLM(config).bfloat16().save_pretrained("plain")
words = {f"w{i}": i for i in range(255)} | {"?": 255}
tokenizer = Tokenizer(models.WordLevel(words, "?"))
PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained("plain")
tpde.pack("plain", "packed")
seen = set()

def note(frame, event, argument):
    if event == "call":
        code = frame.f_code
        seen.add(code.co_filename.replace("\\\\", "/").rpartition("/tpde/")[2] + " " + code.co_name)

threading.setprofile(note)
sys.setprofile(note)
arguments = ["run", "packed", "--prompt", "w1 w2", "--device", "cpu", "--max-new-tokens", "2"]
result = typer.testing.CliRunner().invoke(app, arguments, catch_exceptions=False)
sys.setprofile(None)
assert result.exit_code == 0, result.output
print("\\n".join("RAN " + it for it in seen))
"""


def test_a_resident_model_goes_this_way(tmp_path: Path) -> None:
    """On a CPU, which launches nothing. Importing a file is not running it."""
    done = subprocess.run(
        [sys.executable, "-c", _RUN], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    calls = re.findall(r"^RAN (\S+) (\S+)$", done.stdout, re.MULTILINE)
    ran = {file for file, name in calls if _is_function(name)}
    ways = _ways()
    for file, _ in ways["Load a model"] + ways["Run a block"]:
        assert file in ran or file in ON_GPUS, file


def _is_function(name: str) -> bool:
    """And not the body of a module or a class, which runs when it is imported."""
    return name[0] != "<" and not name.lstrip("_")[0].isupper()


def test_a_streamed_model_goes_this_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a device that is simulated, and host memory that is locked for none."""
    pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")
    ran: set[str] = set()

    def note(frame: Any, event: str, argument: object) -> None:
        if event == "call" and _is_function(frame.f_code.co_name):
            ran.add(frame.f_code.co_filename.replace("\\", "/").rpartition("/tpde/")[2])

    pair = checkpoint(tmp_path, "llama")
    ways = _ways()
    with simulated(monkeypatch, every("host"), page_lock=FakeLock()):
        threading.setprofile(note)
        sys.setprofile(note)
        try:
            model = load(pair.packed)
            loaded = ran.copy()
            ran.clear()
            with torch.no_grad():
                outputs("llama", model, 2)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
        model.tpde_streamer.close()
    for found, heading in ((loaded, "Load a model under a budget"), (ran, "Run a streamed block")):
        missed = {file for file, _ in ways[heading]} - found - ON_GPUS - SIMULATED
        assert not missed, (heading, missed)
