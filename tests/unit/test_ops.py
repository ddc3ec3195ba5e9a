"""Materializing, and the custom operators, on the CPU."""

from __future__ import annotations

import copy
import pickle
import shutil
from typing import Any

import numpy as np
import pytest
from support.codecs import pack_everything
from support.contents import CONTENTS, fill
from support.models import assert_same_bits, inputs, make, torch
from torch import nn

from tpde.errors import Corrupt, InvalidInput, Truncated, UnsupportedVersion
from tpde.format.container import TensorSpec
from tpde.frameworks import to_torch
from tpde.nn import PackedParameter, finish, pack_module, pack_tensor
from tpde.nn.slot import Slot
from tpde.weights import operators as ops
from tpde.weights.decoder import Materializer
from tpde.weights.resident import Resident
from tpde.weights.rows import RowReader

CPU = torch.device("cpu")


def _tensor(content: str, dtype: str, shape: tuple[int, ...]) -> Any:
    spec = TensorSpec(dtype, shape)
    return to_torch(np.frombuffer(fill(content, spec), np.uint8).copy(), spec)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "F64", "F8_E4M3", "F8_E5M2"])
def test_every_content_in_one_buffer(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pack_everything(monkeypatch)
    tensors = [_tensor(content, dtype, (37, 512)) for content in CONTENTS]
    packed = [pack_tensor(tensor, content) for tensor, content in zip(tensors, CONTENTS, strict=True)]
    items, at = [], 0
    for it, tensor in zip(packed, tensors, strict=True):
        assert it is not None
        items.append((it.sources[0], at))
        at += tensor.nbytes + 512
    out = torch.full((at,), 0xA5, dtype=torch.uint8)
    Materializer(items, CPU)(out)
    for (_, offset), tensor in zip(items, tensors, strict=True):
        end = offset + tensor.nbytes
        assert_same_bits(out[offset:end], tensor.view(-1).view(torch.uint8))
        assert (out[end : end + 512] == 0xA5).all()


def test_blobs_that_are_none() -> None:
    good = pack_tensor(torch.randn(100, 100), "w").sources[0].blob
    for other in (good.view(2, -1), good.view(torch.int8), good.repeat_interleave(2)[::2], good.view(-1, 1)):
        with pytest.raises(InvalidInput, match="`w`: a blob is one-dimensional"):
            Resident(other, "w")
    with pytest.raises(InvalidInput, match="meta"):
        Resident(good.to("meta"), "w")
    with pytest.raises(Truncated, match="`w`"):
        Resident(good[:-1000].clone(), "w")
    newer = good.clone()
    newer[8] = 9
    with pytest.raises(UnsupportedVersion, match="`w`"):
        Resident(newer, "w")
    bad = good.clone()
    bad[200] ^= 1  # in a table
    with pytest.raises(Corrupt, match="`w`") as caught:
        Resident(bad, "w")
    assert caught.value.tensor == "w"


def test_pickled_blob() -> None:
    tensor = torch.randn(100, 100)
    packed = pickle.loads(pickle.dumps(pack_tensor(tensor, "w")))
    assert_same_bits(packed.decoded(), tensor)


def test_rows_refuse_other_indices() -> None:
    rows = RowReader(pack_tensor(torch.randn(100, 64), "w").sources[0])
    with pytest.raises(RuntimeError, match="integers of 32 or 64 bits"):
        rows(torch.zeros(3))


@pytest.fixture
def slot() -> tuple[Slot, Any]:
    """A packed matrix, and what it is."""
    torch.manual_seed(0)
    weight = torch.randn(48, 64)
    packed = pack_tensor(weight, "w")
    assert packed is not None
    return Slot("weight", PackedParameter(packed)), weight


def test_operators_are_well_formed(slot: tuple[Slot, Any]) -> None:
    key = slot[0].key
    x, y = torch.randn(2, 3, 64, requires_grad=True), torch.randn(5, 48, requires_grad=True)
    bias = torch.randn(48, requires_grad=True)
    torch.library.opcheck(ops.materialize, (x.detach(), key, 48 * 64, torch.float32))
    torch.library.opcheck(ops.linear, (x, bias, key, 48, False))
    torch.library.opcheck(ops.linear, (x, None, key, 48, False))
    torch.library.opcheck(ops.linear, (y, None, key, 64, True))
    torch.library.opcheck(ops.embedding, (torch.tensor([[3, 5]]), key, 64, torch.float32))


def test_what_the_compiler_keeps_does_not_depend_on_units() -> None:
    """It keeps graphs on disk, for other processes, in which a key stands for other weights."""
    x, key = torch.empty(2, 64, device="meta"), 1 << 40
    assert ops.linear(x, None, key, 48, False).shape == (2, 48)
    assert ops.linear_backward(x, key, 48, False).shape == (2, 48)
    assert ops.tiled_linear(x, None, key, 48, False).shape == (2, 48)
    assert ops.tiled_linear_backward(x, key, 48).shape == (2, 48)
    rows = ops.embedding(torch.empty(2, dtype=torch.int64, device="meta"), key, 48, torch.float16)
    assert (rows.shape, rows.dtype) == ((2, 48), torch.float16)


def test_gradients_of_gradients() -> None:
    weight = torch.randn(48, 64)
    slot = Slot("w", PackedParameter(pack_tensor(weight, "w")))
    found = []
    for transposed in (False, True):
        for work in (ops.linear, nn.functional.linear):
            x = torch.linspace(-1, 1, 2 * (48 if transposed else 64)).view(2, -1).requires_grad_()
            held = weight.t() if transposed else weight
            ours = (slot.key, len(held), transposed)
            y = work(x, None, *ours) if work is ops.linear else work(x, held)
            (first,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
            first.sin().sum().backward()
            found.append(x.grad)
    for one, other in zip(found[::2], found[1::2], strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("trained", ["x", "bias", "both"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tiled", [False, True])
def test_only_gradients_that_are_wanted_are_computed(
    tiled: bool, bias: bool, trained: str, slot: tuple[Slot, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, weight = slot
    if tiled:
        packed.packed.tile_bytes = 96 << 10
    x = torch.randn(2, 64, requires_grad=trained != "bias")
    b = torch.randn(48, requires_grad=trained != "x") if bias else None
    if not x.requires_grad and b is None:
        return
    work = ops.tiled_linear if tiled else ops.linear
    found, expected = work(x, b, packed.key, 48, False), nn.functional.linear(x, weight, b)
    assert_same_bits(found, expected)
    decoded: list[int] = []
    decode = Resident.decode_on_host
    monkeypatch.setattr(
        Resident, "decode_on_host", lambda self, *args: (decoded.append(1), decode(self, *args))[1]
    )
    leaves = [it for it in (x, b) if it is not None and it.requires_grad]
    ours = torch.autograd.grad(found.sum(), leaves)
    assert bool(decoded) == x.requires_grad
    for one, other in zip(ours, torch.autograd.grad(expected.sum(), leaves), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("work", ["tiled_linear", "materialize"])
def test_operators_without_gradients_of_gradients(work: str, slot: tuple[Slot, Any]) -> None:
    packed, _ = slot
    x = torch.randn(2, 64, requires_grad=True)
    if work == "materialize":
        found = ops.materialize(x, packed.key, 48 * 64, torch.float32)
        with pytest.raises(NotImplementedError, match="gradients of gradients"):
            found.sum().backward()
        return
    if work == "tiled_linear":
        packed.packed.tile_bytes = 96 << 10
    y = getattr(ops, work)(x, None, packed.key, 48, False)
    (first,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="gradients of gradients"):
        first.sum().backward()


@pytest.mark.parametrize("transposed", [False, True])
def test_linear(slot: tuple[Slot, Any], transposed: bool) -> None:
    packed, weight = slot
    weight = weight.t() if transposed else weight
    torch.manual_seed(1)
    x = torch.randn(2, 3, weight.shape[1], requires_grad=True)
    bias = torch.randn(weight.shape[0], requires_grad=True)
    expected = nn.functional.linear(x, weight, bias)
    found = torch.ops.tpde.linear(x, bias, packed.key, weight.shape[0], transposed)
    assert_same_bits(found, expected)
    grads = torch.autograd.grad(expected.square().sum(), (x, bias))
    for ours, theirs in zip(torch.autograd.grad(found.square().sum(), (x, bias)), grads, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_key_dies_with_its_unit(slot: tuple[Slot, Any]) -> None:
    packed, _ = slot
    old = packed.key
    packed.changed()
    assert packed.key != old
    other = Slot("weight", packed.parameter)
    key = other.key
    del other
    with pytest.raises(InvalidInput, match="compile the model again"):
        torch.ops.tpde.materialize(torch.empty(0), key, 48 * 64, torch.float32)


class Doubled(nn.Linear):
    """Computes with its weight by itself."""

    def forward(self, x: Any) -> Any:
        return nn.functional.linear(x, self.weight * 2, self.bias)


class Wrapped(nn.Linear):
    """Does something with what its parent class computes."""

    def forward(self, x: Any) -> Any:
        return super().forward(x) * 2


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
