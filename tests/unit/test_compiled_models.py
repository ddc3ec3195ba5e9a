"""Packed layers, blocks and models under `torch.compile`, on the CPU: bits, programs, and what is kept."""

from __future__ import annotations

import copy
import shutil
from typing import Any

import pytest
from support.models import assert_same_bits, inputs, make, torch
from torch import nn

from tpde.nn import finish, pack_module


class Doubled(nn.Linear):
    """Computes with its weight by itself."""

    def forward(self, x: Any) -> Any:
        return nn.functional.linear(x, self.weight * 2, self.bias)


class Wrapped(nn.Linear):
    """Does something with what its parent class computes."""

    def forward(self, x: Any) -> Any:
        return super().forward(x) * 2


class After(nn.Conv1d):
    """Is called with something else first, as with a time step that stays on the host."""

    def forward(self, step: Any, x: Any) -> Any:
        return super().forward(x) * step.shape[0]


class AfterLayers(nn.Module):
    """The same with two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 48), nn.Linear(48, 16)

    def forward(self, step: Any, x: Any) -> Any:
        return self.down(self.up(x).relu()) * step.shape[0]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.Linear(16, 48), (3, 16)),
        (lambda: nn.Linear(16, 48, bias=False), (2, 3, 16)),
        (lambda: Doubled(16, 48), (3, 16)),
        (lambda: Wrapped(16, 48), (3, 16)),
        (lambda: nn.Conv1d(16, 48, 3), (2, 16, 9)),
        (lambda: nn.ModuleList([nn.Sequential(nn.Conv1d(16, 48, 3), nn.ReLU())])[0], (2, 16, 9)),
    ],
    ids=["linear", "no bias", "own", "wrapped", "convolution", "block"],
)
def test_layers_of_all_kinds_are_compiled(make: Any, shape: tuple[int, ...], grad: bool) -> None:
    torch.manual_seed(0)
    torch.compiler.reset()
    plain = make().bfloat16().float()
    ours = pack_module(copy.deepcopy(plain), min_bytes=0)
    compiled, grads = torch.compile(ours, backend="eager", fullgraph=True), []
    given = [torch.randn(shape, generator=torch.Generator().manual_seed(1)) for _ in range(2)]
    with torch.set_grad_enabled(grad):
        for x, model in zip(given, (plain, compiled), strict=True):
            x.requires_grad_(grad)
            grads.append(model(x))
        assert_same_bits(grads[1], grads[0])
        if grad:
            for found in grads:
                found.square().sum().backward()
            assert_same_bits(given[1].grad, given[0].grad)
    with torch.no_grad():  # tracing left nothing behind
        assert_same_bits(ours(given[0]), plain(given[0]))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: After(16, 48, 3), (2, 16, 9)),
        (lambda: nn.ModuleList([After(16, 48, 3), nn.ReLU()])[0], (2, 16, 9)),
        (lambda: nn.ModuleList([AfterLayers(), AfterLayers()])[0], (3, 16)),
    ],
    ids=["layer", "layer of a list", "block"],
)
def test_the_first_tensor_may_be_elsewhere(make: Any, shape: tuple[int, ...], grad: bool) -> None:
    torch.manual_seed(0)
    torch.compiler.reset()
    plain = make().bfloat16().float()
    ours = pack_module(copy.deepcopy(plain), min_bytes=0)
    given = torch.empty(2, device="meta"), torch.randn(shape)
    with torch.set_grad_enabled(grad):
        found = torch.compile(ours, backend="eager", fullgraph=True)(*given)
        assert_same_bits(found, plain(*given))


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("inference", {"materialize": 1}),
        ("training", {"linear": 2}),
        ("tiles", {"tiled_linear": 2}),
        ("a layer", {"materialize": 1}),
        ("another's weight", {"materialize": 2}),
    ],
)
def test_a_compiled_blocks_weights_are_decoded_once(case: str, expected: dict[str, int]) -> None:
    """All together, but for those that are needed for gradients, and for large ones."""
    torch.compiler.reset()
    block = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 64))
    plain = nn.ModuleList([block, nn.Linear(64, 64)]).bfloat16().float()
    ours = pack_module(copy.deepcopy(plain), min_bytes=0)
    if case == "tiles":
        for layer in (ours[0][0], ours[0][2]):
            layer.weight.packed.tile_bytes = 96 << 10
        finish(ours)
    found: list[dict[str, int]] = []

    def backend(graph: Any, _: Any) -> Any:
        names = [str(it.target).split(".")[1] for it in graph.graph.nodes if "tpde." in str(it.target)]
        found.append({name: names.count(name) for name in names})
        return graph

    def both(x: Any) -> Any:
        return ours[0](x) + x @ ours[1].weight

    run = {"a layer": ours[1], "another's weight": both}.get(case, ours[0])
    x = torch.randn(3, 64)
    with torch.set_grad_enabled(case == "training"):
        made = torch.compile(run, backend=backend, fullgraph=True)(x)
        expect = {"a layer": plain[1], "another's weight": lambda x: plain[0](x) + x @ plain[1].weight}
        assert_same_bits(made, expect.get(case, plain[0])(x))
    assert found == [expected]
    assert ours[0].__dict__["tpde_forward"].group.flat is None


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "t5", "bert"])
def test_compiled_inference_without_graph_breaks(name: str) -> None:
    model = make(name, torch.float32)
    took = inputs(name, 2, 6) | ({} if name == "bert" else {"use_cache": False})
    with torch.no_grad():
        expected = model(**took)[0]
        pack_module(model, min_bytes=0)
        found = torch.compile(model, fullgraph=True, backend="aot_eager")(**took)[0]
        assert_same_bits(model(**took)[0], expected)  # tracing left nothing behind
    torch.testing.assert_close(found, expected)
    torch._dynamo.reset()


def _deep() -> tuple[Any, Any, dict[str, Any]]:
    """A packed model of six blocks, what it computes, and of what."""
    model = make("llama", torch.float32)
    model.model.layers.extend(copy.deepcopy(list(model.model.layers)))
    model.config.num_hidden_layers = len(model.model.layers)
    for layer in model.model.layers:
        layer.mlp.up_proj.weight.data.normal_(std=0.02)
    took = inputs("llama", 2, 6) | {"use_cache": False}
    with torch.no_grad():
        expected = model(**took).logits
    return pack_module(model, min_bytes=0), expected, took


def _compile_blocks(model: Any, how: str, backend: Any) -> None:
    for layer in model.model.layers:
        if how == "compile":
            layer.compile(backend=backend, fullgraph=True)
        else:
            layer.forward = torch.compile(layer.forward, backend=backend, fullgraph=True)


@pytest.mark.parametrize("how", ["compile", "forward"])
def test_blocks_compiled_one_by_one_share_a_program(how: str) -> None:
    model, expected, took = _deep()
    graphs: list[Any] = []

    def backend(graph: Any, example: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    _compile_blocks(model, how, backend)
    with torch.no_grad():
        for _ in range(2):
            assert_same_bits(model(**took).logits, expected)
    assert len(graphs) == 2  # of the first block; and with the key as an input
    for graph in graphs:
        assert len(graph.graph.find_nodes(op="call_function", target=torch.ops.tpde.materialize)) == 1
    torch._dynamo.reset()


@pytest.mark.parametrize("limit", [1, 3])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_blocks_beyond_the_compilers_limit_run_as_without_it(grad: bool, limit: int) -> None:
    model, expected, took = _deep()
    for layer in model.model.layers:
        layer.compile(backend="eager")
    with torch._dynamo.config.patch(recompile_limit=limit), torch.set_grad_enabled(grad):
        assert_same_bits(model(**took).logits, expected)
    assert not model.lm_head.tpde_group().workspace.depth
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "bert"])
def test_compiled_training_keeps_no_weight(name: str) -> None:
    """No plain weight is among what the compiled forward pass hands to the backward pass."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    kept: list[Any] = []

    def forward(graph: Any, example: Any) -> Any:
        (result,) = graph.graph.find_nodes(op="output")
        kept.extend(node.meta["val"] for node in result.args[0] if hasattr(node, "meta"))
        return make_boxed_func(graph)

    model = make(name, torch.float32).requires_grad_(False)
    for key, parameter in model.named_parameters():
        if "norm" in key.lower() or "ln_" in key:
            parameter.requires_grad_(True)
    took = inputs(name, 2, 6) | ({} if name == "bert" else {"use_cache": False})

    def gradients(run: Any) -> dict[str, Any]:
        model.zero_grad()
        run(**took)[0].square().mean().backward()
        return {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}

    expected = gradients(model)
    pack_module(model, min_bytes=0)
    sizes = {slot.nbytes // 4 for m in model.modules() for slot in getattr(m, "tpde_slots", {}).values()}
    backend = aot_autograd(
        fw_compiler=forward,
        bw_compiler=lambda graph, _: make_boxed_func(graph),
        partition_fn=min_cut_rematerialization_partition,
    )
    found = gradients(torch.compile(model, fullgraph=True, backend=backend))
    assert found.keys() == expected.keys()
    for key, gradient in expected.items():
        torch.testing.assert_close(found[key], gradient)
    assert kept
    large = [tuple(value.shape) for value in kept if hasattr(value, "numel") and value.numel() in sizes]
    assert not large
    torch._dynamo.reset()


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_inductor() -> None:
    model = make("llama", torch.float32)
    del model.model.layers[1:]
    took = inputs("llama", 2, 6)
    with torch.no_grad():
        expected = model(**took, use_cache=False).logits
        pack_module(model, min_bytes=0)
        compiled = torch.compile(model, fullgraph=True)
        for _ in range(2):
            found = compiled(**took, use_cache=False).logits
            torch.testing.assert_close(found, expected)
            assert torch.equal(found.argmax(-1), expected.argmax(-1))
    torch._dynamo.reset()


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_inductor_with_the_key_as_an_input() -> None:
    model, expected, took = _deep()
    _compile_blocks(model, "compile", "inductor")
    with torch.no_grad():
        torch.testing.assert_close(model(**took).logits, expected)
    torch._dynamo.reset()
