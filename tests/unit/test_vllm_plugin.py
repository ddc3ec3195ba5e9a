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

    vllm._registered = False
    vllm.register()
    assert "cannot use the plugin" in caplog.text
    caplog.clear()
    vllm.register()  # vLLM calls it in every process, and may twice
    assert not caplog.text
