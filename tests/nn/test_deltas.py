"""Several states of one packed model: each has the bits of the model that it is a state of."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.emulated import on_cpu  # noqa: F401
from support.models import assert_same_bits
from support.small import IDS, Block, Model, torch
from support.tunes import tuned

import tpde
from tpde.errors import Corrupt, InvalidArgument, InvalidInput, MissingBase, PackedWeight
from tpde.format.delta_head import SPARSE
from tpde.io.sources import BytesSource
from tpde.nn import PackedParameter, add_deltas, pack_module, packed_modules, plain_state_dict
from tpde.store.delta_file import DeltaFile
from tpde.weights import coded
from tpde.weights.changed import Changed


class Tunes(NamedTuple):
    """Plain models by names, of which None is the base; and the packed one that becomes each."""

    plain: dict[str | None, Any]
    packed: Any

    def check(self, name: str | None, ids: Any = IDS) -> None:
        with torch.no_grad():
            assert_same_bits(self.packed(ids), self.plain[name](ids), str(name))


@pytest.fixture(params=["core", "kernels"])
def where(request: pytest.FixtureRequest) -> None:
    """By the core, and by kernels."""
    if request.param == "kernels":
        request.getfixturevalue("on_cpu")


def make(dtype: Any = torch.bfloat16, tie: bool = True, **sizes: int) -> Tunes:
    torch.manual_seed(5)
    base = Model(**sizes).to(dtype).eval()
    if not tie:
        base.head.weight = torch.nn.Parameter(base.head.weight.detach().clone())
    plain = {None: base, "math": tuned(base, 1), "law": tuned(base, 2)}
    packed = pack_module(copy.deepcopy(base), min_bytes=0)
    add_deltas(packed, {it: tpde.make_delta(base, plain[it]) for it in ("math", "law")})
    return Tunes(plain, packed)


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_bits(dtype: Any, tie: bool) -> None:
    tunes = make(dtype, tie)
    tunes.check(None)
    for name in ("math", "law", "math", None, "law"):
        tunes.packed.use(name)
        assert tunes.packed.tpde_deltas.active == name
        tunes.check(name)
        tunes.check(name, IDS[:1])
        expected, found = tunes.plain[name].state_dict(), plain_state_dict(tunes.packed)
        for key, value in expected.items():
            assert_same_bits(found[key], value, key)


@pytest.mark.parametrize(("dtype", "tie"), [(torch.bfloat16, False), (torch.float32, True)])
@pytest.mark.usefixtures("on_cpu")
def test_bits_by_kernels(dtype: Any, tie: bool) -> None:
    tunes = make(dtype, tie, blocks=1)
    for name in ("math", None):
        tunes.packed.use(name)
        tunes.check(name)


@pytest.mark.usefixtures("on_cpu")
def test_memory_of_rows() -> None:
    """What differs in a row is kept beside the coded change, which no row can be decoded of."""
    tunes = make(tie=False, blocks=1)
    source = tunes.packed.embed.weight.packed.sources[0]
    plain = [tunes.plain[it].embed.weight.view(torch.int16) for it in (None, "math", "law")]
    counts = [int((it != plain[0]).sum()) for it in plain[1:]]
    coded_bytes = sum(change.nbytes for it in source.variants.values() for change in it.changes)
    assert min(counts) > 300
    assert source.delta_bytes == coded_bytes + 2 * sum(counts) + 2 * 8 * 201
    assert tunes.packed.tpde_deltas.nbytes > source.delta_bytes


@pytest.mark.usefixtures("where")
def test_many_chunks_and_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of more than one chunk of changes, decoded with little memory for what is not coded."""
    monkeypatch.setattr(coded, "_SCRATCH_BYTES", 20_000)
    monkeypatch.setattr("tpde.weights.changed._STRIP_BYTES", 1)
    tunes = make(width=256, words=600, blocks=1)
    for name in ("math", None, "law"):
        tunes.packed.use(name)
        tunes.check(name, torch.arange(596).view(2, -1))


@pytest.mark.usefixtures("where")
def test_spans() -> None:
    tunes = make(width=256, words=600, blocks=1)
    tunes.packed.use("math")
    for path, module in packed_modules(tunes.packed):
        expected = tunes.plain["math"].get_submodule(path).weight.detach().view(-1).view(torch.uint8)
        packed = module.tpde_slots["weight"].packed
        for first, last in ((0, 2), (1000, 200_000), (131_072, 131_074), (packed.nbytes - 6, packed.nbytes)):
            end = min(last, packed.nbytes)
            begin = min(first, end)
            assert torch.equal(packed.span(begin, end).decoded(), expected[begin:end])
            out = torch.empty(end - begin, dtype=torch.uint8).view(packed.dtype)
            packed.span(begin, end).decode_to(out)
            assert torch.equal(out.view(torch.uint8), expected[begin:end])


def test_all_kinds_of_entries_are_there() -> None:
    """What the tests rely on: few words changed, all of them, and none."""
    torch.manual_seed(5)
    base = Model().to(torch.bfloat16)
    data = tpde.make_delta(base, tuned(base, 1))
    with_base = {it.codec for it in DeltaFile(BytesSource(data, "<delta>")).head.tensors}
    assert SPARSE in with_base
    assert "same" in with_base
    packed = pack_module(copy.deepcopy(base), min_bytes=0)
    add_deltas(packed, {"all": tpde.make_delta(base, _noise(base))})
    sources = [it for _, m in packed_modules(packed) for it in m.tpde_slots["weight"].packed.sources]
    assert all(isinstance(it, Changed) and it.variants["all"].start is not it.base for it in sources)


def _noise(base: Any) -> Any:
    """Every word another."""
    torch.manual_seed(77)
    made = copy.deepcopy(base)
    with torch.no_grad():
        for it in made.parameters():
            it.normal_(std=0.03)
    return made


@pytest.mark.usefixtures("where")
def test_what_is_all_another_has_a_source_of_its_own() -> None:
    torch.manual_seed(5)
    base = Model().to(torch.bfloat16).eval()
    plain = {None: base, "all": _noise(base), "few": tuned(base, 3)}
    packed = pack_module(copy.deepcopy(base), min_bytes=0)
    add_deltas(packed, {it: tpde.make_delta(base, plain[it]) for it in ("all", "few")})
    tunes = Tunes(plain, packed)
    for name in ("all", "few", None):
        packed.use(name)
        tunes.check(name)


def test_memory() -> None:
    """Eight deltas of 3.5 % changed take less than 0.15 of one plain copy, the base not counted."""
    torch.manual_seed(5)
    base = Model(width=512, words=2048, blocks=2).to(torch.bfloat16).eval()
    plain = sum(it.numel() * it.element_size() for it in base.parameters())
    deltas = {str(i): tpde.make_delta(base, _few(base, i)) for i in range(8)}
    packed = add_deltas(pack_module(base), deltas)
    assert packed.tpde_deltas.names == tuple(deltas)
    assert packed.tpde_deltas.nbytes < 0.15 * plain


def _few(base: Any, seed: int) -> Any:
    made, draw = copy.deepcopy(base), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for it in made.parameters():
            bits = it.view(torch.int16)
            bits[torch.rand(bits.shape, generator=draw) < 0.035] += 1
    return made


def test_the_example() -> None:
    example = Path(__file__).parents[2] / "examples" / "fine_tunes.py"
    done = subprocess.run([sys.executable, example], capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("the same bits") == 6


# ---- what else holds the weights


def test_gradients_are_those_of_the_state_of_the_forward_pass() -> None:
    """Also if another is in use by the time of the backward pass, which decodes again."""
    tunes = make()
    for names in (tunes.plain["math"], tunes.packed):
        for it in names.parameters():
            it.requires_grad_(False)
    found = []
    for model in (tunes.plain["math"], tunes.packed):
        if model is tunes.packed:
            model.use("math")
        x = torch.ones(2, 3, 64, dtype=torch.bfloat16, requires_grad=True)
        y = x
        for block in model.blocks:
            y = y + block.down(torch.relu(block.up(y)))  # norms are copied, and autograd sees that
        if model is tunes.packed:
            model.use("law")
        y.sum().backward()
        found.append(x.grad)
    assert_same_bits(found[1], found[0])


def test_a_plain_parameter_that_autograd_keeps_is_missed() -> None:
    tunes = make()
    tunes.packed.use("math")
    loss = tunes.packed(IDS).sum()
    tunes.packed.use("law")
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|was changed by an in-place"):
        loss.backward()


def test_state_dicts_and_copies_are_of_the_state_in_use() -> None:
    tunes = make()
    tunes.packed.use("math")
    file = io.BytesIO()
    torch.save(tunes.packed.state_dict(), file)
    tunes.packed.use("law")
    file.seek(0)
    again = torch.load(file, weights_only=True)
    for key, value in tunes.plain["math"].state_dict().items():
        found = again[key]
        assert_same_bits(found.plain() if isinstance(found, PackedParameter) else found, value, key)
    block = copy.deepcopy(tunes.packed.blocks[0])
    tunes.packed.use(None)
    x = torch.randn(2, 64).bfloat16()
    with torch.no_grad():
        assert_same_bits(block(x), tunes.plain["law"].blocks[0](x))
        assert_same_bits(copy.deepcopy(block)(x), tunes.plain["law"].blocks[0](x))


def test_a_whole_model_is_neither_copied_nor_pickled() -> None:
    tunes = make()
    with pytest.raises(PackedWeight, match="math, law"):
        copy.deepcopy(tunes.packed)
    with pytest.raises(PackedWeight, match="math, law"):
        pickle.dumps(tunes.packed)
    tunes.packed.use("math")
    tunes.check("math")


def test_unpacking_gives_the_state_in_use() -> None:
    tunes = make()
    tunes.packed.use("math")
    with pytest.raises(PackedWeight, match="part of a model with deltas"):
        tpde.unpack_module(tunes.packed.blocks[0])
    use = tunes.packed.use
    tpde.unpack_module(tunes.packed)
    tunes.check("math")
    assert not hasattr(tunes.packed, "use")
    assert not hasattr(tunes.packed, "tpde_deltas")
    assert "forward" not in tunes.packed.__dict__
    with pytest.raises(InvalidInput):
        use("law")
    use(None)
    tunes.check("math")
    for key, value in tunes.plain["math"].state_dict().items():
        assert_same_bits(tunes.packed.state_dict()[key], value, key)


def test_other_weights_are_not_loaded_beneath() -> None:
    tunes = make()
    tunes.packed.load_state_dict(tunes.packed.state_dict())
    other = pack_module(copy.deepcopy(tunes.plain["law"]), min_bytes=0)
    before = tunes.packed(IDS)
    with pytest.raises(PackedWeight, match="deltas on it"):
        tunes.packed.load_state_dict(other.state_dict())
    assert_same_bits(tunes.packed(IDS), before)
    tunes.packed.use("math")
    other.load_state_dict(tunes.packed.state_dict())  # the other way, it is a weight like any other
    with torch.no_grad():
        assert_same_bits(other(IDS), tunes.plain["math"](IDS))


def test_moves() -> None:
    tunes = make()
    tunes.packed.use("math")
    tunes.packed.to("cpu").share_memory()
    assert tunes.packed.head.weight.is_shared()
    for name in ("math", "law", None):
        tunes.packed.use(name)
        tunes.check(name)
    with pytest.raises(PackedWeight, match="cannot be cast"):
        tunes.packed.half()
    with pytest.raises(PackedWeight, match="would lose its bytes"):
        tunes.packed.to_empty(device="cpu")
    tunes.check(None)


def test_what_was_trained_is_not_lost() -> None:
    tunes = make()
    tunes.packed.use("math")
    norm = tunes.packed.blocks[0].norm
    with torch.no_grad():
        norm.weight.mul_(1)  # another version of the same values
    tunes.packed.use("law")
    with torch.no_grad():
        norm.weight.mul_(2)
    with pytest.raises(PackedWeight, match=r"`blocks\.0\.norm\.weight` was changed"):
        tunes.packed.use("math")
    assert tunes.packed.tpde_deltas.active == "law"


def test_casts_of_plain_parameters_are_not_kept() -> None:
    """Autocast keeps them by parameters, until it ends."""
    torch.manual_seed(5)
    base = torch.nn.Linear(64, 64)
    double = copy.deepcopy(base)
    with torch.no_grad():
        double.weight.mul_(2)
    model = add_deltas(copy.deepcopy(base), {"double": tpde.make_delta(base, double)})
    x = torch.randn(3, 64)
    with torch.autocast("cpu", torch.bfloat16):
        for name, plain in ((None, base), ("double", double), (None, base)):
            model.use(name)
            assert_same_bits(model(x), plain(x), str(name))
        model.use(["double", None, "double"])
        found = model(x)
        assert_same_bits(found[[0, 2]], double(x[[0, 2]]))
        assert_same_bits(found[1:2], base(x[1:2]))


def test_two_models_are_apart() -> None:
    one, other = make(), make()
    one.packed.use("math")
    one.check("math")
    other.check(None)


def test_nothing_stays() -> None:
    tunes = make()
    seen = weakref.ref(tunes.packed.blocks[0].up)
    whole = weakref.ref(tunes.packed)
    del tunes
    gc.collect()
    assert seen() is None
    assert whole() is None


# ---- threads


def test_a_switch_waits_for_forward_passes() -> None:
    tunes = make()
    inside, go_on, order = threading.Event(), threading.Event(), []

    def hold(*_: Any) -> None:
        inside.set()
        assert go_on.wait(20)

    hook = tunes.packed.blocks[1].register_forward_pre_hook(hold)
    found = []

    def forward() -> None:
        with torch.no_grad():
            found.append(tunes.packed(IDS))
        order.append("forward")

    def switch() -> None:
        tunes.packed.use("math")
        order.append("use")

    threads = [threading.Thread(target=forward), threading.Thread(target=switch)]
    threads[0].start()
    assert inside.wait(20)
    threads[1].start()
    time.sleep(0.1)
    assert order == []
    go_on.set()
    for it in threads:
        it.join(20)
    assert order == ["forward", "use"]
    hook.remove()
    with torch.no_grad():
        assert_same_bits(found[0], tunes.plain[None](IDS))
    tunes.check("math")


def test_no_switch_within_a_forward_pass() -> None:
    tunes = make()
    hook = tunes.packed.blocks[1].register_forward_pre_hook(lambda *_: tunes.packed.use("math"))
    with pytest.raises(PackedWeight, match="between two of them"):
        tunes.packed(IDS)
    hook.remove()
    tunes.check(None)
    tunes.packed.use("math")
    tunes.check("math")


def test_threads_that_compute_while_others_switch() -> None:
    tunes = make()
    expected = {it: tunes.plain[it](IDS).detach() for it in tunes.plain}
    wrong, done = [], threading.Event()

    def forward() -> None:
        with torch.no_grad():
            while not done.is_set():
                found = tunes.packed(IDS)
                if not any(torch.equal(found, it) for it in expected.values()):
                    wrong.append(found)

    threads = [threading.Thread(target=forward) for _ in range(2)]
    for it in threads:
        it.start()
    for number in range(30):
        tunes.packed.use((None, "math", "law")[number % 3])
        time.sleep(0.002)
    done.set()
    for it in threads:
        it.join()
    assert not wrong


# ---- graphs


def test_a_recorded_graph_is_not_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    tunes = make()
    monkeypatch.setattr("tpde.weights.changed.capturing", lambda device: True)
    tunes.check(None)
    monkeypatch.undo()
    with pytest.raises(PackedWeight, match="CUDA graph was recorded"):
        tunes.packed.use("math")
    tunes.packed.use(None)
    tunes.check(None)


def test_compiled() -> None:
    tunes = make()
    compiled = torch.compile(tunes.packed, backend="aot_eager", fullgraph=True)
    for name in (None, "math", "law", "math"):
        tunes.packed.use(name)
        with torch.no_grad():
            assert_same_bits(compiled(IDS), tunes.plain[name](IDS), str(name))


def test_a_compiled_backward_pass_of_another_state_is_refused() -> None:
    tunes = make()
    layer = tunes.packed.blocks[0].up
    compiled = torch.compile(layer, backend="aot_eager")
    x = torch.randn(3, 64, requires_grad=True, dtype=torch.bfloat16)
    y = compiled(x)
    tunes.packed.use("math")
    with pytest.raises(InvalidInput, match="under another delta"):
        y.sum().backward()


# ---- what is refused


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
