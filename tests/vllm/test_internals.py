"""What is relied on in vLLM, looked for in the version that is installed."""

from __future__ import annotations

import importlib

import pytest

pytest.importorskip("vllm.version", reason="vLLM is not installed: `make test-vllm` runs these")
pytestmark = pytest.mark.quick


def find(name: str) -> object:
    """What a dotted name below `vllm` stands for: an attribute, maybe of a class, of the longest module."""
    parts = ["vllm", *name.split(".")]
    for count in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            found = getattr(found, part)
        return found
    raise AttributeError(name)


def test_all_that_is_relied_on_is_there() -> None:
    from tpde.integrations.vllm.internals import RELIED_ON

    missing = {}
    for name, breaks in RELIED_ON.items():
        try:
            find(name)
        except AttributeError:
            missing[name] = breaks
    assert missing == {}
    with pytest.raises(AttributeError):
        find("model_executor.utils.nothing_of_this_name")


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
