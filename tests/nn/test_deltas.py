"""Several states of one packed model: each has the bits of the model that it is a state of."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
from support.emulated import on_cpu, where  # noqa: F401
from support.models import assert_same_bits
from support.small import IDS, Model, torch
from support.tunes import Tunes, make, tuned

import tpde
from tpde.format.delta_head import SPARSE
from tpde.io.sources import BytesSource
from tpde.nn import add_deltas, pack_module, packed_modules, plain_state_dict
from tpde.store.delta_file import DeltaFile
from tpde.weights import coded
from tpde.weights.changed import Changed


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


def test_the_example() -> None:
    example = Path(__file__).parents[2] / "examples" / "fine_tunes.py"
    done = subprocess.run([sys.executable, example], capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("the same bits") == 6
