"""What is relied on in vLLM, looked for in the version that is installed."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
from support.models import torch

from tpde.errors import InvalidInput

pytest.importorskip("vllm.version", reason="vLLM is not installed: `make test-vllm` runs these")
pytestmark = pytest.mark.quick


def find(name: str) -> object:
    """What a dotted name below `vllm` stands for: an attribute, maybe of a class, of the longest module.

    Of an attribute that a class gives its instances, the name.
    """
    parts = ["vllm", *name.split(".")]
    for count in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            made = getattr(getattr(found, "__init__", None), "__code__", None)
            found = part if made and part in made.co_names else getattr(found, part)
        return found
    raise AttributeError(name)


def test_all_that_is_relied_on_is_there() -> None:
    from vllm.version import __version_tuple__

    from tpde.integrations.vllm.relied_on import RELIED_ON, SINCE

    missing = {}
    for name, breaks in RELIED_ON.items():
        if __version_tuple__[:2] < SINCE.get(name, (0, 0)):
            continue
        try:
            find(name)
        except AttributeError:
            missing[name] = breaks
    assert missing == {}
    for name in ("utils.nothing_of_this_name", "offloader.prefetch.PrefetchOffloader.nothing"):
        with pytest.raises(AttributeError):
            find(f"model_executor.{name}")


def test_what_computes_with_tensors_has_these_names() -> None:
    """Or its module is not in this version. Not imported: some need what the CPU build has not."""
    from pathlib import Path

    from tpde.integrations.vllm.relied_on import COMPUTING

    for name in COMPUTING:
        module, _, last = name.rpartition(".")
        spec = importlib.util.find_spec(f"vllm.{module}")
        if spec is not None:
            assert f"class {last}(" in Path(str(spec.origin)).read_text()


@pytest.mark.parametrize("computes", [True, False])
def test_what_is_computed_with_stays_on_the_host(computes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Molmo puts a large tensor, for which there is no room on the device, and a small one together."""
    from vllm.config import LoadConfig
    from vllm.model_executor.model_loader import DefaultModelLoader
    from vllm.model_executor.models.molmo import MolmoForCausalLM

    from tpde.integrations.vllm import adjacent_tensors, internals, loader

    class Adapted(MolmoForCausalLM):  # type: ignore[misc]
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)

    files = [("wte.embedding", torch.ones(64, 64)), ("wte.new_embedding", torch.ones(2, 64))]
    monkeypatch.setattr(internals, "takes_all_weights", lambda: True)
    monkeypatch.setattr(adjacent_tensors, "free_bytes", lambda device: 8 * files[1][1].nbytes)
    monkeypatch.setattr(DefaultModelLoader, "get_all_weights", lambda *_: iter(files))
    config = SimpleNamespace(quantization="tpde")
    model = torch.nn.Sequential(Adapted() if computes else torch.nn.Linear(2, 2))
    coming = loader.TpdeModelLoader(LoadConfig()).get_all_weights(config, model)
    moved = [tensor is not given for (_, tensor), (_, given) in zip(coming, files, strict=True)]
    assert moved == [False, not computes]


def test_private_attributes_are_named() -> None:
    """All that are read of others in `internals`, by their last names."""
    import ast
    from pathlib import Path

    from tpde.integrations.vllm import internals
    from tpde.integrations.vllm.relied_on import RELIED_ON

    tree = ast.parse(Path(internals.__file__).read_text())
    read = {it.attr for it in ast.walk(tree) if isinstance(it, ast.Attribute) and it.attr.startswith("_")}
    read -= {it for it in read if it.startswith("__")}
    named = {name.rsplit(".", 1)[-1] for name in RELIED_ON}
    assert read <= named
    assert {"_param", "discard", "module_offloaders"} <= named


def test_other_names_of_what_moves_weights_are_errors() -> None:
    """Not a parameter that nothing moves, or plain words that stay on the host."""
    from tpde.integrations.vllm import internals

    renamed, weight = SimpleNamespace(parameter=None), torch.zeros(1)
    moving = SimpleNamespace(module_offloaders=[SimpleNamespace(_param_offloaders={"weight": renamed})])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(internals, "get_offloader", lambda: moving)
        with pytest.raises(AttributeError, match="_param"):
            internals.mover_of(weight)
    with pytest.raises(AttributeError, match="_cpu_storage"):
        internals.forget_plain(renamed)


@pytest.mark.parametrize(("version", "name"), [((0, 29, 0), "suspend"), ((0, 31, 0), "discard")])
def test_sleep_by_other_names_is_refused(version: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tpde.integrations.vllm import internals, sleep_mode

    methods = {"suspend", "discard"} - {name}
    config = SimpleNamespace(enable_sleep_mode=True, sleep_mode_backend="cumem")
    monkeypatch.setattr(internals, "__version_tuple__", version)
    monkeypatch.setattr(internals, "CuMemBackend", type("Sleep", (), dict.fromkeys(methods)))
    with pytest.raises(InvalidInput, match="sleeps by other names than those that tpde knows"):
        sleep_mode.choose(config)
    assert config.sleep_mode_backend == "cumem"


def test_no_other_module_names_internals() -> None:
    """By the folders of vLLM that others import from."""
    import ast
    from pathlib import Path

    import tpde.integrations.vllm as plugin

    documented = {
        "vllm.config",
        "vllm.model_executor.layers.linear",
        "vllm.model_executor.layers.quantization",
        "vllm.model_executor.layers.quantization.base_config",
        "vllm.model_executor.layers.vocab_parallel_embedding",
        "vllm.model_executor.model_loader",
    }
    for path in Path(plugin.__file__).parent.glob("*.py"):
        tree = ast.parse(path.read_text())
        found = {it.module for it in ast.walk(tree) if isinstance(it, ast.ImportFrom) and it.module}
        if path.name != "internals.py":
            assert {it for it in found if it.startswith("vllm")} <= documented, path.name
