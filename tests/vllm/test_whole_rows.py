"""Which rows of a matrix a GPU holds where vLLM cuts it by columns, and what it computes, without engines."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from support.models import assert_same_bits, torch

pytest.importorskip("vllm.version", reason="vLLM is not installed: `make test-vllm` runs these")
from torch import Tensor, nn

from tpde.integrations.vllm import internals
from tpde.integrations.vllm.report import LoadReport
from tpde.integrations.vllm.whole_rows_method import WholeRowsMethod

pytestmark = pytest.mark.quick
ROWS, COLUMNS = 512, 256


class Layer(nn.Module):
    """What vLLM's layer has of its own."""

    def __init__(self, rank: int, size: int, bias: Tensor | None = None, rows: int = ROWS) -> None:
        super().__init__()
        self.tp_rank, self.tp_size, self.output_size, self.skip_bias_add = rank, size, rows, False
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def weight_loader(self, param: Any, loaded: Tensor) -> None:
        share = param.shape[1]
        param.data.copy_(loaded[:, self.tp_rank * share :][:, :share])


@pytest.fixture(autouse=True)
def no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters ask a group of GPUs for their rank, which ours do not use."""
    for name in ("get_tensor_model_parallel_rank", "get_tensor_model_parallel_world_size"):
        monkeypatch.setattr(f"vllm.model_executor.parameter.{name}", lambda: 0)


def held(layer: Layer, whole: Tensor, monkeypatch: pytest.MonkeyPatch) -> WholeRowsMethod:
    """The method of a layer whose weight is loaded and packed."""
    with monkeypatch.context() as patch:
        patch.setattr(internals, "may_be_offloaded", lambda name: True)  # with memory from the start
        method = WholeRowsMethod(LoadReport("fused"), "model.layers.0.down_proj")
    method.create_weights(
        layer,
        input_size_per_partition=COLUMNS // layer.tp_size,
        output_partition_sizes=[layer.output_size],
        input_size=COLUMNS,
        output_size=layer.output_size,
        params_dtype=torch.bfloat16,
        weight_loader=layer.weight_loader,
    )
    layer.weight.weight_loader(layer.weight, whole)
    method.uses_meta_device = True
    method.process_weights_after_loading(layer)
    return method


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("biased", [False, True])
def test_the_sum_over_gpus_is_the_result(size: int, biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(0)
    whole = torch.randn((ROWS, COLUMNS), generator=draw).bfloat16()
    bias = torch.randn(ROWS, generator=draw).bfloat16() if biased else None
    x = torch.randn((3, COLUMNS), generator=draw).bfloat16()
    monkeypatch.setattr(internals, "gather_columns", lambda part: x)
    share, found = ROWS // size, []
    for rank in range(size):
        layer = Layer(rank, size, bias)
        method = held(layer, whole, monkeypatch)
        rows = slice(rank * share, (rank + 1) * share)
        assert_same_bits(layer.__dict__["tpde"].packed.decoded(), whole[rows])
        mine = x[:, rank * (COLUMNS // size) :][:, : COLUMNS // size]
        made = method.apply(layer, mine if size > 1 else x, bias if rank == 0 else None)
        assert made.shape == (3, ROWS)
        wanted = torch.nn.functional.linear(x, whole[rows], None if bias is None else bias[rows])
        assert torch.allclose(made[:, rows].float(), wanted.float(), atol=0.25)
        elsewhere = torch.cat([made[:, : rows.start], made[:, rows.stop :]], 1)
        assert_same_bits(elsewhere, torch.full_like(elsewhere, -0.0))
        found.append(made)
    summed = torch.stack(found).sum(0)
    for rank, made in enumerate(found):
        rows = slice(rank * share, (rank + 1) * share)
        assert_same_bits(summed[:, rows].contiguous(), made[:, rows].contiguous())


def test_a_bias_that_others_add_is_left_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, x = torch.randn(ROWS, COLUMNS).bfloat16(), torch.zeros(1, COLUMNS).bfloat16()
    monkeypatch.setattr(internals, "gather_columns", lambda part: x)
    layer = Layer(1, 2, torch.ones(ROWS).bfloat16())
    layer.skip_bias_add = True
    made = held(layer, whole, monkeypatch).apply(layer, x[:, 128:], None)
    assert not made.any()


def test_rows_that_cannot_be_shared_evenly(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As vLLM cuts them, with a warning."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    whole, layer = torch.randn(510, COLUMNS).bfloat16(), Layer(1, 4, rows=510)
    held(layer, whole, monkeypatch)
    assert_same_bits(layer.__dict__["tpde"].packed.decoded(), whole[:, 64:128].contiguous())
    assert "down_proj has 510 rows, which 4 GPUs cannot share evenly" in caplog.text


def test_files_of_other_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    for shape in ((ROWS + 2, COLUMNS), (ROWS // 2, COLUMNS), (ROWS, 1)):
        with pytest.raises(AssertionError):
            held(Layer(0, 2), torch.randn(shape).bfloat16(), monkeypatch)


@pytest.mark.parametrize("fused", [False, True])
def test_what_is_told(fused: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A warning where vLLM 0.26 adds up and normalizes in a kernel of FlashInfer's."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    passes = SimpleNamespace(pass_config=SimpleNamespace(fuse_allreduce_rms=fused))
    found = SimpleNamespace(compilation_config=passes)
    found.compilation_config.static_forward_context = {}
    monkeypatch.setattr(internals, "get_current_vllm_config_or_none", lambda: found)
    report = LoadReport("fused")
    for _ in range(2):
        report.cut_by_rows()
        report.packed(100, 70, "in windows")
    with caplog.at_level(logging.INFO):
        report.tell()
    assert "2 matrices that vLLM cuts by columns are cut by rows" in caplog.text
    assert ("results depend on the number of GPUs" in caplog.text) == fused
