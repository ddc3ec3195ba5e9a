"""Packed weights are installed under all of their names, and tied where the files have them once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", minversion="5.13", reason="needs transformers 5.13")

from tpde.integrations.transformers import packed_parameters  # noqa: E402
from tpde.loading.checkpoint_files import Checkpoint  # noqa: E402
from tpde.nn import packed_modules  # noqa: E402
from tpde.torch import save_file  # noqa: E402

CPU = torch.device("cpu")
EMBED, HEAD = "embed.weight", "head.weight"


@pytest.mark.parametrize(
    ("runs", "parts", "same", "left", "tied"),
    [
        ([EMBED, HEAD], [EMBED, HEAD], True, {EMBED: EMBED, HEAD: EMBED}, True),
        ([EMBED, HEAD], [EMBED, HEAD], False, {EMBED: EMBED, HEAD: HEAD}, False),
        ([EMBED, HEAD], [HEAD], True, {}, True),  # under a budget, the embedding is plain
        ([EMBED, HEAD], [], True, {}, True),
        ([EMBED], [EMBED], False, {EMBED: EMBED}, True),
        ([HEAD], [HEAD], False, {HEAD: HEAD}, True),
        ([], [], False, {}, True),
    ],
)
def test_tied_weights_that_are_both_in_the_files(
    runs: list[str],
    parts: list[str],
    same: bool,
    left: dict[str, str],
    tied: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    weight = torch.randn(64, 64).to(torch.bfloat16)
    save_file({EMBED: weight, HEAD: weight * (1 if same else 2)}, tmp_path / "x")
    model = SimpleNamespace(all_tied_weights_keys={HEAD: EMBED})
    found: dict[str, Any] = {name: name for name in parts}
    with Checkpoint([tmp_path / "x"]) as files:
        packed_parameters.tie(model, {name: files.packed[name].run for name in runs}, found)
    assert found == left
    assert model.all_tied_weights_keys == ({HEAD: EMBED} if tied else {})
    assert ("they are not tied" in caplog.text) == (not tied)


def test_weights_are_installed_under_all_of_their_names(tmp_path: Path) -> None:
    """Those that are tied become one; a second path to the same module changes nothing."""
    model: Any = torch.nn.Module()
    model.a, model.b, model.c = (torch.nn.Linear(64, 64, bias=False) for _ in range(3))
    model.b.weight = model.a.weight
    model.again = model.a
    model.c.weight.requires_grad_(False)
    save_file({"one": torch.randn(64, 64), "other": torch.randn(64, 64)}, tmp_path / "x")
    with Checkpoint([tmp_path / "x"]) as files:
        runs = {name: it.run for name, it in files.packed.items()}
        found = files.open(runs, dict.fromkeys(runs, CPU))
    parts = {"a.weight": found["one"], "b.weight": found["one"], "c.weight": found["other"]}
    packed_parameters.install(model, parts)
    assert model.a.weight is model.b.weight
    assert (model.a.weight.packed, model.c.weight.packed) == (found["one"], found["other"])
    assert (model.a.weight.plain_requires_grad, model.c.weight.plain_requires_grad) == (True, False)
    assert {path for path, _ in packed_modules(model)} == {"a", "b", "c"}
