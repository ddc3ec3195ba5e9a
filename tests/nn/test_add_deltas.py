"""Which deltas a model takes: their names, their base, damaged ones, and what they may change."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from support.emulated import on_cpu, where  # noqa: F401
from support.models import assert_same_bits
from support.small import IDS, Block, Model, torch
from support.tunes import make, tuned

import tpde
from tpde.errors import Corrupt, InvalidArgument, InvalidInput, MissingBase
from tpde.nn import add_deltas, pack_module, packed_modules, plain_state_dict
from tpde.store.delta_file import DeltaFile
from tpde.weights.changed import Changed


def test_names() -> None:
    tunes = make()
    for name in ("lore", "", 3):
        with pytest.raises(InvalidInput, match="'math', 'law', or None"):
            tunes.packed.use(name)
    with pytest.raises(InvalidInput, match="has deltas already"):
        add_deltas(tunes.packed, {"more": b""})
    packed = pack_module(copy.deepcopy(tunes.plain[None]))
    for names in ({}, {"": b""}, {3: b""}):
        with pytest.raises(InvalidInput, match="deltas are called"):
            add_deltas(packed, names)
    with pytest.raises(InvalidInput, match="`deltas` is a list"):
        add_deltas(packed, ["math.tpde"])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_script_modules_have_no_deltas() -> None:
    torch.manual_seed(5)
    script = torch.jit.script(torch.nn.Linear(64, 64))
    model = torch.nn.Sequential(script, torch.nn.Linear(64, 64))
    for base, name, part in ((script, "the model", ""), (model, "`0`", "0."), (model, "", "1.")):
        state = {key: it.detach() for key, it in base.state_dict().items()}
        new = {key: it + 1 if key.startswith(part) else it for key, it in state.items()}
        delta = tpde.make_delta({key: it.clone() for key, it in state.items()}, new)
        if name:
            with pytest.raises(InvalidInput, match=f"{name} is a ScriptModule"):
                add_deltas(base, {"more": delta})
            assert not hasattr(base, "use")
            continue
        add_deltas(model, {"more": delta})
        for names in (None, "more", ["more", None]):
            model.use(names)
            assert model(torch.ones(2, 64)).shape == (2, 64)


@pytest.mark.parametrize(("rows", "told"), [(2047, False), (2048, True)])
def test_large_copies_are_told_of(rows: int, told: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Of 64 MiB and more in all copies."""
    base = torch.nn.Linear(8192, rows, bias=False, dtype=torch.bfloat16)
    new = {"weight": base.weight.detach().clone()}
    new["weight"].view(torch.int16)[3, 4] += 1
    add_deltas(base, {"math": tpde.make_delta(dict(base.state_dict()), new)})
    assert ("pack the model" in caplog.text) == told


def test_a_model_that_is_not_packed() -> None:
    """It has deltas, too; each is a copy of what it changes."""
    torch.manual_seed(5)
    base = Model().to(torch.bfloat16).eval()
    target = tuned(base, 1)
    model = add_deltas(copy.deepcopy(base), {"math": tpde.make_delta(base, target)})
    for name, expected in (("math", target), (None, base)):
        model.use(name)
        with torch.no_grad():
            assert_same_bits(model(IDS), expected(IDS))
    assert model.head.weight is model.embed.weight


def _packed(base: Any) -> Any:
    return pack_module(copy.deepcopy(base), min_bytes=0)


@pytest.mark.usefixtures("where")
@pytest.mark.parametrize("what", ["packed", "plain", "same"])
def test_another_base(what: str) -> None:
    torch.manual_seed(5)
    base = Model().to(torch.bfloat16).eval()
    target = tuned(base, 1)
    delta = tpde.make_delta(base, target)
    mine, new = base.state_dict(), target.state_dict()
    names = [key for key in mine if key != "head.weight"]  # which is tied
    same = {key for key in names if torch.equal(mine[key].view(torch.int16), new[key].view(torch.int16))}
    is_packed = {f"{path}.weight" for path, _ in packed_modules(_packed(base))}
    wanted = {"packed": is_packed - same, "plain": set(names) - is_packed - same, "same": same}
    name = next(key for key in names if key in wanted[what])
    with torch.no_grad():
        mine[name].view(torch.int16).view(-1)[3] += 1
    packed = _packed(base)
    old = {key: value.clone() for key, value in plain_state_dict(packed).items()}
    with pytest.raises(MissingBase, match=f"`{name}`.*load the weights"):
        add_deltas(packed, {"math": delta})
    assert not hasattr(packed, "tpde_deltas")
    with pytest.raises(InvalidInput, match="has no deltas"):
        packed.use("math")
    assert all(torch.equal(old[key], value) for key, value in plain_state_dict(packed).items())


@pytest.mark.usefixtures("where")
def test_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(5)
    base = Model().to(torch.bfloat16).eval()
    delta = tpde.make_delta(base, tuned(base, 1))
    real = DeltaFile.payload

    def payload(self: DeltaFile, it: Any) -> Any:
        out = real(self, it)
        if it.name == "blocks.1.up.weight":
            out[:9] ^= 0xFF
        return out

    monkeypatch.setattr(DeltaFile, "payload", payload)
    with pytest.raises(Corrupt, match=r"`blocks\.1\.up\.weight`"):
        add_deltas(_packed(base), {"math": delta})


def test_of_other_shapes_and_names() -> None:
    torch.manual_seed(5)
    base = Model().to(torch.bfloat16)
    wider = torch.nn.Module()
    wider.embed = torch.nn.Embedding(201, 64, dtype=torch.bfloat16)
    with pytest.raises(MissingBase, match=r"\[200, 64\].*\[201, 64\]"):
        add_deltas(_packed(base), {"wide": tpde.make_delta(base, wider)})
    wider.other = wider.embed
    del wider.embed
    with pytest.raises(MissingBase, match=r"`other\.weight`.*load the weights"):
        add_deltas(_packed(base), {"wide": tpde.make_delta(base, wider)})
    with pytest.raises(Corrupt, match="no delta"):
        add_deltas(_packed(base), {"none": bytes(100)})


def test_a_packed_model_without_deltas_says_how_it_comes_to_have_some() -> None:
    torch.manual_seed(5)
    model = _packed(Model().to(torch.bfloat16))
    loaded = pickle.loads(pickle.dumps(model))
    for it in (model, copy.deepcopy(model), copy.copy(model), loaded):
        with pytest.raises(InvalidInput, match=r"no deltas; .*deltas=\{.*`tpde\.nn\.add_deltas\(model"):
            it.use("math")
    assert not hasattr(tpde.unpack_module(model), "use")


def test_a_method_of_the_model_stays() -> None:
    class Used(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(200, 200)

        def use(self) -> str:
            return "its own"

    model = tpde.pack_module(Used())
    assert model.use() == "its own"
    with pytest.raises(InvalidInput, match="has a `use` of its own"):
        add_deltas(model, {"math": b""})
    assert tpde.unpack_module(model).use() == "its own"


@pytest.mark.parametrize("value", [7, None, {"w": torch.ones(2)}])
def test_what_is_no_model_and_no_delta(value: Any) -> None:
    model: Any = "llama-packed"
    with pytest.raises(InvalidArgument, match="not a `str`; pass the model first"):
        add_deltas(model, {"math": "math.tpde"})
    model = _packed(Model().to(torch.bfloat16))
    with pytest.raises(
        InvalidInput, match=r'`deltas` is a str; pass a mapping such as \{"math": "math\.tpde"'
    ):
        add_deltas(model, "math.tpde")  # type: ignore[arg-type]
    for call in (lambda: add_deltas(model, {"math": value}), lambda: tpde.apply_delta(model, value)):
        with pytest.raises(InvalidArgument, match=f"not a `{type(value).__name__}`; pass what"):
            call()


def test_ties_that_a_delta_would_cut() -> None:
    torch.manual_seed(5)
    base = Model().to(torch.bfloat16)
    apart = copy.deepcopy(base)
    apart.head.weight = torch.nn.Parameter(apart.head.weight.detach().clone() * 2)
    with pytest.raises(InvalidInput, match="are one weight of the model"):
        add_deltas(_packed(base), {"apart": tpde.make_delta(base, apart)})


def test_a_part_of_the_weights_is_enough() -> None:
    torch.manual_seed(5)
    base = Model().to(torch.bfloat16).eval()
    target = copy.deepcopy(base)
    with torch.no_grad():
        target.blocks[1].up.weight.view(torch.int16)[3:5] += 1
    part = {"blocks.1.up.weight": target.blocks[1].up.weight}
    packed = add_deltas(_packed(base), {"part": tpde.make_delta(base, part)})
    packed.use("part")
    with torch.no_grad():
        assert_same_bits(packed(IDS), target(IDS))


def test_blocks_of_blocks() -> None:
    """A block of which a delta changes nothing is decoded as before."""
    torch.manual_seed(5)
    base = torch.nn.Sequential(*(Block(64) for _ in range(2))).to(torch.bfloat16).eval()
    target = copy.deepcopy(base)
    with torch.no_grad():
        target[1].up.weight.view(torch.int16)[3:5] += 1
    packed = add_deltas(_packed(base), {"one": tpde.make_delta(base, target)})
    assert not isinstance(packed[0].up.weight.packed.sources[0], Changed)
    packed.use("one")
    x = torch.randn(2, 64).bfloat16()
    with torch.no_grad():
        assert_same_bits(packed(x), target(x))
