"""`tpde.register`, and the names that `tpde` exports."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import tpde
from tpde import errors
from tpde.integrations import register as registering


def _said(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
def test_a_registered_library_loads_packed_models(tmp_path: Path) -> None:
    """In a process of its own, which imports nothing of tpde's integrations."""
    code = f"""
import torch, transformers, tpde
config = transformers.LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
                                  num_attention_heads=2)
torch.manual_seed(0)
transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained({str(tmp_path / "plain")!r})
tpde.pack({str(tmp_path / "plain")!r}, {str(tmp_path / "packed")!r})
print(tpde.register("transformers"), tpde.register("transformers"))
plain = transformers.AutoModelForCausalLM.from_pretrained({str(tmp_path / "plain")!r})
packed = transformers.AutoModelForCausalLM.from_pretrained({str(tmp_path / "packed")!r})
ids = torch.arange(8)[None]
print(torch.equal(packed(ids).logits.view(torch.int16), plain(ids).logits.view(torch.int16)))
print(type(packed.model.layers[0].mlp.up_proj.weight).__name__)
"""
    said = _said(code).splitlines()
    assert said == ["('transformers',) ('transformers',)", "True", "PackedParameter"]


def test_without_names_all_that_are_installed_are_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    register = tpde.register  # which is imported now
    there, imported = {"transformers"}, []
    monkeypatch.setattr(registering, "find_spec", lambda name: name in there or None)
    monkeypatch.setattr(registering.importlib, "import_module", imported.append)
    assert register() == ("transformers",)
    assert imported == ["tpde.integrations.transformers"]
    with pytest.raises(errors.MissingDependency, match="diffusers is not installed") as caught:
        register("transformers", "diffusers")
    assert caught.value.hint == 'run `pip install "tpde[diffusers]"`'
    there.clear()
    with pytest.raises(errors.MissingDependency, match="neither transformers nor diffusers"):
        register()


@pytest.mark.skipif(find_spec("diffusers") is None, reason="needs diffusers")
def test_a_diffusers_that_asks_nobody_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    from tpde.integrations.diffusers import quantizer

    monkeypatch.setattr(quantizer, "IS_ASKED", False)
    with pytest.raises(errors.MissingDependency, match="refuses packed components"):
        tpde.register("diffusers")
    assert "diffusers" not in tpde.register()


def test_other_libraries_are_refused() -> None:
    with pytest.raises(errors.InvalidArgument, match="no library `jax`"):
        tpde.register("jax")


@pytest.mark.parametrize(
    "name", [name for name, it in vars(errors).items() if inspect.isclass(it) and issubclass(it, Exception)]
)
def test_every_error_is_of_tpde(name: str) -> None:
    found: Any = getattr(tpde, name)
    assert found is getattr(errors, name)
    assert issubclass(found, tpde.TpdeError)
    assert name in tpde.__all__
