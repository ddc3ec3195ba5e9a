"""Packed weights in host memory, which vLLM copies to buffers on the device before their layers run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from support.models import assert_same_bits, torch

from tpde.errors import InvalidInput

pytest.importorskip("vllm.version", reason="vLLM is not installed: `make test-vllm` runs these")
pytestmark = pytest.mark.quick

ROWS, COLUMNS = 192, 320


@pytest.fixture
def offloading(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Its layers' offloaders, as vLLM has them: what is in the list is offloaded."""
    from tpde.integrations.vllm import internals

    found: list[Any] = []
    monkeypatch.setattr(internals, "may_be_offloaded", lambda prefix: True)
    monkeypatch.setattr(internals, "get_offloader", lambda: SimpleNamespace(module_offloaders=found))
    return found


def layer(offloading: list[Any], report: Any, seed: int, offloaded: bool = True) -> tuple[Any, Any, Any]:
    """A linear layer that was loaded and packed, what vLLM moves it with, and its plain weight."""
    from vllm.model_executor.offloader.prefetch import _CpuParamOffloader

    from tpde.integrations.vllm.linear_method import TpdeLinearMethod

    draw = torch.Generator().manual_seed(seed)
    made, method = torch.nn.Module(), TpdeLinearMethod(report, f"model.layers.{seed}.mlp.up_proj")
    assert not method.uses_meta_device
    report.awaited += 1
    made.weight = torch.nn.Parameter(torch.zeros(ROWS, COLUMNS, dtype=torch.bfloat16), requires_grad=False)
    mover = _CpuParamOffloader(made, "weight")
    if offloaded:
        offloading.append(SimpleNamespace(_param_offloaders={"weight": mover, "gone": Gone()}))
    plain = (0.05 * torch.randn(ROWS, COLUMNS, generator=draw)).bfloat16()
    made.weight.data.copy_(plain)  # as weights are loaded: to the host
    method.process_weights_after_loading(made)
    return made, mover, plain


class Gone:
    """What moves a parameter that was deleted meanwhile."""

    @property
    def _param(self) -> Any:
        raise AttributeError("k_scale")


@pytest.mark.parametrize("kernels", ["fused", "exact"])
def test_layers_share_a_buffer(offloading: list[Any], kernels: str) -> None:
    from tpde.integrations.vllm.report import LoadReport

    report = LoadReport(kernels)
    layers = [layer(offloading, report, seed) for seed in range(2)]
    for _, mover, _ in layers:
        mover.sync_cpu_storage()
    (size,) = {tuple(mover._cpu_storage.shape) for _, mover, _ in layers}
    assert size[0] <= 0.85 * 2 * ROWS * COLUMNS
    buffer = torch.zeros(size, dtype=torch.uint8)
    for _, mover, _ in layers:
        mover.assign_static_buffer(buffer)
    x = torch.randn(5, COLUMNS).bfloat16()
    for _ in range(2):
        for made, mover, plain in layers:
            buffer.copy_(mover._cpu_storage)
            held = made.__dict__["tpde"]
            assert_same_bits(held.product(x, None), torch.nn.functional.linear(x, plain))
            assert held.packed.sources[0].memory.data_ptr() == buffer.data_ptr()


def test_a_layer_that_vllm_did_not_move(offloading: list[Any]) -> None:
    """It may be one of a vision tower, with a number as others have: it is as ever."""
    from tpde.integrations.vllm.report import LoadReport

    made, _, plain = layer(offloading, LoadReport("fused"), 0, offloaded=False)
    held = made.__dict__["tpde"]
    assert made.weight.data_ptr() == held.packed.sources[0].memory.data_ptr()
    x = torch.randn(3, COLUMNS).bfloat16()
    assert_same_bits(held.product(x, None), torch.nn.functional.linear(x, plain))


def test_what_is_told(offloading: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, when the last layer is packed; bytes on the host are no room for the KV cache."""
    from tpde.integrations.vllm import report as reports

    lines: list[str] = []
    told = SimpleNamespace(info=lambda text, *given: lines.append(text % given))
    monkeypatch.setattr(reports, "log", told)
    monkeypatch.setattr("tpde.integrations.vllm.internals.token_bytes", lambda: 1)
    report = reports.LoadReport("fused")
    report.awaited += 1  # one more is to come
    layer(offloading, report, 0)
    assert not lines
    report.awaited -= 1
    layer(offloading, report, 1)
    assert ["every bit kept" in it for it in lines] == [True, False]  # and no tokens
    assert "MiB instead of 0.2 are in host memory" in lines[1]
    there, packed = report._on_host
    assert there == 2 * 2 * ROWS * COLUMNS
    assert there - packed == report.plain_bytes - report.held_bytes


@pytest.mark.parametrize(
    ("prefix", "offloaded"),
    [
        ("model.layers.0.mlp.up_proj", False),
        ("model.layers.2.mlp.up_proj", True),
        ("model.layers.3.self_attn.qkv_proj", True),
        ("model.layers.4.mlp.experts.3.w", False),
        ("lm_head", False),
    ],
)
def test_which_layers_vllm_moves(prefix: str, offloaded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from tpde.integrations.vllm import internals

    how = SimpleNamespace(offload_group_size=4, offload_num_in_group=2)
    config = SimpleNamespace(offload_config=SimpleNamespace(prefetch=how))
    monkeypatch.setattr(internals, "get_current_vllm_config", lambda: config)
    assert internals.may_be_offloaded(prefix) == offloaded
    how.offload_group_size = 0
    assert not internals.may_be_offloaded(prefix)


@pytest.mark.parametrize(
    ("stages", "moves", "text"),
    [(2, True, "--pipeline-parallel-size"), (1, False, "does nothing"), (1, True, None)],
)
def test_offloading_that_does_not_work(
    monkeypatch: pytest.MonkeyPatch, stages: int, moves: bool, text: str | None
) -> None:
    from tpde.integrations.vllm import internals, refusals

    offload = SimpleNamespace(
        uva=SimpleNamespace(cpu_offload_gb=0), prefetch=SimpleNamespace(offload_group_size=2)
    )
    config = SimpleNamespace(
        model_config=SimpleNamespace(quantization_config=None, enable_sleep_mode=False),
        offload_config=offload,
        load_config=SimpleNamespace(load_format="auto"),
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages),
    )
    offloader = SimpleNamespace(module_offloaders=[]) if moves else object()
    monkeypatch.setattr(internals, "get_offloader", lambda: offloader)
    for module in (refusals, internals):
        monkeypatch.setattr(module, "get_current_vllm_config", lambda: config)
    if text is None:
        refusals.check()
        return
    with pytest.raises(InvalidInput, match=text):
        refusals.check()
