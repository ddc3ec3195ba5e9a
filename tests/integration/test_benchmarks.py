"""Every benchmark says what it takes, and those that need no GPU run on very little."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from support.commands import process

from benchmarks.harness import processes, runner

torch = pytest.importorskip("torch", reason="needs torch")
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="they are run on Linux"),
    # Those of other libraries, and of forks.
    pytest.mark.filterwarnings("default"),
]
EXACT = ("bits", "bytes", "words", "row", "no torch")  # of bars that no machine's speed decides
SMALL: dict[str, list[str]] = {
    "checkpoint": ["--width", "12", "--warm", "1", "--steps", "3", "--gib", "0.001"],
    "codec": ["--rows", "128", "--runs", "1"],
    "delta": ["--width", "24", "--warm", "1", "--rates", "1e-4", "--mib", "1", "--runs", "1"],
    "fine_tunes": ["--small", "--layers", "1", "--deltas", "1"],
    "many": ["--tensors", "50", "--runs", "1"],
    "memory": ["--gib", "0.01", "--tensors", "2"],
    "memory_store": ["--mib", "8", "--tensors", "2", "--shares", "0.3"],
    "pages": ["--gib", "0.0625", "--runs", "1", "--threads", "1"],
    "partial": ["--gib", "0.01"],
    "ratio": ["--rows", "128"],
    "resident": ["--shape", "tiny", "--layers", "1", "--tokens", "1", "--ways", "plain", "exact", "fused"],
    "startup": ["--runs", "1"],
    "windows": ["--mib", "2", "--runs", "1"],
    "generate": ["--shape", "tiny", "--tokens", "1", "--turns", "1", "--modes", "plain", "packed"],
}
NEEDS = {
    "fine_tunes": "transformers",
    "generate": "transformers",
    "resident": "transformers",
    "windows": "ml_dtypes",
    "checkpoint": "zstandard",
}


def run(folder: Path, name: str, options: list[str]) -> dict[str, Any]:
    """What a benchmark leaves, none of whose exact bars is missed."""
    page, data = folder / "page.md", folder / "page.json"
    code = runner.main([name, *options, "--out", str(page), "--json", str(data)])
    found: dict[str, Any] = json.loads(data.read_text("utf-8"))
    check(name, found, page.read_text("utf-8"), str(folder))
    assert code == (0 if found["passed"] else 1)
    return found


def check(name: str, found: dict[str, Any], text: str, folder: str) -> None:
    assert f"- Command: `python -m benchmarks {name}" in text
    assert folder not in text
    assert any(it.get("rows") for it in found["parts"])
    assert not [it for it in ("WRONG", "DIFFER", "OTHERS") if it in text]
    wrong = [
        it["what"] for it in found["bars"] if not it["met"] and any(word in it["what"] for word in EXACT)
    ]
    assert not wrong


def test_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert runner.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == sorted(runner.names())
    assert all(len(line.split()) > 5 for line in lines)


@pytest.mark.parametrize("name", sorted(runner.names()))
def test_each_says_what_it_takes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name in ("checkpoint", "windows") and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"needs {NEEDS[name]}")
    with pytest.raises(SystemExit) as ended:
        runner.main([name, "--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert f"usage: python -m benchmarks {name} " in said
    assert runner.names()[name] in " ".join(said.split())


def test_an_unknown_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["nothing"], []):
        with pytest.raises(SystemExit) as ended:
            runner.main(words)
        assert ended.value.code == 2
    assert "--list" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_what_needs_a_gpu_says_so() -> None:
    with pytest.raises(SystemExit, match="no CUDA device"):
        runner.main(["linear"])


@pytest.mark.parametrize("name", SMALL)
def test_it_runs_on_very_little(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    if (
        name != "memory"
    ):  # elsewhere what new interpreters would do is done here: each takes seconds to import

        def here(function: Any, *given: Any, **_: Any) -> Any:
            return function(*json.loads(json.dumps(given)))

        monkeypatch.setattr(sys, "argv", ["python"])
        monkeypatch.setattr(processes, "call", here)
        module = importlib.import_module(f"benchmarks.{name}")
        if hasattr(module, "call"):
            monkeypatch.setattr(module, "call", here)
    found = run(tmp_path, name, SMALL[name])
    if name == "generate":
        assert {it["what"] for it in found["bars"] if it["met"]} >= {"bits", "all ran"}
    if name == "resident":
        ways = [f"bits, {it}" for it in ("plain", "tpde", "tpde, fused")]
        assert found["passed"]
        assert [it["what"] for it in found["bars"]] == [*ways, "tokens and logits as plain"]


def test_a_model_with_other_bits_is_seen() -> None:
    """Of a packed weight, and of one that stays plain."""
    pytest.importorskip("transformers")
    from benchmarks.data.llama import config_of
    from benchmarks.resident import build, differing

    model = build("exact", config_of("tiny", 1), 0)
    assert differing(model, 0) == []
    packed = [name for name, it in model.named_parameters() if it.dim() == 2]
    assert differing(model, 1) == packed
    with torch.no_grad():
        model.model.norm.weight[0] = 2
    assert differing(model, 0) == ["model.norm.weight"]


FORKS = """
import sys
import benchmarks.offload
from benchmarks.harness import quiet
from benchmarks.harness.runner import main
from benchmarks.offload import decoding, work

benchmarks.offload.TURNS = 1
decoding.TIMED_SECONDS = 0.01
decoding.settle = work.settle = lambda *_: True
decoding.quiet = work.quiet = lambda: True
code = main(sys.argv[1].split())
sys.exit(10 * code + main(sys.argv[2].split()))
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_forks_make_models_run_them_and_tell(tmp_path: Path) -> None:
    """Without a GPU, no budget can be kept: that is told as a problem, and bits are compared all the same."""
    pytest.importorskip("transformers")
    pytest.importorskip("diffusers")
    files = {name: (tmp_path / f"{name}.md", tmp_path / f"{name}.json") for name in ("budgets", "offload")}
    options = {
        "budgets": "--device cpu --scale tiny --only llama",
        "offload": "--shape tiny --tokens 1 --budgets 4",
    }
    commands = [
        f"{name} {options[name]} --out {files[name][0]} --json {files[name][1]}"
        for name in ("budgets", "offload")
    ]
    environment = os.environ | {"PYTHONPATH": str(processes.ROOT)}
    done = process(*commands, code=FORKS, env=environment, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    found = {name: json.loads(data.read_text("utf-8")) for name, (_, data) in files.items()}
    for name in files:
        check(name, found[name], files[name][0].read_text("utf-8"), str(tmp_path))
    assert len(found["budgets"]["data"]["rows"]) == 8
    assert found["budgets"]["passed"]
    bars = {it["what"]: it["met"] for it in found["offload"]["bars"]}
    assert bars == {"4 GiB": False, "packed, resident, bits": True, "problems": False}
    assert "name GPUs only" in " ".join(found["offload"]["data"]["problems"])


def test_pages_that_are_there_before_anything_is_mapped() -> None:
    from benchmarks.pages import spread

    assert spread([]) == ["-"] * 4
    assert spread([3e-6, 1e-6, 2e-6]) == ["2", "2", "3", "3"]
