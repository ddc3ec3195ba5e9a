"""Packed embeddings decode the rows that they are asked for, and nothing to the workspace."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from support.models import assert_same_bits, torch
from support.small import IDS
from torch import nn

from tpde.errors import PackedWeight
from tpde.nn import PackedModule, PackedParameter, PackedTensor, finish, pack_module, packed_modules
from tpde.nn.replace import prepare_rows


class Scaled(nn.Embedding):
    """As several models have it."""

    def forward(self, ids: Any) -> Any:
        return super().forward(ids) * 8.0


class Direct(nn.Embedding):
    """Reads its weight instead."""

    def forward(self, ids: Any) -> Any:
        return nn.functional.embedding(ids, self.weight)


@pytest.mark.parametrize("kind", [nn.Embedding, Scaled, Direct])
@pytest.mark.parametrize("shape", [(300, 64), (33, 1000), (5000, 12), (40, 8192), (40, 20000)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_embeddings(kind: type, shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    table = kind(*shape).to(dtype)
    draw = torch.Generator().manual_seed(2)
    batches = [torch.randint(0, shape[0], size, generator=draw) for size in ((3, 50), (1,), (0,), ())]
    batches += [torch.tensor([shape[0] - 1, 0]), torch.arange(20, dtype=torch.int32)]
    with torch.no_grad():
        expected = [table(ids) for ids in batches]
    pack_module(table, min_bytes=0)
    assert isinstance(table, PackedModule)
    assert_same_bits([table(ids) for ids in batches], expected)
    for bad in (-1, shape[0]):
        with pytest.raises(IndexError):
            table(torch.tensor([0, bad]))


def test_an_embedding_decodes_only_the_rows_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from tpde.weights.resident import Resident

    table = pack_module(nn.Embedding(4000, 256).to(torch.bfloat16))
    spans: list[int] = []
    decode = Resident.decode_on_host
    monkeypatch.setattr(
        Resident, "decode_on_host", lambda self, a, b, out: spans.append(b - a) or decode(self, a, b, out)
    )
    table(torch.tensor([[3, 2000, 3, 3999]]))
    assert sum(spans) == 3 * 512


def test_constant_weights() -> None:
    model = nn.Sequential(nn.Embedding(50, 64), nn.Linear(64, 64, bias=False))
    nn.init.zeros_(model[0].weight)
    nn.init.constant_(model[1].weight, -0.25)
    expected = model(IDS)
    pack_module(model, min_bytes=0)
    assert len(list(packed_modules(model))) == 2
    assert_same_bits(model(IDS), expected)
    with pytest.raises(IndexError):
        model(torch.tensor([50]))


def test_of_an_embedding_nothing_is_decoded_to_the_workspace() -> None:
    """However large it is, in a block or not."""
    model = nn.ModuleDict({"embed": nn.Embedding(3000, 64), "blocks": nn.ModuleList([nn.Embedding(900, 64)])})
    model["head"] = nn.Linear(64, 100)
    pack_module(model.bfloat16(), min_bytes=0)
    for embedding in (model["embed"], model["blocks"][0]):
        assert isinstance(embedding.weight, PackedParameter)
        assert embedding.tpde_slots["weight"].group is None
        assert not {"tpde_own_group", "tpde_forward"} & set(vars(embedding))
    space = model["head"].tpde_group().workspace
    assert space.end - space.start == 100 * 128


def test_values_for_a_moment_of_an_embedding() -> None:
    plain = nn.Embedding(50, 64).bfloat16()
    ours = pack_module(copy.deepcopy(plain), min_bytes=0)
    state = {"weight": plain.weight.detach() * 2}
    assert_same_bits(
        torch.func.functional_call(ours, state, (IDS,)), torch.func.functional_call(plain, state, (IDS,))
    )
    assert_same_bits(ours(IDS), plain(IDS))


def test_a_norm_that_rows_are_limited_to_since_is_refused() -> None:
    """The plain weight would be changed."""
    table = pack_module(nn.Embedding(50, 64).bfloat16(), min_bytes=0)
    table.max_norm = 0.5
    with pytest.raises(PackedWeight, match="max_norm"):
        table(IDS)
    table.max_norm = None
    table(IDS)


def test_modes_see_the_lookup() -> None:
    class Doubled(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            return found * 2 if func is nn.functional.embedding else found

    plain = nn.Embedding(50, 64).bfloat16()
    ours = pack_module(copy.deepcopy(plain), min_bytes=0)
    with Doubled():
        assert_same_bits(ours(IDS), plain(IDS))
    with torch.device("cpu"):
        assert_same_bits(ours(IDS), plain(IDS))


def test_rows_are_prepared_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once where the blob is on its device; else when it is asked for, and it is there."""
    prepared: list[str] = []
    monkeypatch.setattr(PackedTensor, "prepare_rows", lambda self: prepared.append(self.name))
    model = nn.ModuleDict({"a": nn.Embedding(50, 64), "b": nn.Embedding(60, 64), "c": nn.Linear(64, 64)})
    pack_module(model.bfloat16(), min_bytes=0)
    assert prepared == ["a.weight", "b.weight"]
    prepared.clear()
    model["b"].weight.packed.sources[0].settled = False
    finish(model)
    assert prepared == ["a.weight"]
    prepared.clear()
    prepare_rows(model)
    assert prepared == ["a.weight", "b.weight"]
    prepared.clear()
    model["a"].to("cpu")
    model["c"].to("cpu")
    assert prepared == ["a.weight"]
