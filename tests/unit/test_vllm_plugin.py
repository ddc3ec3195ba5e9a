"""The entry point that vLLM finds, where there is no vLLM."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

HAS_VLLM = importlib.util.find_spec("vllm.version") is not None if importlib.util.find_spec("vllm") else False


def test_entry_point_costs_nothing() -> None:
    """It is there, and importing it imports neither vLLM nor torch."""
    (found,) = [it for it in entry_points(group="vllm.general_plugins") if it.name == "tpde"]
    code = (
        f"import sys, {found.module}\n"
        f"assert callable({found.module}.{found.attr})\n"
        "print([it for it in ('vllm', 'torch', 'numpy') if it in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.skipif(HAS_VLLM, reason="vLLM is installed")
def test_a_vllm_that_is_another_inside_goes_on_without(caplog: pytest.LogCaptureFixture) -> None:
    from tpde.integrations import vllm

    vllm.register()
    assert "cannot use the plugin" in caplog.text


@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")
def test_it_takes_no_time_where_no_model_is_packed() -> None:
    """vLLM's main process has most of what it needs by then, and never the loaders of weights."""
    code = (
        "from vllm.engine.arg_utils import EngineArgs\n"
        "import sys\n"
        "before = len(sys.modules)\n"
        "from tpde.integrations.vllm import register\n"
        "register(), register()\n"
        "assert 'vllm.model_executor.model_loader' not in sys.modules\n"
        "assert len(sys.modules) - before < 20, len(sys.modules) - before"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
