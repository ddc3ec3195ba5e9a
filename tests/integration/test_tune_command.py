"""`tpde tune`: what it times, prints and writes, on a GPU that is pretended; and what it refuses."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.backends import MadeBackend
from support.checkpoints import Pair, checkpoint
from support.commands import invoke, process
from support.emulated import CPU, kernel_on_cpu
from support.models import torch
from support.pretended import on_cpu, pretended  # noqa: F401

from tpde.cli.tune import merged, render, shapes_of
from tpde.codec.windows import sections
from tpde.cuda import tuning
from tpde.cuda.product_ways import KERNELS, ways_of
from tpde.errors import InvalidInput
from tpde.weights import product_timing
from tpde.weights.product_timing import Timed

SHAPES = ("--shapes", "40x300,16x64")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A tiny Llama, plain and packed."""
    pytest.importorskip("transformers", minversion="5.13", reason="needs transformers 5.13")
    return checkpoint(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture
def card(pretended: None, launch_on: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:  # noqa: F811
    """One GPU, of which a few matrices fill the cache; where its table is."""
    launch_on(MadeBackend(kernel_on_cpu, CPU))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    few = product_timing.Sample(most_matrices=2, least_products=2, runs=2)
    monkeypatch.setattr(product_timing, "USUAL", few)
    monkeypatch.setenv("TPDE_CACHE_DIR", str(tmp_path / "cache"))
    return tuning.table_path(CPU)


def choices(path: Path) -> tuning.Choices:
    """What a table says."""
    return tuning.read_table(path, CPU, KERNELS)


def test_every_shape_and_count_is_timed_and_kept(card: Path) -> None:
    made = invoke("tune", *SHAPES, "--rows", "1, 8")
    assert made.exit_code == 0, made.output
    lines = made.stdout.splitlines()
    assert lines[0].split("  ")[0] == "shape"
    assert [line.split()[0] for line in lines[1:5]] == ["40x300", "40x300", "16x64", "16x64"]
    assert f"4 products timed on {CPU.name}, " in lines[-1]
    assert f"written to `{card}`" in lines[-1]
    assert made.stderr == ""
    found = choices(card)
    assert {shape: [*counts] for shape, counts in found.items()} == {(16, 64): [1, 8], (40, 300): [1, 8]}
    assert {label.split()[0] for counts in found.values() for label in counts.values()} == {"product"}


def test_times_as_json(card: Path) -> None:
    made = invoke("tune", "--shapes", "40x300", "--rows", 3, "--json")
    assert made.exit_code == 0, made.output
    found = json.loads(made.stdout)
    assert (found["device"], found["path"]) == (CPU.name, str(card))
    (product,) = found["products"]
    labels = [it.label for it in ways_of(CPU, sections(40, 300), 3)]
    assert (product["shape"], product["rows"], product["default"]) == ([40, 300], 3, labels[0])
    assert [*product["seconds"]] == labels
    assert all(it > 0 for it in product["seconds"].values())
    assert choices(card) == {(40, 300): {3: product["best"]}}


def test_the_fastest_is_shown_and_kept() -> None:
    found = [Timed(4096, 8192, 1, {"a": 2e-6, "b": 1e-6}), Timed(4096, 8192, 8, {"a": 1.5e-6, "b": 1.49e-6})]
    assert render(found).splitlines() == [
        "shape      fastest way  rows  default, us  fastest, us     gain",
        "4096x8192  b               1          2.0          1.0  100.0 %",
        "4096x8192  the default     8          1.5          1.5        -",
    ]
    known = {(4096, 8192): {1: "c", 64: "d"}, (1, 1): {1: "e"}}
    assert merged(known, found) == {(4096, 8192): {1: "b", 8: "a", 64: "d"}, (1, 1): {1: "e"}}
    assert known[4096, 8192] == {1: "c", 64: "d"}


def test_another_run_adds_to_the_table(card: Path) -> None:
    for shape, rows in (("40x300", "1"), ("40x300", "8"), ("16x64", "1")):
        assert invoke("tune", "--shapes", shape, "--rows", rows).exit_code == 0
    assert {shape: [*counts] for shape, counts in choices(card).items()} == {(16, 64): [1], (40, 300): [1, 8]}


def test_a_table_that_cannot_be_used_is_replaced_and_told(card: Path) -> None:
    card.parent.mkdir(parents=True)
    card.write_text("{}")
    made = invoke("tune", "--shapes", "16x64", "--rows", "1")
    assert made.exit_code == 0, made.output
    assert made.stderr == f"note: `{card}` is of another version of tpde, and is replaced\n"
    assert [*choices(card)] == [(16, 64)]


def test_a_table_elsewhere(card: Path, tmp_path: Path) -> None:
    out = tmp_path / "table.json"
    for _ in range(2):
        made = invoke("tune", "--shapes", "16x64", "--rows", "1", "-o", out, "--json")
        assert made.exit_code == 0, made.output
        assert json.loads(made.stdout)["path"] == str(out)
        assert [*choices(out)] == [(16, 64)]
    assert not card.parent.exists()


def test_shapes_are_those_of_linear_layers_packed_or_plain(llama: Pair) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(llama.plain)
    linear = {tuple(it.weight.shape) for it in model.modules() if isinstance(it, torch.nn.Linear)}
    found = shapes_of(str(llama.packed))
    assert set(found) == linear
    assert [rows * columns for rows, columns in found] == sorted(rows * columns for rows, columns in linear)
    assert shapes_of(str(llama.plain)) == found


def test_no_more_than_headers_is_read(llama: Pair, tmp_path: Path) -> None:
    shutil.copytree(llama.packed, tmp_path / "m")
    path = tmp_path / "m" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-4096:] = bytes(4096)
    path.write_bytes(data)
    assert shapes_of(str(tmp_path / "m")) == shapes_of(str(llama.packed))


def test_a_model_without_such_layers_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5.13", reason="needs transformers 5.13")
    pair = checkpoint(tmp_path, "llama", torch.float16)
    with pytest.raises(InvalidInput, match=r"no weight of .* in bfloat16 can be; name a model"):
        shapes_of(str(pair.packed))


@pytest.mark.parametrize(
    ("args", "error", "hint"),
    [
        ((), "it is not said what is timed", "name a model directory"),
        (("m", "--shapes", "16x64"), "both say what is timed", "name a model directory"),
        (("--shapes", ""), "`--shapes` names nothing", "14336x4096"),
        (("--shapes", "16x64,5"), "`5` is no shape", "14336x4096"),
        (("--shapes", "16x64x2"), "`16x64x2` is no shape", "14336x4096"),
        (("--shapes", "16x0"), "16 x 0 words .* has no window layout", "14336x4096"),
        (("--shapes", f"{10**17}x{10**17}"), "has no window layout", "14336x4096"),
        (("--shapes", "16x64", "--rows", "1,65"), "`65`: products of 1 to 64 rows can be timed", "1,2,4"),
        (("--shapes", "16x64", "--rows", "0"), "`0`: products of 1 to 64 rows can be timed", "1,2,4"),
        (("--shapes", "16x64", "--rows", "two"), "`two`: products of 1 to 64 rows can be timed", "1,2,4"),
        (("--shapes", "16x64", "--rows", ","), "`--rows` names nothing", "1,2,4"),
        (("--shapes", "16x64"), "there is no CUDA device", "whose GPU is to be tuned, or .*tpde doctor"),
        (("--shapes", "16x64", "--device", "cpu"), "on a GPU, `cpu` is none", "cuda:N"),
        (("--shapes", "16x64", "--device", "tpu"), "`tpu` is no device", "cuda:N"),
        (("nowhere/at/all",), "there is no CUDA device", "tpde doctor"),
    ],
)
def test_what_is_refused(
    args: tuple[str, ...], error: str, hint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("TPDE_CACHE_DIR", str(tmp_path / "cache"))
    made = invoke("tune", *args)
    assert (made.exit_code, made.stdout) == (2, "")
    assert re.fullmatch(f"error: .*{error}.*\nhint: .*{hint}.*\n", made.stderr), made.stderr
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("package", "error", "hint"),
    [("torch", "timing products needs torch", r"tpde\[cuda\]"), ("transformers", "no CUDA device", "doctor")],
)
def test_shapes_need_no_transformers(package: str, error: str, hint: str) -> None:
    code = f"import sys; sys.modules['{package}'] = None; from tpde.cli import main; main()"
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    made = process("tune", "--shapes", "16x64", code=code, env=env)
    assert (made.returncode, made.stdout) == (2, "")
    assert re.fullmatch(f"error: .*{error}.*\nhint: .*{hint}.*\n", made.stderr), made.stderr


def test_where_no_table_can_be_written_nothing_is_timed(card: Path, tmp_path: Path) -> None:
    made = invoke("tune", "--shapes", "16x64", "-o", tmp_path / "no" / "where")
    assert made.exit_code == 2
    assert "create the folder first" in made.stderr
    card.mkdir(parents=True)
    made = invoke("tune", "--shapes", "16x64")
    assert made.exit_code == 2
    assert f"`{card}` cannot be written" in made.stderr
