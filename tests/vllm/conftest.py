"""What all tests of vLLM need: tiny models, each saved once, and a cache that starts empty."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import tpde


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Other people's warnings are not ours."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compiled code of these tests alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "VLLM_CACHE_ROOT", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def classes_are_looked_at_here() -> Iterator[None]:
    """Not in a process that imports vLLM, which takes 8 s for each architecture."""
    from vllm.model_executor.models import registry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_run_in_subprocess", lambda look: look())
        yield


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of tiny models, plain and packed."""
    from support.vllm import save_experts, save_llama

    at = tmp_path_factory.mktemp("models")
    found = {
        "llama": save_llama(at / "llama"),
        "tied": save_llama(at / "tied", tied=True),
        "experts": save_experts(at / "experts"),
    }
    for name in list(found):
        found[f"{name}-packed"] = at / f"{name}-packed"
        tpde.pack(found[name], found[f"{name}-packed"])
    return found
