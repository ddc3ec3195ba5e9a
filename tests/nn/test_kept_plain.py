"""Which weights stay plain, by what is called and whose class it is."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
nn = torch.nn

from tpde.nn.unpackable import kept_plain  # noqa: E402

ATTENTION = ["out_proj.weight"]
LAYER = ["linear1.weight", "linear2.weight", "self_attn.out_proj.weight"]


def attention() -> Any:
    return nn.MultiheadAttention(8, 2)


def layer() -> Any:
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)


def under(path: str, names: list[str]) -> list[str]:
    return [f"{path}.{name}" for name in names]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (attention, ATTENTION),
        (layer, LAYER),
        (lambda: nn.TransformerEncoder(layer(), 2), under("layers.0", LAYER)),
        (lambda: nn.ModuleDict({"a": attention()}), under("a", ATTENTION)),
        (lambda: nn.ModuleDict({"a": layer(), "b": nn.Linear(4, 4)}), under("a", LAYER)),
        (lambda: nn.ModuleDict({"a": nn.TransformerEncoder(layer(), 2)}), under("a.layers.0", LAYER)),
        # In a block they find weights that are decoded.
        (lambda: nn.ModuleList([attention(), layer()]), []),
        (lambda: nn.ModuleDict({"a": nn.ModuleList([nn.Sequential(layer())])}), []),
        (lambda: nn.ModuleList([nn.ModuleDict({"b": layer()})]), under("0.b", LAYER)),  # called by itself
        (lambda: nn.Linear(4, 4), []),
    ],
)
def test_weights_that_pytorchs_transformers_look_at(make: Any, expected: list[str]) -> None:
    found = kept_plain(make())
    assert sorted(found) == sorted(expected)
    assert all("choose kernels by" in it for it in found.values())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("SwitchTransformersTop1Router", ["classifier.weight"]),
        ("NllbMoeTop2Router", ["classifier.weight"]),
        ("RwkvBlock", ["attention.output.weight", "feed_forward.value.weight"]),
        ("Block", []),
    ],
)
def test_weights_that_models_change(name: str, expected: list[str]) -> None:
    """In blocks, too; by the class, or one that it inherits."""
    kind = type(name, (nn.Module,), {})
    mine = type("Mine", (kind,), {})
    for it in (kind, mine):
        for model, path in ((it(), ""), (nn.ModuleList([it()]), "0."), (nn.ModuleDict({"a": it()}), "a.")):
            found = kept_plain(model)
            assert sorted(found) == [f"{path}{one}" for one in expected]
            assert all("is changed by the model" in reason for reason in found.values())


def test_both_are_kept() -> None:
    model = nn.ModuleDict({"a": attention(), "r": type("NllbMoeTop2Router", (nn.Module,), {})()})
    assert sorted(kept_plain(model)) == ["a.out_proj.weight", "r.classifier.weight"]
