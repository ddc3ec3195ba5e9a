"""Components of diffusers' pipelines: their files, their dtypes, and tensors that do not fit a model."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("diffusers", reason="needs diffusers")
pytest.importorskip("accelerate", reason="needs accelerate")

from support.components import STEM, Built, component  # noqa: E402

from tpde.errors import InvalidInput, MissingDependency  # noqa: E402
from tpde.format.container import TensorSpec  # noqa: E402
from tpde.integrations.diffusers import load_model  # noqa: E402
from tpde.integrations.diffusers.dtypes import expected_dtype  # noqa: E402
from tpde.integrations.diffusers.load_model import weight_files  # noqa: E402

BF16 = torch.bfloat16


# ---- files ----


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).touch()


def test_files_of_a_component(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=f"has no `{STEM}.safetensors`"):
        weight_files(tmp_path, None)
    (tmp_path / f"{STEM}.safetensors").mkdir()
    with pytest.raises(InvalidInput, match="name the folder of one component"):
        weight_files(tmp_path, None)
    touch(tmp_path, f"{STEM}.fp16.safetensors")
    assert weight_files(tmp_path, "fp16") == [tmp_path / f"{STEM}.fp16.safetensors"]
    (tmp_path / f"{STEM}.safetensors").rmdir()
    touch(tmp_path, f"{STEM}.safetensors")
    assert weight_files(tmp_path, None) == [tmp_path / f"{STEM}.safetensors"]


@pytest.mark.parametrize(
    ("variant", "index"),
    [
        (None, f"{STEM}.safetensors.index.json"),
        ("fp16", f"{STEM}.fp16.safetensors.index.json"),
        ("fp16", f"{STEM}.safetensors.index.fp16.json"),
    ],
)
def test_shards_of_a_component(variant: str | None, index: str, tmp_path: Path) -> None:
    """The index goes before a file of all, which an older version may have left."""
    touch(tmp_path, f"{STEM}.safetensors", f"{STEM}.fp16.safetensors")
    names = {"b": "2.safetensors", "a": "1.safetensors", "c": "2.safetensors"}
    (tmp_path / index).write_text(json.dumps({"weight_map": names}))
    assert sorted(weight_files(tmp_path, variant)) == [tmp_path / "1.safetensors", tmp_path / "2.safetensors"]
    other = "fp16" if variant is None else None
    assert len(weight_files(tmp_path, other)) == 1


# ---- models ----


def specs(**tensors: tuple[str, tuple[int, ...]]) -> dict[str, TensorSpec]:
    return {name.replace("_", "."): TensorSpec(*it) for name, it in tensors.items()}


def test_the_dtype_of_most_bytes(tmp_path: Path) -> None:
    """Of those that are floats, in which the model is built then."""
    kind: Any = Built(pytest.fail)
    many = ("I64", (8192,))  # so many that they are packed
    for found, needed in (
        (specs(a=("BF16", (9,)), b=("F32", (4,)), c=many), BF16),
        (specs(a=("BF16", (9,)), b=("F32", (5,)), c=many), torch.float32),
        (specs(a=("BF16", (9,)), b=("F32", (5,)), c=("BF16", (2,)), d=many), BF16),
        (specs(c=many), torch.get_default_dtype()),
    ):
        kind.dtypes.clear()
        with pytest.raises(pytest.fail.Exception):
            load_model.load(kind, component(tmp_path, found), "cpu")
        assert kind.dtypes == [needed]


def test_what_a_class_keeps_in_32_bits() -> None:
    for kept, name, dtype in (
        (None, "a.norm.weight", BF16),
        (["norm"], "a.norm.weight", torch.float32),
        (["norm"], "a.norm2.weight", BF16),
        (["x", "a"], "a.norm.weight", torch.float32),
    ):
        assert expected_dtype(kept, name, BF16) is dtype


def test_tensors_that_a_model_has_not_or_lacks(tmp_path: Path) -> None:
    found = specs(weight=("BF16", (64, 128)), bias=("BF16", (64,)))
    kind: Any = Built(lambda: torch.nn.Linear(128, 64))
    at, packed = re.escape(str(tmp_path)), TensorSpec("BF16", (8192,))
    for changed, said, where in (
        ({"bias": None}, f"`{at}` lacks `bias`, which a Linear has", "bias"),
        ({"bias": None, "weight": None}, r"lacks `weight`, which a Linear has \(2 tensors\)", "weight"),
        ({"more": packed}, f"`{at}` has `more`, which a Linear has not", "more"),
        ({"bias": packed}, rf"`bias` has shape \[8192\] in `{at}`.* needs \[64\]", "bias"),
    ):
        given = {name: it for name, it in (found | changed).items() if it is not None} or {"more": packed}
        with pytest.raises(InvalidInput, match=said) as caught:
            load_model.load(kind, component(tmp_path, given), "cpu")
        assert caught.value.where == where
        assert ("tensors)" in str(caught.value)) == ("2 tensors" in said)


def test_a_component_is_built_in_its_dtype(tmp_path: Path) -> None:
    """Which is the default one meanwhile, whatever happens; buffers are computed, parameters are not."""

    class Kind:
        fails = False

        @staticmethod
        def load_config(folder: Path) -> dict[str, Any]:
            assert folder == tmp_path
            return {"size": 3, "quantization_config": {"quant_method": "tpde"}}

        @classmethod
        def from_config(cls, config: dict[str, Any]) -> Any:
            assert config == {"size": 3}
            if cls.fails:
                raise ValueError("no such model")
            made = torch.nn.Linear(3, 3)
            made.register_buffer("places", torch.ones(3))
            return made

    before = torch.get_default_dtype()
    made: Any = load_model.build(Kind, tmp_path, torch.float16)  # type: ignore[type-var]
    assert (made.weight.device.type, made.weight.dtype) == ("meta", torch.float16)
    assert (made.places.device.type, made.places.dtype) == ("cpu", torch.float16)
    assert not made.training
    assert torch.get_default_dtype() is before
    Kind.fails = True
    with pytest.raises(ValueError, match="no such model"):
        load_model.build(Kind, tmp_path, torch.float16)  # type: ignore[type-var]
    assert torch.get_default_dtype() is before


@pytest.mark.parametrize("missing", ["diffusers", "accelerate"])
def test_libraries_that_are_missing(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(MissingDependency, match=r'pip install "tpde\[diffusers\]"'):
        load_model.build(torch.nn.Linear, Path("x"), BF16)
