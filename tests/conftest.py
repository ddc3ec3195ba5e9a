"""Settings of all tests: threads, garbage, hypothesis profiles, `large` deselected, instruction sets."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, Phase, settings

if TYPE_CHECKING:  # needs torch
    from support.checkpoints import Pair

sys.path.insert(0, str(Path(__file__).parent))  # `support` for every test, however pytest is started
sys.path.append(str(Path(__file__).parents[1]))  # and `benchmarks`
# Torch's threads then sleep while they wait for each other, and leave the processors to those they wait for.
# Else, where others use these too, tests of tiny models take three times as long: 127 s, not 37, as measured.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

_COMMON = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": None}
# A failure is shown as it was found: with the slow codecs a smaller example may take minutes to find.
_FOUND = (Phase.explicit, Phase.generate)
settings.register_profile("ci", derandomize=True, max_examples=60, phases=_FOUND, **_COMMON)
settings.register_profile("thorough", max_examples=2000, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out `large` tests unless `-m` asks for them."""
    if "large" in (config.getoption("-m") or ""):
        return
    large = [item for item in items if item.get_closest_marker("large")]
    if large:
        config.hook.pytest_deselected(items=large)
        items[:] = [item for item in items if item not in large]


def pytest_collection_finish() -> None:
    """Let no collection of garbage look at the modules: with torch's and transformers' each takes 0.6 s."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def simd_restored() -> Iterator[None]:
    """Select the path again that was in use before."""
    from tpde.codec import native

    before = native.simd()
    yield
    native.simd_select(before)


@pytest.fixture
def launch_on() -> Iterator[Callable[[Any], Any]]:
    """Have another back end run kernels, until the test ends; gives it back."""
    from tpde.cuda.backend import launching_on

    with ExitStack() as stack:

        def put(backend: Any) -> Any:
            stack.enter_context(launching_on(backend))
            return backend

        yield put


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A tiny Llama, plain and packed; nothing is written into its folders."""
    from support.checkpoints import checkpoint

    return checkpoint(tmp_path_factory.mktemp("llama"), "llama")
