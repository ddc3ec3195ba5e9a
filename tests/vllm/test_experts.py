"""Experts straight from windows, as on a GPU, in a layer as vLLM's Triton kernels have it."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from support.emulated import windows_on_cpu  # noqa: F401
from support.experts import experts_on_gpu  # noqa: F401
from support.models import assert_same_bits, torch

from tpde.cuda import expert_ways

pytest.importorskip("vllm.version", reason="vLLM is not installed: `make test-vllm` runs these")
pytestmark = pytest.mark.quick

EXPERTS, HIDDEN, INNER, EACH = 6, 128, 160, 2


class PlainMethod:
    """vLLM's method for plain experts: products of matrices in the order of files."""

    is_monolithic = False
    moe_kernel = moe_quant_config = experts_cls = None

    def __init__(self) -> None:
        from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

        spread = SimpleNamespace(use_ep=False, dp_size=1, pcp_size=1)
        self.moe = SimpleNamespace(moe_parallel_config=spread, has_bias=False)
        self.unquantized_backend = UnquantizedMoeBackend.TRITON
        self.seen: list[Any] = []

    def process_weights_after_loading(self, layer: Any) -> None:
        """Leave the words as they are, in other parameters."""
        for name in ("w13_weight", "w2_weight"):
            setattr(layer, name, torch.nn.Parameter(getattr(layer, name).detach(), requires_grad=False))

    def apply(self, layer: Any, x: Any, topk_weights: Any, topk_ids: Any, **_: Any) -> Any:
        self.seen.append((layer.w13_weight, layer.w2_weight))
        return computed(layer.w13_weight, layer.w2_weight, x, topk_weights, topk_ids)


def computed(w13: Any, w2: Any, x: Any, topk_weights: Any, topk_ids: Any) -> Any:
    """What a layer of experts is, in 32 bits but for what is between the products."""
    out = torch.zeros(x.shape)
    for token, (weights, ids) in enumerate(zip(topk_weights, topk_ids, strict=True)):
        for weight, number in zip(weights, ids.tolist(), strict=True):
            gate, up = (w13[number].float() @ x[token].float()).bfloat16().float().chunk(2)
            inner = (torch.nn.functional.silu(gate) * up).bfloat16().float()
            out[token] += weight * (w2[number].float() @ inner).bfloat16().float()
    return out.bfloat16()


def made(seed: int = 0, room: Any = None, kernels: str = "fused") -> SimpleNamespace:
    """A layer with its method, packed, and its plain weights."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    from tpde.integrations.vllm.expert_stacks import Room
    from tpde.integrations.vllm.experts_method import TpdeExpertsMethod
    from tpde.integrations.vllm.report import LoadReport

    draw = torch.Generator().manual_seed(seed)
    layer = torch.nn.Module()
    for name, shape in (("w13", (EXPERTS, 2 * INNER, HIDDEN)), ("w2", (EXPERTS, HIDDEN, INNER))):
        weight = 0.1 * torch.randn(shape, generator=draw)
        layer.register_parameter(f"{name}_weight", torch.nn.Parameter(weight.bfloat16(), requires_grad=False))
    layer.expert_map = layer.swiglu_limit = layer.swiglu_alpha = layer.swiglu_beta = None
    layer.apply_router_weight_on_input = False
    layer.activation = MoEActivation.SILU
    plain, report = PlainMethod(), LoadReport(kernels)
    method = TpdeExpertsMethod(report, plain, Room() if room is None else room, "experts")
    weights = layer.w13_weight.detach().clone(), layer.w2_weight.detach().clone()
    return SimpleNamespace(layer=layer, method=method, plain=plain, report=report, weights=weights)


def load(it: SimpleNamespace, on_gpu: Callable[[Any], Any] | None) -> SimpleNamespace:
    it.method.process_weights_after_loading(it.layer)
    for stack in it.method._stacks.values() if on_gpu is not None else ():
        on_gpu(stack.packed)
    return it


def batch(tokens: int, seed: int = 1) -> tuple[Any, Any, Any]:
    """Inputs, and what a router says of them."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn((tokens, HIDDEN), generator=draw).bfloat16()
    scores, ids = torch.rand((tokens, EXPERTS), generator=draw).softmax(1).topk(EACH)
    return x, scores, ids.to(torch.int32)


def test_few_rows_are_multiplied_from_windows(experts_on_gpu: Any) -> None:  # noqa: F811
    it = load(made(), experts_on_gpu)
    x, scores, ids = batch(64)
    found = it.method.apply(it.layer, x, scores, ids, shared_experts=None, shared_experts_input=None)
    assert it.plain.seen == []
    assert it.layer.w13_weight.data.dtype is torch.uint8
    wanted = computed(*it.weights, x, scores, ids)
    assert found.dtype is torch.bfloat16
    assert torch.allclose(found.float(), wanted.float(), rtol=0.02, atol=0.02)
    for some in (slice(0, 1), slice(5, 9), slice(31, 64)):
        assert_same_bits(it.method.apply(it.layer, x[some], scores[some], ids[some]), found[some])
    assert it.plain.seen == []


@pytest.mark.parametrize("on_gpu", [True, False])
def test_rows_of_padding_have_no_expert(experts_on_gpu: Any, on_gpu: bool) -> None:  # noqa: F811
    """vLLM 0.27 and later gives them -1, in steps that CUDA graphs pad and in those that warm up."""
    it = load(made(), experts_on_gpu if on_gpu else None)
    x, scores, ids = batch(40)
    needed = it.method._from_windows(it.layer, x, scores, ids)
    for first in (33, 7, 0):
        padded = ids.clone()
        padded[first:] = -1
        found = it.method._from_windows(it.layer, x, scores, padded)
        assert_same_bits(found[:first], needed[:first])
        assert not found[first:].float().any()


@pytest.mark.parametrize("tokens", [3, 1000])
def test_kernels_are_there_after_the_first_step(
    experts_on_gpu: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    tokens: int,
) -> None:
    """Whatever it takes: the next may be recorded."""
    from tpde.cuda.window_experts import DeviceExperts

    prepared: list[Any] = []

    def prepare(self: Any) -> None:
        prepared.append(self)

    monkeypatch.setattr(DeviceExperts, "prepare", prepare)
    it = load(made(), experts_on_gpu)
    assert not prepared
    for _ in range(2):
        it.method.apply(it.layer, *batch(tokens))
        assert prepared == [stack.packed.experts._there for stack in it.method._stacks.values()]


@pytest.mark.parametrize("kernels", ["fused", "exact"])
def test_more_rows_are_decoded(experts_on_gpu: Any, kernels: str) -> None:  # noqa: F811
    it = load(made(kernels=kernels), experts_on_gpu if kernels == "fused" else None)
    x, scores, ids = batch(expert_ways.MOST_EACH * EXPERTS // EACH + 1)
    found = it.method.apply(it.layer, x, scores, ids)
    assert_same_bits(found, computed(*it.weights, x, scores, ids))
    for decoded, plain in zip(it.plain.seen[0], it.weights, strict=True):
        assert_same_bits(decoded, plain)


def test_what_most_tokens_take_is_there_once_for_profiling(
    experts_on_gpu: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM's profiling run may have more tokens than are multiplied from windows."""
    from tpde.weights.expert_products import Experts

    asked: list[tuple[int, int]] = []

    def taken(self: Any, tokens: int, rows: int) -> int:
        asked.append((tokens, rows))
        return 1 << 20

    monkeypatch.setattr(Experts, "taken", taken)
    it = load(made(), experts_on_gpu)
    for stack, most in zip(it.method._stacks.values(), (70 * EACH, 60 * EACH + 1), strict=True):
        stack.packed.experts._there.most_rows = most
    x, scores, ids = batch(expert_ways.MOST_EACH * EXPERTS // EACH + 1)
    for _ in range(2):
        assert_same_bits(it.method.apply(it.layer, x, scores, ids), computed(*it.weights, x, scores, ids))
    assert asked == [(60, 60 * EACH)] * 2  # of both weights


def test_few_rows_without_a_gpu_or_exact_decode_their_experts() -> None:
    for kernels in ("fused", "exact"):
        it = load(made(kernels=kernels), None)
        x, scores, _ = batch(1)
        ids = torch.tensor([[4, 1]], dtype=torch.int32)
        assert_same_bits(it.method.apply(it.layer, x, scores, ids), computed(*it.weights, x, scores, ids))
        for decoded, plain in zip(it.plain.seen[0], it.weights, strict=True):
            assert_same_bits(decoded[[1, 4]], plain[[1, 4]])


def test_experts_of_other_ranks_are_left_by_their_loader() -> None:
    """vLLM brings them after a rank has all of its own, which are packed by then."""
    it, came = made(), []
    for name in ("w13_weight", "w2_weight"):
        it.layer.get_parameter(name).weight_loader = lambda *args: came.append(args)
    load(it, None)
    for name in ("w13_weight", "w2_weight"):
        assert it.layer.get_parameter(name).data.dtype is torch.uint8
        it.layer.get_parameter(name).weight_loader(name)
    assert came == [("w13_weight",), ("w2_weight",)]


def test_layers_share_a_room() -> None:
    from tpde.integrations.vllm.expert_stacks import Room

    room = Room()
    first, second = (load(made(seed, room), None) for seed in (0, 1))
    assert room._memory is None
    x, scores, ids = batch(20)
    for it in (first, second, first):
        assert_same_bits(it.method.apply(it.layer, x, scores, ids), computed(*it.weights, x, scores, ids))
    places = [[weight.data_ptr() for weight in it.plain.seen[0]] for it in (first, second)]
    assert places[0] == places[1]
    assert room._memory.data_ptr() == places[0][0]
    assert room._memory.numel() == room.nbytes
    plain_bytes = sum(it.nbytes for it in first.weights)
    assert plain_bytes <= room.nbytes < plain_bytes + 1024
    for other in (copy.deepcopy(room), pickle.loads(pickle.dumps(room))):
        assert other._memory is None


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda it: setattr(it.plain, "unquantized_backend", backend("FLASHINFER_CUTLASS")), "another order"),
        (lambda it: setattr(it.plain.moe.moe_parallel_config, "use_ep", True), "spread over devices"),
        (lambda it: setattr(it.plain.moe.moe_parallel_config, "dp_size", 2), "spread over devices"),
        (lambda it: setattr(it.plain.moe, "has_bias", True), "biases"),
        (lambda it: setattr(it.layer, "apply_router_weight_on_input", True), "inputs are weighted"),
        (lambda it: setattr(it.layer, "swiglu_limit", 7.0), "silu, clamped"),
        (lambda it: setattr(it.layer, "activation", SimpleNamespace(value="relu2")), "relu2"),
    ],
    ids=["backend", "ep", "dp", "bias", "inputs", "clamped", "activation"],
)
def test_what_does_not_fit_is_decoded(
    experts_on_gpu: Any,  # noqa: F811
    change: Callable[[Any], None],
    why: str,
) -> None:
    from tpde.integrations.vllm.internals import why_decoded

    it = made()
    assert why_decoded(it.plain, it.layer) is None
    change(it)
    assert why in (why_decoded(it.plain, it.layer) or "")
    load(it, experts_on_gpu)
    x, scores, ids = batch(3)
    assert_same_bits(it.method.apply(it.layer, x, scores, ids), computed(*it.weights, x, scores, ids))
    assert len(it.plain.seen) == 1


def test_experts_are_decoded_for_results_that_do_not_depend_on_the_batch(
    monkeypatch: pytest.MonkeyPatch,
    experts_on_gpu: Any,  # noqa: F811
) -> None:
    from tpde.integrations.vllm.internals import why_decoded

    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    it = made()
    assert "VLLM_BATCH_INVARIANT" in (why_decoded(it.plain, it.layer) or "")


def backend(name: str) -> Any:
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

    return UnquantizedMoeBackend[name]


def test_it_is_told_why_experts_are_decoded(caplog: pytest.LogCaptureFixture) -> None:
    from tpde.integrations.vllm.report import LoadReport, log

    report = LoadReport("fused")
    report.packed(100, 70, "in windows")
    for _ in range(3):
        report.decoded("they have biases")
    with caplog.at_level(logging.INFO, log.name):
        log.addHandler(caplog.handler)
        report.tell()
        log.removeHandler(caplog.handler)
    assert "experts of 3 layers are decoded for batches of any size: they have biases" in caplog.text
