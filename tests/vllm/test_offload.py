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


def layer(
    offloading: list[Any],
    report: Any,
    seed: int,
    offloaded: bool = True,
    dtype: Any = torch.bfloat16,
    spread: float = 0.0,
) -> tuple[Any, Any, Any]:
    """A linear layer that was loaded and packed, what vLLM moves it with, and its plain weight."""
    from vllm.model_executor.offloader.prefetch import _CpuParamOffloader

    from tpde.integrations.vllm.linear_method import TpdeLinearMethod

    draw = torch.Generator().manual_seed(seed)
    made, method = torch.nn.Module(), TpdeLinearMethod(report, f"model.layers.{seed}.mlp.up_proj")
    assert not method.uses_meta_device
    report.awaited += 1
    made.weight = torch.nn.Parameter(torch.zeros(ROWS, COLUMNS, dtype=dtype), requires_grad=False)
    mover = _CpuParamOffloader(made, "weight")
    if offloaded:
        offloading.append(SimpleNamespace(_param_offloaders={"weight": mover, "gone": Gone()}))
    rows = torch.exp(spread * torch.randn(ROWS, 1, generator=draw))
    plain = (0.05 * torch.randn(ROWS, COLUMNS, generator=draw) * rows).to(dtype)
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
            assert_same_bits(held.rows(torch.tensor([3, ROWS - 1])), plain[[3, ROWS - 1]])
            assert_same_bits(held.product(x, None), torch.nn.functional.linear(x, plain))
            assert held.packed.sources[0].memory.data_ptr() == buffer.data_ptr()


@pytest.mark.parametrize("kernels", ["fused", "exact"])
def test_the_host_holds_one_copy(offloading: list[Any], kernels: str) -> None:
    """Neither what was plain, nor what a blob was in before vLLM has copied it to memory of its own."""
    from tpde.integrations.vllm.report import LoadReport

    report = LoadReport(kernels)
    made, mover, plain = layer(offloading, report, 0)
    assert mover._cpu_storage is None
    made.weight.data = made.weight.data.clone()  # as on a GPU: to pinned memory
    _, other, _ = layer(offloading, report, 1)
    held = made.__dict__["tpde"]
    assert held.packed.sources[0].memory.data_ptr() == made.weight.data_ptr()
    assert_same_bits(held.rows(torch.tensor([3, ROWS - 1])), plain[[3, ROWS - 1]])
    for it in (mover, other):
        it.sync_cpu_storage()
    assert mover._cpu_storage.data_ptr() == made.weight.data_ptr()


def test_a_layer_that_the_host_had_no_room_for(
    offloading: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that is loaded after it, while the error is still held, does not meet it."""
    from tpde.integrations.vllm import weights
    from tpde.integrations.vllm.report import LoadReport

    def refused(*_: Any, **__: Any) -> None:
        raise MemoryError

    report = LoadReport("fused")
    report.awaited += 1  # more is to come
    with monkeypatch.context() as patch:
        patch.setattr(weights.BlobParameter, "of", refused)
        with pytest.raises(MemoryError) as held:
            layer(offloading, report, 0)
    made, _, plain = layer(offloading, report, 1)
    assert_same_bits(made.__dict__["tpde"].rows(torch.tensor([3])), plain[[3]])
    assert held.traceback


def test_buffers_of_fp16(offloading: list[Any]) -> None:
    """Blobs of 0.85 to 0.87 of the plain bytes are of one size, too."""
    from tpde.integrations.vllm.report import LoadReport

    report = LoadReport("exact")
    layers = [layer(offloading, report, seed, dtype=torch.float16, spread=0.3) for seed in range(4)]
    for _, mover, _ in layers:
        mover.sync_cpu_storage()
    assert len({tuple(mover._cpu_storage.shape) for _, mover, _ in layers}) == 1
    assert len({made.__dict__["tpde"].packed.packed_bytes for made, *_ in layers}) > 1


def test_a_model_none_of_whose_layers_vllm_moves(offloading: list[Any]) -> None:
    from tpde.integrations.vllm.report import LoadReport

    with pytest.raises(InvalidInput, match="keeps no layer of this model in host memory"):
        layer(offloading, LoadReport("fused"), 0, offloaded=False)


def test_layers_that_stay_plain_are_moved_all_the_same(
    offloading: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tpde.integrations.vllm import linear_method
    from tpde.integrations.vllm.report import LoadReport

    monkeypatch.setattr(linear_method, "hold", lambda *_, **__: None)
    report = LoadReport("fused")
    layer(offloading, report, 0)  # which would refuse the model
    assert report.any_on_host
    assert report._on_host[0] == report._on_host[1]


def test_a_layer_that_vllm_did_not_move(offloading: list[Any]) -> None:
    """It may be one of a vision tower, with a number as others have: it is as ever."""
    from tpde.integrations.vllm.report import LoadReport

    report = LoadReport("fused")
    report.awaited += 1
    made, _, plain = layer(offloading, report, 0, offloaded=False)
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
        ("", True),  # some models name none
    ],
)
def test_which_layers_vllm_moves(prefix: str, offloaded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from tpde.integrations.vllm import internals

    how = SimpleNamespace(offload_group_size=4, offload_num_in_group=2)
    asked = SimpleNamespace(prefetch=how, uva=SimpleNamespace(cpu_offload_gb=10), offload_backend="auto")
    monkeypatch.setattr(internals, "get_current_vllm_config", lambda: SimpleNamespace(offload_config=asked))
    assert internals.may_be_offloaded(prefix) == offloaded
    assert not internals.reads_weights_on_host()
    asked.offload_backend = "uva"
    assert not internals.may_be_offloaded(prefix)
    assert internals.reads_weights_on_host()
    asked.offload_backend, how.offload_group_size = "auto", 0
    assert not internals.may_be_offloaded(prefix)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"stages": 2}, "--pipeline-parallel-size"),
        ({"moves": False}, "does nothing"),
        ({"adapters": object()}, "--enable-lora"),
        ({"step": 2, "apart": False}, "--offload-prefetch-step"),
        ({"step": 2}, None),
        ({"apart": False}, None),
    ],
)
def test_offloading_that_does_not_work(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], text: str | None
) -> None:
    how = {"stages": 1, "moves": True, "adapters": None, "step": 1, "apart": True} | change
    from tpde.integrations.vllm import internals, refusals

    moved = SimpleNamespace(offload_group_size=2, offload_prefetch_step=how["step"])
    offload = SimpleNamespace(uva=SimpleNamespace(cpu_offload_gb=0), prefetch=moved, offload_backend="auto")
    model = SimpleNamespace(
        quantization_config=None,
        enable_sleep_mode=False,
        runner_type="generate",
        head_dtype="bfloat16",
        dtype="bfloat16",
    )
    config = SimpleNamespace(
        model_config=model,
        offload_config=offload,
        load_config=SimpleNamespace(load_format="auto"),
        lora_config=how["adapters"],
        parallel_config=SimpleNamespace(pipeline_parallel_size=how["stages"]),
    )
    offloader = SimpleNamespace(module_offloaders=[]) if how["moves"] else object()
    monkeypatch.setattr(internals, "get_offloader", lambda: offloader)
    monkeypatch.setattr(internals, "keeps_buffers_apart", lambda: how["apart"])
    for module in (refusals, internals):
        monkeypatch.setattr(module, "get_current_vllm_config", lambda: config)
    if text is None:
        refusals.check()
        return
    with pytest.raises(InvalidInput, match=text):
        refusals.check()


def test_other_values_are_refused(offloading: list[Any]) -> None:
    """vLLM may be copying a layer while it would be written."""
    from tpde.errors import PackedWeight
    from tpde.integrations.vllm.report import LoadReport

    made, *_ = layer(offloading, LoadReport("fused"), 0)
    with pytest.raises(PackedWeight, match="is packed, and serves"):
        made.__dict__["tpde"].reload(made)
