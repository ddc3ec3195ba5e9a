"""Gradients flow through packed weights, with the plain model's bits, and nothing keeps plain weights."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from support.models import VOCAB, assert_same_bits, inputs, make, torch
from torch import nn

import tpde
from tpde.errors import PackedWeight
from tpde.nn import PackedModule, PackedParameter, add_deltas, pack_module

# Theirs: of each other's names.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*adapter.*:UserWarning")


def _loss(name: str, model: Any, took: dict[str, Any], **more: Any) -> Any:
    found = model(**took, **more)
    states = found.logits if hasattr(found, "logits") else found.last_hidden_state
    return states.float().square().mean()


def _input_gradient(name: str, model: Any) -> list[Any]:
    """Gradients to what the embeddings give."""
    took = inputs(name, 2, 6)
    seen = []

    def record(module: Any, args: Any, output: Any) -> None:
        output.requires_grad_(True)
        output.retain_grad()
        seen.append(output)

    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    hooks = [table.register_forward_hook(record) for table in tables]
    _loss(name, model, took).backward()
    for hook in hooks:
        hook.remove()
    return [state.grad for state in seen]


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "mixtral", "t5"])
def test_gradients_to_inputs(name: str) -> None:
    model = make(name, torch.float32)
    model.requires_grad_(False)
    expected = _input_gradient(name, model)
    assert expected
    assert expected[0].abs().sum() > 0
    pack_module(model, min_bytes=0)
    assert_same_bits(_input_gradient(name, model), expected)
    layers = [m for m in model.modules() if isinstance(m, (nn.Linear, nn.Embedding))]
    assert all(isinstance(m, PackedModule) for m in layers if m.weight.numel() > 1024)


def test_gradients_to_biases_and_norms() -> None:
    model = make("gpt2", torch.float32)
    took = inputs("gpt2", 2, 6)
    _loss("gpt2", model, took).backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    pack_module(model, min_bytes=4096)
    _loss("gpt2", model, took).backward()
    left = dict(model.named_parameters())
    assert list(left) == list(expected)
    assert isinstance(left["transformer.h.0.attn.c_attn.weight"], PackedParameter)
    for name, parameter in left.items():
        if isinstance(parameter, PackedParameter):
            assert parameter.grad is None
        else:
            assert_same_bits(parameter.grad, expected[name], name)


@pytest.mark.parametrize("shape", ["1d", "2d"])
def test_gradients_through_convolutions(shape: str) -> None:
    torch.manual_seed(0)
    conv, x = {
        "1d": (nn.Conv1d(16, 32, 3, padding=1), torch.randn(2, 16, 20)),
        "2d": (nn.Conv2d(16, 32, 3, stride=2), torch.randn(2, 16, 9, 9)),
    }[shape]
    conv.requires_grad_(False)
    x.requires_grad_(True)
    y = conv(x)
    y.square().sum().backward()
    expected, x.grad = x.grad, None
    pack_module(conv, min_bytes=0)
    again = conv(x)
    assert_same_bits(again, y)
    again.square().sum().backward()
    assert_same_bits(x.grad, expected)


class Adapter(nn.Module):
    """A low-rank addition to a linear layer, as LoRA's."""

    def __init__(self, base: Any, inner: int, outer: int) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(4, inner) * 0.1)
        self.b = nn.Parameter(torch.randn(outer, 4) * 0.1)

    def forward(self, x: Any) -> Any:
        return self.base(x) + x @ self.a.t() @ self.b.t()


def _adapted(model: Any) -> Any:
    torch.manual_seed(7)
    for layer in model.model.layers:
        for holder, name in ((layer.self_attn, "q_proj"), (layer.mlp, "down_proj")):
            base = getattr(holder, name)
            setattr(holder, name, Adapter(base, base.in_features, base.out_features))
    return model


def _train(model: Any, took: dict[str, Any], steps: int = 3, **more: Any) -> list[Any]:
    adapters = [p for p in model.parameters() if p.requires_grad]
    assert adapters
    optimizer = torch.optim.SGD(adapters, lr=0.5)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = _loss("llama", model, took, **more)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(p.detach() for p in adapters)]


def _checkpointed(model: Any, reentrant: bool) -> None:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    model.train()


@pytest.mark.parametrize("checkpointing", [None, False, True])
@pytest.mark.parametrize("pack_last", [False, True])
def test_adapters(pack_last: bool, checkpointing: bool | None) -> None:
    plain = make("llama", torch.float32)
    plain.requires_grad_(False)
    packed = copy.deepcopy(plain)
    _adapted(plain)
    if pack_last:
        pack_module(_adapted(packed), min_bytes=0)
        assert all(p.requires_grad for n, p in packed.named_parameters() if n.endswith((".a", ".b")))
    else:
        _adapted(pack_module(packed, min_bytes=0))
    if checkpointing is not None:
        _checkpointed(plain, checkpointing)
        _checkpointed(packed, checkpointing)
    took = inputs("llama", 2, 9)
    assert_same_bits(_train(packed, took), _train(plain, took))


@pytest.mark.parametrize("ops", [["addmm"], ["addmm", "gelu"], []], ids=str)
def test_selective_checkpointing(ops: list[str]) -> None:
    """What the second pass does not find in the first one's record it would stop at."""
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)).requires_grad_(False)
    packed, found = pack_module(copy.deepcopy(plain), min_bytes=0), []
    kept = [getattr(torch.ops.aten, name).default for name in ops]
    for model in (plain, packed):
        x = torch.linspace(-1, 1, 1024).view(4, 256).requires_grad_()
        made = checkpoint(
            model, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(kept)
        )
        made.square().sum().backward()
        found.append([made.detach(), x.grad])
    assert_same_bits(found[1], found[0])


class Halves(nn.Module):
    """Has views of its own, which a policy keeps or not."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64, bias=False)

    def forward(self, x: Any) -> Any:
        left, right = self.up(x)[:, :32].tanh(), self.up(x)[:, 32:].view(-1, 32)
        return x + self.down(torch.cat([left, right.t().sigmoid().t()], 1))


class Keeps(nn.Module):
    """Multiplies by a weight that it kept in its first pass."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.kept = nn.Linear(64, 64, bias=False), list[Any]()

    def forward(self, x: Any) -> Any:
        y = self.up(x)
        if self.kept:
            return y.tanh() @ self.kept[0]
        self.kept.append(self.up.weight.detach().view(64, 64))
        return y


@pytest.mark.parametrize("since", ["nothing", "it was written to", "another delta is used"])
def test_what_was_kept_of_a_weight_is_saved_as_it_is(since: str) -> None:
    """The backward pass has what the forward one multiplied by, not the weight as it is now."""
    torch.manual_seed(0)
    plain = nn.Sequential(Keeps()).requires_grad_(False)
    tuned = copy.deepcopy(plain)
    tuned[0].up.weight.mul_(2)
    model = pack_module(copy.deepcopy(plain), min_bytes=0)
    add_deltas(model, {"tuned": tpde.make_delta(plain, tuned)})
    x = torch.linspace(-1, 1, 256).view(4, 64).requires_grad_()
    model(x)
    if since == "it was written to":
        model[0].kept[0].mul_(3)
    if since == "another delta is used":
        model.use("tuned")
    kept, up = model[0].kept[0].clone(), (tuned if since == "another delta is used" else plain)[0].up
    needed = torch.autograd.grad((up(x).tanh() @ kept).sum(), x)
    assert_same_bits(torch.autograd.grad(model(x).sum(), x), needed)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("again", [["tanh"], [], ["t", "slice", "sigmoid"], ["addmm", "mm"]], ids=str)
def test_selective_checkpointing_that_keeps_views(again: list[str], frozen: bool) -> None:
    """It keeps views of weights, too, and gives them in the second pass, in the order of the first."""
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        name = op._schema.name.removeprefix("aten::")
        return CheckpointPolicy.PREFER_RECOMPUTE if name in again else CheckpointPolicy.MUST_SAVE

    torch.manual_seed(0)
    plain = nn.ModuleList(Halves() for _ in range(3)).requires_grad_(not frozen)
    packed, found = pack_module(copy.deepcopy(plain), min_bytes=0), []
    for model in (plain, packed):
        x = torch.linspace(-1, 1, 64 * 64).view(64, 64).requires_grad_()  # as large as the weights
        y = x
        for block in model:
            contexts = functools.partial(create_selective_checkpoint_contexts, policy)
            y = checkpoint(block, y, use_reentrant=False, context_fn=contexts)
        y.square().sum().backward()
        biases = [block.up.bias.grad for block in model]
        found.append([y.detach(), x.grad, *(it for it in biases if it is not None)])
    assert_same_bits(found[1], found[0])


@pytest.mark.parametrize("packed_before", [False, True])
def test_layers_that_are_trained_beside_frozen_ones_stay_plain(packed_before: bool) -> None:
    """Adapters of any library: they are the smaller part of what is packed, and none of it is trained."""
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 128)).bfloat16()
    plain[0].requires_grad_(False)
    ours = copy.deepcopy(plain)
    if packed_before:
        pack_module(ours[0], min_bytes=0)
    pack_module(ours, min_bytes=0)
    assert [type(it.weight) for it in ours] == [PackedParameter, nn.Parameter]
    x = torch.randn(3, 256).bfloat16()
    for model in (plain, ours):
        model(x).float().square().sum().backward()
    assert_same_bits(ours[1].weight.grad, plain[1].weight.grad)


def test_no_graph_keeps_a_plain_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither what autograd saved nor what the backward pass decoded stays alive."""
    from tpde.nn.slot import Slot

    alive: list[weakref.ref[Any]] = []
    instead: Callable[[Slot], Any] = Slot.instead

    def watched(slot: Slot) -> Any:
        assert sum(ref() is not None for ref in alive) <= 1, "two plain weights at once"
        weight = instead(slot)
        assert space.buffer is None, "the workspace beside a plain weight"
        alive.append(weakref.ref(weight.untyped_storage()))
        return weight

    monkeypatch.setattr(Slot, "instead", watched)
    model = _adapted(pack_module(make("llama", torch.float32).requires_grad_(False), min_bytes=0))
    saved: list[int] = []
    space = model.model.layers[0].mlp.up_proj.tpde_group().workspace
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        loss = _loss("llama", model, inputs("llama", 2, 9))
    assert saved
    assert not [at for at in saved if space.start <= at < space.end]
    assert not alive
    loss.backward()
    gc.collect()
    assert len(alive) >= 3 * 7 - 3  # every linear layer that passes a gradient on
    assert not [ref for ref in alive if ref() is not None]


def test_peft() -> None:
    peft = pytest.importorskip("peft", reason="needs peft")
    losses = []
    for packed in (False, True):
        model = make("llama")
        if packed:
            pack_module(model, min_bytes=0)
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
        torch.manual_seed(3)
        adapted = peft.get_peft_model(model, config)
        losses.append(_train(adapted, inputs("llama", 2, 9), 4))
        if packed:
            with pytest.raises(PackedWeight, match="unpack_module"):
                adapted.merge_and_unload()
    assert_same_bits(losses[1], losses[0])
    assert losses[0][0] != losses[0][3]


def test_training_a_packed_weight_is_refused() -> None:
    model = pack_module(nn.Linear(64, VOCAB), min_bytes=0)
    with pytest.raises(PackedWeight, match="unpack_module"):
        model.requires_grad_(True)
    with pytest.raises(PackedWeight, match="cannot be replaced"):
        model.weight = nn.Parameter(torch.zeros(VOCAB, 64))


def test_compiled_under_autocast() -> None:
    """Products are of the dtype that the compiled plain model's have."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)).requires_grad_(False)
    x = torch.randn(4, 64, requires_grad=True)

    def run(model: Any) -> list[Any]:
        torch._dynamo.reset()
        with torch.autocast("cpu", torch.bfloat16):
            y = torch.compile(model, fullgraph=True)(x)
        (gradient,) = torch.autograd.grad(y.float().sum(), x)
        return [y.detach(), gradient]

    expected = run(plain)
    assert expected[0].dtype == torch.bfloat16
    found = run(pack_module(copy.deepcopy(plain), min_bytes=0))
    torch._dynamo.reset()
    for ours, theirs in zip(found, expected, strict=True):
        assert_same_bits(ours, theirs)
