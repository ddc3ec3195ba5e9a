"""Experts multiplied by kernels as they are packed: a row has its bits, alone and in a batch."""

from __future__ import annotations

from typing import Any

import pytest
from support.backends import MadeBackend, MadeKernel
from support.emulated import CPU, windows_on_cpu  # noqa: F401
from support.experts import WAYS, as_on_gpu, experts_of, fused_model, ids, layers, moe, packed, plain_model  # noqa: F401
from support.models import assert_same_bits, torch

from tpde.codec.windows import sections
from tpde.cuda import expert_ways, window_experts
from tpde.errors import InvalidInput, PackedWeight
from tpde.nn import PackedTensor, set_kernels, unpack_module
from tpde.nn import routed as routed_module
from tpde.weights.expert_products import Experts


def alone(weight: PackedTensor, x: Any, numbers: Any, bias: Any = None) -> Any:
    """Each row by itself."""
    rows = [weight.experts.product(x[i : i + 1], numbers[i : i + 1], 1, bias, 1) for i in range(len(numbers))]
    return torch.cat(rows)


def test_models_by_kernels(plain: Any, fused: Any, as_on_gpu: Any) -> None:  # noqa: F811
    """Logits are near, and a sequence's are the same alone and in a batch: all experts by kernels."""
    model, launched = as_on_gpu(fused), []
    first = experts_of(model)[0].experts
    real = first._there.product
    first._there.product = lambda *given, **how: (launched.append(given[4]), real(*given, **how))
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
        it.experts._there.product = lambda *_, **__: pytest.fail("multiplied by the kernel")

    def call(tokens: int, dtype: Any = torch.bfloat16) -> tuple[Any, ...]:
        torch.manual_seed(tokens)
        x = torch.randn(tokens, 64).to(dtype)
        return x, torch.randint(0, 4, (tokens, 2)), torch.rand(tokens, 2).to(dtype)

    with torch.no_grad():
        assert_same_bits(mine(*call(97)), theirs(*call(97)))
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


def test_a_patched_class_is_not_multiplied(
    fused: Any,
    as_on_gpu: Any,  # noqa: F811
    plain: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine, theirs = layers(as_on_gpu(fused))[0], plain.model.layers[0].mlp.experts
    before = type(theirs).forward
    monkeypatch.setattr(type(theirs), "forward", lambda self, *args: before(self, *args) * 2)
    given = torch.randn(3, 64).bfloat16(), torch.randint(0, 4, (3, 2)), torch.rand(3, 2).bfloat16()
    with torch.no_grad():
        assert_same_bits(mine(*given), theirs(*given))


def test_an_unpacked_modules_old_forward_is_its_classs(fused: Any, plain: Any) -> None:
    theirs, old = plain.model.layers[0].mlp.experts, layers(fused)[0].forward
    unpack_module(fused)
    given = torch.randn(3, 64).bfloat16(), torch.randint(0, 4, (3, 2)), torch.rand(3, 2).bfloat16()
    with torch.no_grad():
        assert_same_bits(old(*given), theirs(*given))


def test_how_much_is_taken(fused: Any, as_on_gpu: Any) -> None:  # noqa: F811
    """By tokens, by what a launch has room for, and by how many rows an expert has on average."""
    experts = experts_of(fused)[0].experts
    assert not experts.fits(1, 1)  # there is no GPU
    experts = experts_of(as_on_gpu(fused))[0].experts
    there = experts._there
    most = expert_ways.MOST_EACH * there._experts
    assert experts.fits(1, most)
    assert experts.fits(most // 2, 2)
    assert not experts.fits(1, most + 1)
    assert not experts.fits(most // 2 + 1, 2)
    assert not experts.fits(0, 1)
    assert not experts.fits(1, 0)
    there._experts = expert_ways.MOST_EXPERTS
    assert experts.fits(expert_ways.MOST_TOKENS, 1)
    assert not experts.fits(expert_ways.MOST_TOKENS + 1, 1)
    assert experts.fits(1, expert_ways.MOST_ROUTED)
    assert not experts.fits(1, expert_ways.MOST_ROUTED + 1)
    there.most_rows = 3000  # as where many rows are multiplied at a time
    assert experts.fits(1000, 3)
    assert not experts.fits(1001, 3)
    assert not experts.fits(100, 0)
    assert not experts.fits(1, expert_ways.MOST_ROUTED + 1)
    there._experts += 1
    assert not experts.fits(1, 1)


def test_more_experts_than_products_take_are_decoded(launch_on: Any) -> None:
    """Nothing else is compiled for them, whatever room a block has."""
    asked: list[str] = []

    def kernel(source: str, name: str, *_: Any, **__: Any) -> MadeKernel:
        asked.append(name)
        return MadeKernel(lambda *_, **__: None, 15)

    launch_on(MadeBackend(kernel, CPU._replace(shared_bytes=99 << 10)))
    count = expert_ways.MOST_EXPERTS + 500
    window_experts.DeviceExperts([(sections(16, 64), 128)] * count, count, False, 0).prepare()
    assert sorted(asked) == ["experts_rows", "experts_sum"]


@pytest.mark.parametrize("each", [1, 8])
def test_sums_of_a_token(each: int, fused: Any, as_on_gpu: Any) -> None:  # noqa: F811
    """The kernel's bits are those of PyTorch, one row after the other."""
    experts = experts_of(fused)[1].experts
    y = torch.randn(5 * each, experts.width).bfloat16()
    scores = torch.rand(5, each + 1)[:, 1:]
    alone = experts.weighted(y, scores)
    assert alone.shape == (5, experts.width)
    there = experts_of(as_on_gpu(fused))[1].experts
    assert_same_bits(there.weighted(y, scores), alone)
    apart = torch.stack([y, y], 2)[:, :, 1]
    assert_same_bits(there.weighted(apart, scores), alone)
    for it in (experts, there):
        assert it.weighted(y[:0], scores[:0]).shape == (0, experts.width)
        for given in ((y, scores.bfloat16()), (y[1:], scores), (y[:, 1:], scores), (y, scores[0])):
            with pytest.raises(InvalidInput, match="and scores of"):
                it.weighted(*given)


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
    given = (x, numbers, None, slot.key, width, 2)
    torch.library.opcheck(torch.ops.tpde.experts_linear, given, test_utils=("test_schema", "test_faketensor"))
    with pytest.raises(InvalidInput, match="rows of"):
        torch.ops.tpde.experts_linear(x[:, :63], *given[1:])
    y = torch.ops.tpde.experts_linear(x.requires_grad_(), *given[1:])
    with pytest.raises(NotImplementedError, match="gradients do not flow"):
        y.float().sum().backward()
    with pytest.raises(InvalidInput, match="no longer exist"):
        torch.ops.tpde.experts_linear(x.detach(), numbers, None, 1 << 40, width, 2)


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
