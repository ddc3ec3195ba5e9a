"""What is told of weights that no method of ours holds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from support.models import torch

pytest.importorskip("vllm.version", reason="vLLM is not installed: `make test-vllm` runs these")
pytestmark = pytest.mark.quick


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_layers_that_no_method_was_asked_for(load_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the embedding and the head of a Mamba 2."""
    from vllm.config import LoadConfig
    from vllm.model_executor.model_loader import DefaultModelLoader, DummyModelLoader

    from tpde.integrations.vllm import loader
    from tpde.integrations.vllm.linear_method import TpdeLinearMethod
    from tpde.integrations.vllm.report import LoadReport

    report = LoadReport("fused")
    for it in (DefaultModelLoader, DummyModelLoader):
        monkeypatch.setattr(it, "load_weights", lambda *_: None)
    layer: Any = torch.nn.Linear(256, 256, dtype=torch.bfloat16)
    layer.quant_method = object.__new__(TpdeLinearMethod)
    layer.quant_method.report, layer.quant_method.uses_meta_device = report, False
    tower = torch.nn.Linear(128, 128, dtype=torch.bfloat16)
    left_out = torch.nn.Linear(128, 128, device="meta")
    model = torch.nn.Sequential(layer, tower, tower, left_out, torch.nn.Linear(2, 2))
    made = loader.TpdeDummyLoader if load_format == "dummy" else loader.TpdeModelLoader
    made(LoadConfig(load_format=load_format)).load_weights(model, SimpleNamespace(quantization="tpde"))
    assert dict(report._plain) == {"their layers have no method of tpde's": 1}
    assert report.plain_bytes == report.held_bytes == tower.weight.nbytes
