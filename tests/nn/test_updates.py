"""Deltas applied to packed models where they are: a base and what changed, until it is packed anew."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
from support.emulated import on_cpu  # noqa: F401
from support.models import assert_same_bits
from support.small import IDS, Model, torch
from support.tunes import tuned

import tpde
from tpde.errors import Corrupt, InvalidInput, MissingBase, PackedWeight
from tpde.nn import PackedParameter, add_deltas, pack_module, packed_modules, plain_state_dict, set_kernels
from tpde.store.delta_file import DeltaFile
from tpde.weights import apply_delta
from tpde.weights.changed import Changed
from tpde.weights.resident import Resident


def base(dtype: Any = torch.bfloat16, tie: bool = True, blocks: int = 2) -> Any:
    torch.manual_seed(5)
    made = Model(blocks=blocks).to(dtype).eval()
    if not tie:
        made.head.weight = torch.nn.Parameter(made.head.weight.detach().clone())
    return made


def packed(model: Any) -> Any:
    return pack_module(copy.deepcopy(model), min_bytes=0)


def check(found: Any, expected: Any) -> None:
    with torch.no_grad():
        assert_same_bits(found(IDS), expected(IDS))
    state = plain_state_dict(found)
    for key, value in expected.state_dict().items():
        assert_same_bits(state[key], value, key)


def check_within(found: Any, expected: Any) -> None:
    """Compare the weights of blocks as they are decoded together: outputs are rounded."""
    for block, plain in zip(found.blocks, expected.blocks, strict=True):
        seen: list[Any] = []
        hook = block.norm.register_forward_hook(
            lambda *_, block=block, seen=seen: seen.extend(it.weight.clone() for it in (block.up, block.down))
        )
        with torch.no_grad():
            found(IDS)
        hook.remove()
        assert_same_bits(seen, [plain.up.weight, plain.down.weight])


def sources(model: Any) -> list[Any]:
    return [it for _, m in packed_modules(model) for s in m.tpde_slots.values() for it in s.packed.sources]


@pytest.mark.parametrize(("dtype", "tie"), [(torch.bfloat16, True), (torch.float32, False)])
def test_a_packed_model_becomes_the_target(dtype: Any, tie: bool) -> None:
    old = base(dtype, tie)
    new, model = tuned(old, 1), packed(old)
    delta = tpde.make_delta(old, new)
    plain = copy.deepcopy(old)
    check(model, old)
    assert tpde.apply_delta(model, delta) == tpde.apply_delta(plain, delta)
    check(model, new)
    assert tpde.apply_delta(model, delta) == 0
    check(model, new)
    assert any(isinstance(it, Changed) for it in sources(model))


@pytest.mark.usefixtures("on_cpu")
def test_by_kernels() -> None:
    """Those of a GPU, which run on the CPU here."""
    states, model = [base(tie=False, blocks=1)], None
    for seed in (1, 2):
        states.append(tuned(states[-1], seed, dense=1000))
        model = packed(states[0]) if model is None else model
        assert tpde.apply_delta(model, tpde.make_delta(*states[-2:])) > 0
        with torch.no_grad():
            assert_same_bits(model(IDS), states[-1](IDS))


def test_a_state_dict_becomes_the_target() -> None:
    old = base()
    new, model = tuned(old, 1), packed(old)
    tpde.apply_delta(model.state_dict(), tpde.make_delta(old, new))
    check(model, new)


def test_under_another_default_device() -> None:
    """What is made on the way is on the host, or where the model is, wherever PyTorch makes tensors."""
    torch.manual_seed(5)
    old = Model(words=3000).to(torch.bfloat16).eval()  # the embedding has several chunks
    new = tuned(old, 1)
    with torch.device("meta"):
        model = packed(old)
        check(model, old)
        tpde.apply_delta(model, tpde.make_delta(old, new))
        check(model, new)
    check(model, new)


def test_updates_on_updates() -> None:
    """As many as one likes: what they take stays within a quarter of the weight."""
    states = [base()]
    model = packed(states[0])
    for step in range(12):
        states.append(tuned(states[-1], 100 + step, share=0.002, dense=1000))
        assert tpde.apply_delta(model, tpde.make_delta(states[-2], states[-1])) > 0
        check(model, states[-1])
        check_within(model, states[-1])
        for it in sources(model):
            assert not isinstance(it, Changed) or it.delta_bytes <= it.nbytes / 4
            assert not isinstance(it, Changed) or isinstance(it.base, Resident)
            assert not isinstance(it, Changed) or len(it.now().changes) <= 8
    with pytest.raises(MissingBase, match="load the weights"):
        tpde.apply_delta(model, tpde.make_delta(states[0], states[1]))
    check(model, states[-1])


def test_many_large_updates_are_packed_anew() -> None:
    states = [base()]
    model = packed(states[0])
    for step in range(6):
        states.append(tuned(states[-1], 7 + 35 * step, share=0.1, dense=1000))
        tpde.apply_delta(model, tpde.make_delta(states[-2], states[-1]))
        check(model, states[-1])
    assert any(isinstance(it, Resident) for it in sources(model))


@pytest.mark.parametrize("what", ["packed", "plain", "missing", "damaged"])
def test_all_or_nothing(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    old = base()
    new, model = tuned(old, 1), packed(old)
    delta, error, before = tpde.make_delta(old, new), MissingBase, old
    if what == "packed":
        before = copy.deepcopy(old)
        with torch.no_grad():
            before.blocks[1].down.weight.view(torch.int16)[1, 1] += 1
        model = packed(before)
    elif what == "plain":
        before = copy.deepcopy(old)
        with torch.no_grad():
            before.blocks[1].norm.bias.view(torch.int16)[1] += 1
        model = packed(before)
    elif what == "missing":
        old.more, new.more = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
        delta = tpde.make_delta(old, new)
        before = base()
    else:
        error, real = Corrupt, DeltaFile.payload

        def payload(self: DeltaFile, it: Any) -> Any:
            out = real(self, it)
            if it.name == "blocks.1.up.weight":
                out[:9] ^= 0xFF
            return out

        monkeypatch.setattr(DeltaFile, "payload", payload)
    with pytest.raises(error):
        tpde.apply_delta(model, delta)
    check(model, before)
    assert not any(isinstance(it, Changed) for it in sources(model))


def test_what_was_interrupted_is_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    old = base()
    new, model = tuned(old, 1), packed(old)
    delta, left, real = tpde.make_delta(old, new), [3], apply_delta.PackedTensor.replace

    def replace(self: Any, found: Any) -> None:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        real(self, found)

    monkeypatch.setattr(apply_delta.PackedTensor, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        tpde.apply_delta(model, delta)
    monkeypatch.undo()
    assert tpde.apply_delta(model, delta) > 0
    check(model, new)


def test_copies_pickles_and_unpacked_ones_have_the_update() -> None:
    old = base()
    new, model = tuned(old, 1), packed(old)
    tpde.apply_delta(model, tpde.make_delta(old, new))
    check(copy.deepcopy(model), new)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    again = torch.load(file, weights_only=True)
    for key, value in new.state_dict().items():
        it = again[key]
        assert_same_bits(it.plain() if isinstance(it, PackedParameter) else it, value, key)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    check(torch.load(file, weights_only=False), new)
    tpde.unpack_module(model)
    with torch.no_grad():
        assert_same_bits(model(IDS), new(IDS))


def test_other_weights_are_loaded_as_before() -> None:
    old = base()
    new, other = tuned(old, 1), packed(tuned(old, 2))
    model = packed(old)
    tpde.apply_delta(model, tpde.make_delta(old, new))
    model.load_state_dict(model.state_dict())
    check(model, new)
    model.load_state_dict(other.state_dict())
    check(model, tuned(old, 2))
    tpde.apply_delta(model, tpde.make_delta(tuned(old, 2), old))
    check(model, old)


def test_deltas_to_choose_from_on_top_of_an_update() -> None:
    old = base()
    now = tuned(old, 1, dense=1000)
    model, tune = packed(old), tuned(now, 2)
    tpde.apply_delta(model, tpde.make_delta(old, now))
    add_deltas(model, {"tune": tpde.make_delta(now, tune)})
    for name, expected in (("tune", tune), (None, now), ("tune", tune)):
        model.use(name)
        check(model, expected)
    with pytest.raises(PackedWeight, match="`use` chooses among; nothing was changed"):
        tpde.apply_delta(model, tpde.make_delta(tune, old))
    check(model, tune)


def test_gradients_of_what_was_updated_meanwhile_are_refused() -> None:
    old = base()
    model = packed(old).requires_grad_(False)
    x = torch.ones(2, 64, dtype=torch.bfloat16, requires_grad=True)
    loss = model.blocks[0].down(torch.relu(model.blocks[0].up(x))).sum()
    compiled = torch.compile(model.blocks[1].up, backend="aot_eager")(x).sum()
    tpde.apply_delta(model, tpde.make_delta(old, tuned(old, 1, dense=1000)))
    with pytest.raises(RuntimeError, match="was updated since"):
        loss.backward()
    with pytest.raises(InvalidInput, match="compute the forward pass anew"):
        compiled.backward()


def load(model: Any, other: Any, how: str) -> None:
    """Give a layer another's packed weight."""
    if how == "copy_":
        with torch.no_grad():
            model.weight.copy_(other.weight)
    else:
        model.load_state_dict(other.state_dict(), assign=how == "assigned")


@pytest.mark.parametrize("kernels", ["exact", "fused"])
@pytest.mark.parametrize("how", ["loaded", "assigned", "copy_"])
def test_gradients_of_what_was_loaded_meanwhile_are_refused(kernels: Any, how: str) -> None:
    def layers() -> list[Any]:
        made = [torch.nn.Linear(64, 128).bfloat16(), torch.nn.Conv2d(64, 128, 1).bfloat16()]
        packed = [pack_module(it, min_bytes=0) for it in made]
        for it in packed:
            set_kernels(it, kernels)
        return packed

    for at, shape in ((0, (2, 64)), (1, (1, 64, 2, 2))):
        model, other = layers()[at], layers()[at]
        again = copy.deepcopy(model)
        x = torch.ones(shape, dtype=torch.bfloat16, requires_grad=True)
        loss = model(x).sum()
        compiled = torch.compile(again, backend="aot_eager")(x).sum()
        for it in (model, again):
            load(it, other, how)
        with pytest.raises((RuntimeError, InvalidInput), match="compute the forward pass"):
            loss.backward()
        with pytest.raises(InvalidInput, match="compute the forward pass anew"):
            compiled.backward()
        assert_same_bits(model.weight.plain(), other.weight.plain())
        model(x).sum().backward()


def test_gradients_of_what_was_loaded_again_are_right() -> None:
    model = packed(base())
    plain = base()
    grads = []
    for it in (model, plain):
        x = torch.ones(2, 64, dtype=torch.bfloat16, requires_grad=True)
        loss = it.blocks[0].up(x).sum()
        if it is model:
            it.load_state_dict(copy.deepcopy(it.state_dict()))
        loss.backward()
        grads.append(x.grad)
    assert_same_bits(*grads)


def test_what_a_graph_was_recorded_with_is_not_updated(monkeypatch: pytest.MonkeyPatch) -> None:
    old = base()
    new, model = tuned(old, 1), packed(old)
    delta = tpde.make_delta(old, new)
    monkeypatch.setattr("tpde.nn.slot.Slot.recorded", True)
    with pytest.raises(PackedWeight, match="CUDA graph"):
        tpde.apply_delta(model, delta)
    monkeypatch.undo()
    check(model, old)


def test_a_weight_of_several_tensors_is_refused_by_name() -> None:
    one = torch.randn(2, 64, 64).bfloat16() * 0.02
    parts = [packed_part(it) for it in one]
    weight = PackedParameter(tpde.nn.PackedTensor(parts, (2, 64, 64), "experts"))
    new = one.clone()
    new.view(torch.int16)[0, 0, :9] += 1
    with pytest.raises(PackedWeight, match="`experts` is made of 2 tensors"):
        tpde.apply_delta({"experts": weight}, tpde.make_delta({"experts": one}, {"experts": new}))


def packed_part(it: Any) -> Any:
    made = tpde.nn.pack_tensor(it.contiguous(), "part")
    assert made is not None
    return made.sources[0]
