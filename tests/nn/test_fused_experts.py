"""Experts in the window layout: on the CPU all is as with plain weights; by kernels, a row has its bits."""

from __future__ import annotations

import copy
import io
import logging
import pickle
from typing import Any

import numpy as np
import pytest
from support.emulated import windows_on_cpu  # noqa: F401
from support.experts import NAMES, WAYS, as_on_gpu, experts_of, moe  # noqa: F401
from support.models import VOCAB, assert_same_bits, torch

import tpde
from tpde.codec import window_plan, window_stacks
from tpde.errors import Corrupt, InvalidInput, PackedWeight, Truncated, UnsupportedVersion
from tpde.nn import (
    PackedParameter,
    PackedTensor,
    add_deltas,
    modules,
    pack_module,
    packed_modules,
    plain_state_dict,
    set_kernels,
    unpack_module,
)
from tpde.nn import routed as routed_module
from tpde.weights.expert_products import Experts
from tpde.weights.experts_in_windows import can_be_experts
from tpde.weights.packed_tensor import rebuild_tensor
from tpde.weights.windowed_experts import WindowedExperts

nn = torch.nn


def ids(batch: int, length: int) -> Any:
    draw = torch.Generator().manual_seed(batch * 1000 + length)
    return torch.randint(2, VOCAB, (batch, length), generator=draw)


def packed(plain: Any, kernels: Any = "fused") -> Any:
    return set_kernels(pack_module(copy.deepcopy(plain), min_bytes=0), kernels)


def layers(model: Any) -> list[Any]:
    return [it for _, it in packed_modules(model) if hasattr(it, "down_proj") and hasattr(it, "config")]


def stored(model: Any) -> list[bytes]:
    return [source.stored().numpy().tobytes() for it in experts_of(model) for source in it.sources]


@pytest.fixture(scope="module", params=NAMES)
def plain(request: Any) -> Any:
    return moe(request.param)


@pytest.fixture
def fused(plain: Any) -> Any:
    return packed(plain)


# ---- on the CPU ----


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_outputs_and_files_are_the_plain_model_s(name: str, how: str) -> None:
    plain = moe(name, how)
    exact = packed(plain, "exact")
    before = stored(exact)
    model = set_kernels(exact, "fused")
    assert [it.multiplies for it in experts_of(model)] == [True] * 4
    assert all(isinstance(it.sources[0], WindowedExperts) for it in experts_of(model))
    for batch, length in ((1, 1), (2, 9), (3, 40)):
        with torch.no_grad():
            assert_same_bits(model(ids(batch, length)).logits, plain(ids(batch, length)).logits)
        assert_same_bits(model(ids(batch, length)).logits, plain(ids(batch, length)).logits)
    assert stored(model) == before
    for key, value in plain.state_dict().items():
        assert_same_bits(plain_state_dict(model)[key], value, key)
    set_kernels(model, "exact")
    assert not any(it.multiplies for it in experts_of(model))
    with torch.no_grad():
        assert_same_bits(model(ids(2, 9)).logits, plain(ids(2, 9)).logits)
    assert stored(model) == before


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_inputs(name: str, how: str) -> None:
    plain = moe(name, how)
    model, found = packed(plain), []
    for it in (plain, model):
        x = plain.get_input_embeddings()(ids(2, 5)).detach().requires_grad_()
        it(inputs_embeds=x).logits.float().square().sum().backward()
        norm = it.model.norm.weight
        found.append((x.grad, norm.grad))
        norm.grad = None
    assert_same_bits(*found)


def test_only_chosen_experts_are_decoded(plain: Any, fused: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real, seen = Experts.decode_some, []

    def decode_some(self: Experts, numbers: Any, out: Any) -> None:
        seen.append(list(numbers))
        real(self, numbers, out)

    monkeypatch.setattr(Experts, "decode_some", decode_some)
    with torch.no_grad():
        assert_same_bits(fused(ids(1, 1)).logits, plain(ids(1, 1)).logits)
    assert len(seen) == 4
    assert all(len(it) == 2 for it in seen)


def test_blocks_do_not_decode_them(fused: Any) -> None:
    for module in layers(fused):
        slots = list(module.tpde_slots.values())
        assert all(it.group is module.__dict__["tpde_own_group"] for it in slots)
        assert slots[0].group.slots == slots


def test_twice_is_once(fused: Any) -> None:
    before = [it.sources[0] for it in experts_of(fused)]
    groups = [slot.group for it in layers(fused) for slot in it.tpde_slots.values()]
    set_kernels(fused, "fused")
    assert [it.sources[0] for it in experts_of(fused)] == before
    assert [slot.group for it in layers(fused) for slot in it.tpde_slots.values()] == groups


@pytest.mark.parametrize("theirs", ["exact", "fused"])
@pytest.mark.parametrize("mine", ["exact", "fused"])
@pytest.mark.parametrize("assign", [False, True])
def test_state_dicts_of_either_kind(plain: Any, mine: Any, theirs: Any, assign: bool) -> None:
    other = copy.deepcopy(plain)
    with torch.no_grad():
        for it in other.parameters():
            it.mul_(1.5)
    model = packed(plain, mine)
    model.load_state_dict(packed(other, theirs).state_dict(), assign=assign)
    assert [it.multiplies for it in experts_of(model)] == [mine == "fused"] * 4
    with torch.no_grad():
        assert_same_bits(model(ids(2, 7)).logits, other(ids(2, 7)).logits)


def test_copies_and_pickles(plain: Any, fused: Any) -> None:
    file = io.BytesIO()
    torch.save(fused.state_dict(), file)
    file.seek(0)
    loaded = packed(plain)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    with torch.no_grad():
        needed = plain(ids(2, 7)).logits
        for made in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused)), loaded):
            assert all(it.multiplies for it in experts_of(made))
            assert_same_bits(made(ids(2, 7)).logits, needed)
        one = copy.deepcopy(layers(fused)[0])
        x, index = torch.randn(3, 64).bfloat16(), torch.tensor([[0, 1], [1, 3], [2, 0]])
        scores = torch.rand(3, 2).bfloat16()
        for made in (one, pickle.loads(pickle.dumps(layers(fused)[0]))):
            assert_same_bits(made(x, index, scores), layers(fused)[0](x, index, scores))


def test_moving_keeps_the_bytes(plain: Any, fused: Any) -> None:
    before = [it.sources[0].memory.clone() for it in experts_of(fused)]
    fused.to("cpu").share_memory()
    assert all(it.sources[0].memory.is_shared() for it in experts_of(fused))
    assert all(torch.equal(a, it.sources[0].memory) for a, it in zip(before, experts_of(fused), strict=True))
    for wrong in (lambda: fused.to("meta"), fused.float):
        with pytest.raises(PackedWeight):
            wrong()
    with torch.no_grad():
        assert_same_bits(fused(ids(2, 7)).logits, plain(ids(2, 7)).logits)
    moved = copy.deepcopy(fused)
    moved._apply(lambda it: it.clone())
    with torch.no_grad():
        assert_same_bits(moved(ids(2, 7)).logits, plain(ids(2, 7)).logits)


def test_updates_in_place(plain: Any) -> None:
    other, model = copy.deepcopy(plain), packed(plain)
    with torch.no_grad():
        other.model.layers[1].mlp.experts.down_proj[2, ::3] *= 1.5
        other.model.layers[0].mlp.experts.gate_up_proj[0, 5] = 1e30
    delta = tpde.make_delta(dict(plain.state_dict()), dict(other.state_dict()))
    for _ in range(2):
        assert tpde.apply_delta(model, delta) >= 0
        assert all(it.multiplies for it in experts_of(model))
        with torch.no_grad():
            assert_same_bits(model(ids(2, 7)).logits, other(ids(2, 7)).logits)
    with pytest.raises(PackedWeight, match="window layout"):
        add_deltas(model, {"math": tpde.make_delta(dict(other.state_dict()), dict(plain.state_dict()))})


def test_unpacked_is_what_it_was(plain: Any, fused: Any) -> None:
    model = unpack_module(fused)
    for key, value in plain.state_dict().items():
        assert_same_bits(model.state_dict()[key], value, key)
    with torch.no_grad():
        assert_same_bits(model(ids(2, 7)).logits, plain(ids(2, 7)).logits)


def test_code_that_takes_the_parameter(plain: Any, fused: Any) -> None:
    ours, theirs = layers(fused)[0].down_proj, plain.model.layers[0].mlp.experts.down_proj
    assert isinstance(ours, PackedParameter)
    assert_same_bits(ours[1], theirs[1])
    x = torch.randn(theirs.shape[0], 3, theirs.shape[1]).bfloat16()
    assert_same_bits(torch.bmm(x, ours), torch.bmm(x, theirs))
    for wrong in (theirs, ours):
        with pytest.raises(RuntimeError):
            nn.functional.linear(torch.randn(3, theirs.shape[2]).bfloat16(), wrong)
        with pytest.raises(RuntimeError, match="2-D"):
            nn.functional.embedding(torch.tensor([0]), wrong)


def test_autocast_and_replaced_weights(plain: Any, fused: Any) -> None:
    mine, theirs = layers(fused)[0], plain.model.layers[0].mlp.experts
    x, index, scores = torch.randn(3, 64).bfloat16(), torch.tensor([[0, 1], [1, 3], [2, 0]]), torch.rand(3, 2)
    for lower in (torch.bfloat16, torch.float16):
        with torch.no_grad(), torch.autocast("cpu", lower):
            assert_same_bits(
                mine(x, index, scores.bfloat16()), theirs(x, index, scores.bfloat16()), str(lower)
            )
    given = {name: torch.ones(it.shape).bfloat16() for name, it in theirs.named_parameters()}
    call = (x, index, scores.bfloat16())
    with torch.no_grad():
        assert_same_bits(
            torch.func.functional_call(mine, given, call), torch.func.functional_call(theirs, given, call)
        )


@pytest.mark.parametrize("how", WAYS)
def test_compiled(how: str) -> None:
    plain = moe("qwen3_moe", how)
    model = packed(plain)
    made = torch.compile(model, backend="aot_eager", fullgraph=how != "eager")
    reference = torch.compile(plain, backend="aot_eager", fullgraph=how != "eager")
    with torch.no_grad():
        assert_same_bits(made(ids(2, 7)).logits, reference(ids(2, 7)).logits)


# ---- what a stack is ----


def words(experts: int, rows: int, columns: int) -> Any:
    draw = np.random.default_rng(experts * rows * columns)
    return torch.from_numpy(draw.standard_normal((experts, rows, columns)).astype(np.float32)).bfloat16()


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 17, 5), (5, 33, 70), (2, 100, 384)], ids=str)
def test_parts(shape: tuple[int, int, int], turned: bool) -> None:
    """Spans of any place, experts, and all."""
    plain = words(*shape)
    made = WindowedExperts.of_plain(plain, "it", 1e9, turned)
    assert made is not None
    assert made.shape == shape
    weight, flat = PackedTensor(made), plain.view(-1).view(torch.uint8)
    assert_same_bits(weight.decoded(), plain)
    for number in range(shape[0]):
        assert_same_bits(weight.expert(number).decoded().view(torch.bfloat16).view(shape[1:]), plain[number])
    draw = np.random.default_rng(0)
    for _ in range(20):
        begin, end = np.sort(draw.integers(0, flat.numel() + 1, 2)).tolist()
        assert torch.equal(weight.span(begin, end).decoded(), flat[begin:end])
    again = WindowedExperts(made.pickled(), "it")
    assert again.stack == made.stack
    for number, blob in enumerate(made.stack.windows):
        alone = window_plan.encode(
            np.ascontiguousarray(
                (plain[number].t() if turned else plain[number]).contiguous().view(torch.int16).numpy()
            )
        )
        assert np.array_equal(made.stack.blob(made.memory.numpy(), number), alone)
        assert blob.nbytes % 128 == 0


def test_damaged_stacks_are_refused(fused: Any) -> None:
    weight = experts_of(fused)[0]
    _, (blobs, *rest) = weight.__reduce__()
    whole, stack = blobs[0].numpy(), weight.sources[0].stack
    assert rebuild_tensor(blobs, *rest).multiplies
    messages = []
    inside = [at + it for at in stack.starts for it in (*range(64), 200)]
    for at in (*range(8, 128), *inside):
        damaged = whole.copy()
        damaged[at] ^= 0xFF
        try:
            made = rebuild_tensor([torch.from_numpy(damaged)], *rest)
            assert made.shape == weight.shape
        except (Corrupt, Truncated, UnsupportedVersion, InvalidInput) as error:
            messages.append(str(error))
    assert len(messages) >= 115 + 40 * len(stack.starts)
    for start, window in zip(stack.starts, stack.windows, strict=True):
        for at in (window.offsets_at, window.offsets_at + 4, window.entries_at - 1):
            damaged = whole.copy()
            damaged[start + at] ^= 0xFF
            with pytest.raises(Corrupt):
                rebuild_tensor([torch.from_numpy(damaged)], *rest)
    for size in (8, 127, 128, 600, stack.starts[1], stack.starts[1] + 50, whole.size - 1):
        with pytest.raises((Corrupt, Truncated, InvalidInput)):
            rebuild_tensor([torch.from_numpy(whole[:size].copy())], *rest)
    with pytest.raises(Corrupt, match="follow the last blob"):
        window_stacks.validate(np.concatenate([whole, np.zeros(128, np.uint8)]))
    fewer = whole.copy()
    fewer[16] -= 1
    with pytest.raises(Corrupt):
        window_stacks.validate(fewer)
    more = whole.copy()
    more[16:24] = 0x7F
    with pytest.raises(Corrupt, match="holds no"):
        window_stacks.validate(more)


def test_experts_of_other_shapes_are_no_stack() -> None:
    one, other = (window_plan.encode(np.zeros((16, it), np.uint16)) for it in (64, 128))
    with pytest.raises(Corrupt, match="another shape"):
        window_stacks.validate(np.concatenate([window_stacks.head(2, False), one, other]))


def test_what_can_be_experts() -> None:
    assert can_be_experts((4, 6, 8), [(4, 6, 8)], True)
    assert can_be_experts((4, 6, 8), [(3, 8)] * 8, False)
    assert can_be_experts((4, 6, 8), [(6, 8)] * 4, False)
    for shape, parts, turned in (
        ((4, 6, 8), [(3, 8)] * 8, True),
        ((4, 6, 8), [(2, 6, 8)] * 2, False),
        ((4, 6, 8), [(4, 8), (2, 8)] * 4, False),
        ((4, 6, 8), [(6, 8)] * 3, False),
        ((24, 8), [(24, 8)], False),
        ((0, 6, 8), [(0, 6, 8)], False),
    ):
        assert not can_be_experts(shape, parts, turned)


# ---- by kernels ----


def alone(weight: PackedTensor, x: Any, numbers: Any, bias: Any = None) -> Any:
    """Each row by itself."""
    rows = [weight.experts.product(x[i : i + 1], numbers[i : i + 1], 1, bias) for i in range(len(numbers))]
    return torch.cat(rows)


def test_models_by_kernels(plain: Any, fused: Any, as_on_gpu: Any) -> None:  # noqa: F811
    """Logits are near, and a sequence's are the same alone and in a batch: all experts by kernels."""
    model, launched = as_on_gpu(fused), []
    first = experts_of(model)[0].experts
    real = first._there.product
    first._there.product = lambda *given: (launched.append(given[4]), real(*given))
    with torch.no_grad():
        found, needed = model(ids(3, 7)).logits, plain(ids(3, 7)).logits
        assert launched == [42]  # 21 tokens, two experts each
        assert (found.float() - needed.float()).norm() <= 0.02 * needed.float().norm()
        assert not torch.equal(found, needed) or first.columns <= 64
        x = torch.randn(21, 64).bfloat16()
        module = layers(model)[0]
        index = torch.randint(0, 4, (21, 2))
        scores = torch.rand(21, 2).bfloat16()
        together = module(x, index, scores)
        assert len(launched) == 2
        for i in range(21):
            assert_same_bits(module(x[i : i + 1], index[i : i + 1], scores[i : i + 1]), together[i : i + 1])
        wide = torch.stack([x, x], 2)[:, :, 1]
        assert_same_bits(module(wide, index, scores), together)
        odd = torch.cat([x.new_zeros(1), x.view(-1)])[1:].view(x.shape)
        assert_same_bits(module(odd, index.t().contiguous().t(), scores), together)
        none = torch.full((21, 2), 4 if module.num_experts == 4 else 6)
        assert not module(x, none, scores).float().any()
        assert launched[-1] == 42


def test_sums_are_those_of_the_formula(fused: Any, as_on_gpu: Any) -> None:  # noqa: F811
    """The forward pass from both products, one row at a time."""
    model = as_on_gpu(fused)
    module = layers(model)[0]
    up, down = (slot.packed for slot in (module.tpde_slots[it] for it in ("gate_up_proj", "down_proj")))
    biases = (module.gate_up_proj_bias, module.down_proj_bias) if module.has_bias else (None, None)
    with torch.no_grad():
        x, index = torch.randn(5, 64).bfloat16(), torch.randint(0, 4, (5, 2))
        scores = torch.rand(5, 2).bfloat16()
        rows = alone(up, x.repeat_interleave(2, 0), index.view(-1), biases[0])
        y = alone(down, module._apply_gate(rows), index.view(-1), biases[1])
        needed = (y * scores.view(-1, 1)).view(5, 2, -1).sum(1)
        assert_same_bits(module(x, index, scores), needed)


def test_what_is_not_for_kernels(fused: Any, as_on_gpu: Any, plain: Any) -> None:  # noqa: F811
    """Many tokens, gradients, other dtypes and transforms decode, with the plain model's bits."""
    model = as_on_gpu(fused)
    mine, theirs = layers(model)[0], plain.model.layers[0].mlp.experts
    for it in experts_of(model):
        it.experts._there.product = lambda *_: pytest.fail("multiplied by the kernel")

    def call(tokens: int, dtype: Any = torch.bfloat16) -> tuple[Any, ...]:
        torch.manual_seed(tokens)
        x = torch.randn(tokens, 64).to(dtype)
        return x, torch.randint(0, 4, (tokens, 2)), torch.rand(tokens, 2).to(dtype)

    with torch.no_grad():
        assert_same_bits(mine(*call(65)), theirs(*call(65)))
        assert mine(*call(0)).shape == (0, 64)
        with torch.autocast("cpu", torch.float16):
            assert_same_bits(mine(*call(3)), theirs(*call(3)))
        with pytest.raises(RuntimeError):
            theirs(*call(3, torch.float32))
        with pytest.raises(RuntimeError):
            mine(*call(3, torch.float32))
    x, index, scores = call(3)
    grads = []
    for it in (mine, theirs):
        taken = x.clone().requires_grad_()
        it(taken, index, scores).float().sum().backward()
        grads.append(taken.grad)
    assert_same_bits(*grads)
    named = dict(zip(routed_module.arguments_of(type(theirs)), call(3), strict=True))  # type: ignore[arg-type]
    mine.config._experts_implementation = "sonicmoe"
    assert routed_module.routed(mine, (), named) is None
    mine.config._experts_implementation = "eager"
    mine._is_expert_parallel = True
    assert routed_module.routed(mine, (), named) is None
    mine._is_expert_parallel = False
    with torch.no_grad():
        assert routed_module.routed(mine, (), named) is not None
        assert routed_module.routed(mine, (named["hidden_states"],), named) is None


@pytest.mark.parametrize("how", WAYS)
def test_compiled_products(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one graph, with the bits of eager code; another number of tokens takes decoded weights."""
    monkeypatch.setattr(Experts, "fits", lambda self, tokens, rows: 0 < tokens <= 64)
    model = packed(moe("qwen3_moe", how))
    module = layers(model)[0]
    made = torch.compile(module, backend="aot_eager", fullgraph=True)
    torch.manual_seed(0)
    with torch.no_grad():
        for tokens in (3, 5, 8):
            x, index = torch.randn(tokens, 64).bfloat16(), torch.randint(0, 6, (tokens, 2))
            scores = torch.rand(tokens, 2).bfloat16()
            assert_same_bits(made(x, index, scores), module(x, index, scores))
    seen = []
    from torch.utils._python_dispatch import TorchDispatchMode

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), Log():
        module(x, index, scores)
    assert seen.count("tpde.experts_linear.default") == 2
    from torch.utils.flop_counter import FlopCounterMode

    with torch.no_grad(), FlopCounterMode(display=False) as counted:
        module(x, index, scores)
    assert counted.get_total_flops() == 2 * 16 * 64 * (128 + 64)


def test_the_operator(fused: Any) -> None:
    slot = layers(fused)[0].tpde_slots["gate_up_proj"]
    x, numbers = torch.randn(4, 64).bfloat16(), torch.tensor([0, 3, 1, 1])
    width = slot.packed.experts.width
    given = (x, numbers, None, slot.key, width, 1)
    torch.library.opcheck(torch.ops.tpde.experts_linear, given, test_utils=("test_schema", "test_faketensor"))
    with pytest.raises(InvalidInput, match="rows of"):
        torch.ops.tpde.experts_linear(x[:, :63], *given[1:])
    y = torch.ops.tpde.experts_linear(x.requires_grad_(), *given[1:])
    with pytest.raises(NotImplementedError, match="gradients do not flow"):
        y.float().sum().backward()
    with pytest.raises(InvalidInput, match="no longer exist"):
        torch.ops.tpde.experts_linear(x.detach(), numbers, None, 1 << 40, width, 1)


def test_what_was_recorded_stays(fused: Any, as_on_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    model = as_on_gpu(fused)
    monkeypatch.setattr(routed_module, "capturing", lambda device: True)
    with torch.no_grad():
        layers(model)[0](
            torch.randn(3, 64).bfloat16(), torch.zeros(3, 1, dtype=torch.int64), torch.rand(3, 1).bfloat16()
        )
    monkeypatch.undo()
    with pytest.raises(PackedWeight, match="was recorded in a CUDA graph"):
        set_kernels(model, "exact")


def test_graphs_have_all_experts(plain: Any, fused: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many tokens: another replay has other choices, for which nobody may wait."""
    monkeypatch.setattr(modules, "capturing", lambda device: True)
    monkeypatch.setattr(modules, "needed", lambda *_: pytest.fail("the router is waited for"))
    with torch.no_grad():
        assert_same_bits(fused(ids(1, 1)).logits, plain(ids(1, 1)).logits)


def test_decoding_by_kernels(plain: Any, fused: Any, as_on_gpu: Any) -> None:  # noqa: F811
    as_on_gpu(fused)
    for name, it in zip(
        [key for key, _ in plain.named_parameters() if key.endswith("_proj") and "experts" in key],
        experts_of(fused),
        strict=True,
    ):
        assert_same_bits(it.decoded(), plain.get_parameter(name))


def test_tracing_is_refused(fused: Any, as_on_gpu: Any) -> None:  # noqa: F811
    module = layers(as_on_gpu(fused))[0]
    given = torch.randn(3, 64).bfloat16(), torch.zeros(3, 1, dtype=torch.int64), torch.rand(3, 1).bfloat16()
    with torch.no_grad(), pytest.raises(PackedWeight, match=r"torch\.jit\.trace"):
        torch.jit.trace(module, given)


# ---- what stays ----


def test_it_is_told_what_stays(caplog: pytest.LogCaptureFixture) -> None:
    model = moe("mixtral")
    model.config._experts_implementation = "sonicmoe"
    made = packed(model)
    assert not any(it.multiplies for it in experts_of(made))
    assert "experts of `MixtralExperts` are decoded" in caplog.text
    assert "'sonicmoe' computes them" in caplog.text


def test_others_stay(caplog: pytest.LogCaptureFixture) -> None:
    class OwnExperts(nn.Module):
        """Experts that nobody knows."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 64, 64).mul(0.02).bfloat16())

        def forward(self, x: Any) -> Any:
            return torch.einsum("ti,eoi->teo", x, self.weight)

    plain, x = OwnExperts(), torch.randn(3, 64).bfloat16()
    made = packed(plain)
    assert not made.weight.packed.multiplies
    assert (
        "experts of `OwnExperts` are decoded, and not multiplied as they are packed: their forward"
        in caplog.text
    )
    with torch.no_grad():
        assert_same_bits(made(x), plain(x))


def test_convolutions_are_no_experts(caplog: pytest.LogCaptureFixture) -> None:
    plain = nn.Sequential(nn.Conv1d(64, 64, 3), nn.Flatten(), nn.Linear(640, 64)).bfloat16()
    made, x = packed(plain), torch.randn(2, 64, 12).bfloat16()
    assert not made[0].weight.packed.multiplies
    assert made[2].weight.packed.multiplies
    assert not caplog.text
    with torch.no_grad():
        assert_same_bits(made(x), plain(x))


def test_many_escapes_and_half_packed_modules_stay(caplog: pytest.LogCaptureFixture) -> None:
    model = moe("mixtral")
    with torch.no_grad():
        it = model.model.layers[0].mlp.experts.down_proj
        it[:, :, ::2] = torch.exp2(torch.randint(-60, 60, it[:, :, ::2].shape).float()).bfloat16()
    made = packed(model)
    assert [it.multiplies for it in experts_of(made)][-2:] == [True, True]
    assert not any(it.multiplies for it in experts_of(made)[:-2])
    assert "MixtralExperts" in caplog.text
    with torch.no_grad():
        assert_same_bits(made(ids(2, 7)).logits, model(ids(2, 7)).logits)


def test_other_dtypes_are_not_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    model = moe("mixtral", dtype=torch.float32)
    made = packed(model)
    assert "MixtralExperts" not in caplog.text
    assert "no weight is multiplied as it is packed" in caplog.text
    with torch.no_grad():
        assert_same_bits(made(ids(2, 7)).logits, model(ids(2, 7)).logits)


def test_shared_experts_stay(caplog: pytest.LogCaptureFixture) -> None:
    model = moe("mixtral")
    one, two = (it.mlp.experts for it in model.model.layers)
    two.gate_up_proj, two.down_proj = one.gate_up_proj, one.down_proj
    made = packed(model)
    assert not any(it.multiplies for it in experts_of(made))
    assert "another module has their weights too" in caplog.text
    with torch.no_grad():
        assert_same_bits(made(ids(2, 7)).logits, model(ids(2, 7)).logits)
