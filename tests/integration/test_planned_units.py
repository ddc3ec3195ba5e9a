"""What a plan counts of a model: its units, what each device holds, caches and activations."""

from collections import Counter

import pytest
from support.checkpoints import checkpoint
from support.models import make, torch

pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")

from tpde.errors import InvalidInput, OutOfMemory
from tpde.integrations.transformers.activations import activations_of
from tpde.integrations.transformers.budget_plan import plan_streaming
from tpde.integrations.transformers.device_maps import devices_of
from tpde.integrations.transformers.model_footprint import cache_bytes
from tpde.integrations.transformers.shape import opened_shape
from tpde.integrations.transformers.streamed import ModelStreaming
from tpde.loading.model_units import unit_of, units_of
from tpde.nn.replace import block_path
from tpde.planning.budget import Budget


@pytest.fixture(scope="module", params=["llama", "qwen2", "gpt2", "mixtral", "t5"])
def packed(request, tmp_path_factory):
    """Give a packed model's directory."""
    return checkpoint(tmp_path_factory.mktemp(request.param), request.param).packed


def test_units_are_groups_of_the_loaded_model(packed):
    """Every packed weight is in one unit, named as the group that decodes it."""
    import tpde
    from tpde.nn import packed_modules

    model = tpde.from_pretrained(packed)
    groups, experts = {}, Counter()
    for path, module in packed_modules(model):
        for slot in module.tpde_slots.values():
            name = path if slot.group is None else slot.group.name
            groups.setdefault(name, {}).update({id(source): source for source in slot.packed.sources})
            experts[name] += slot.shape[0] if len(slot.shape) == 3 else 0
    with opened_shape(packed) as (shape, checkpoint, plan):
        units = {unit.name: unit for unit in units_of(shape, plan.runs)}
        assert {unit_of(shape, name) for name in plan.runs} == set(units)
        total = sum(it.extent.size for it in checkpoint.packed.values())
    whole = {name: blobs for name, blobs in groups.items() if name in units}
    for name, blobs in whole.items():
        assert units[name].packed == sum(it.packed_bytes for it in blobs.values())
        assert units[name].plain >= sum(it.nbytes for it in blobs.values())
        maps = sum(-(-12 * it.header.chunks // 512) * 512 for it in blobs.values())
        # Tables and descriptors of each blob, and more of these where experts are copied one by one.
        assert units[name].index == maps + 18 * 1024 * len(blobs) + 512 * experts[name]
    # What is not a unit of its own is an embedding tied to one.
    kept = {key for blobs in whole.values() for key in blobs}
    assert all(set(blobs) <= kept for blobs in groups.values())
    assert sum(unit.packed for unit in units.values()) <= total
    assert all(it.rows == it.name.endswith(("embed_tokens", "wpe")) for it in units.values())


def test_only_some_of_the_parameters(packed):
    with opened_shape(packed) as (shape, checkpoint, plan):
        every = units_of(shape, plan.runs)
        one = [name for name in plan.runs if unit_of(shape, name) == every[1].name]
        made = plan_streaming(shape, checkpoint, plan, Budget(1 << 30, None, 64), only=one)
        assert list(made.placements) == [every[1].name]


def _divided(shape):
    """A device map that puts the second half of a model's parameters, by blocks, on another device."""
    blocks = list(dict.fromkeys(block_path(shape, name) or name for name, _ in shape.named_parameters()))
    first = set(blocks[: len(blocks) // 2])
    return {block: torch.device("cpu", int(block not in first)) for block in blocks}


def test_a_device_counts_what_is_there(packed):
    with opened_shape(packed) as (shape, checkpoint, plan):
        streaming = ModelStreaming(Budget(1 << 30, None, 64))
        streaming.plan(shape, checkpoint, plan, devices_of(shape, _divided(shape)))
        one, other = (made.parts for made in streaming.plans.values())
        whole = plan_streaming(shape, checkpoint, plan, Budget(1 << 30, None, 64)).parts
        # Of these no map says where they are.
        buffers = {id(it): -(-it.nbytes // 512) * 512 for _, it in shape.named_buffers()}
    assert one["plain"] + other["plain"] == whole["plain"] + sum(buffers.values())
    assert min(one["plain"], other["plain"]) > sum(buffers.values())
    assert one["activations"] == other["activations"] == whole["activations"]
    assert one["packed"] + other["packed"] + one["decoded"] + other["decoded"] <= (
        whole["packed"] + whole["decoded"]
    )
    twice = one["cache"] + other["cache"] - whole["cache"]  # of one layer
    assert 0 <= twice < whole["cache"] / 2
    assert max(one["cache"], other["cache"]) <= whole["cache"]
    # The other's weights may be in host memory, which is mapped for both: 2 MiB of page tables are the least.
    assert one["pages"] == other["pages"] == 2 << 20
    assert not whole["pages"]


def test_a_cache_is_where_its_blocks_are():
    model = make("llama")  # 3 layers
    names = [name for name, _ in model.named_parameters()]
    layer = 2 * 2 * 16 * 2 * 1000  # keys and values of 2 heads of 16
    for blocks, expected in (
        ((), 0),
        ((0,), 2.25 * layer),
        ((0, 2), 3.5 * layer),
        ((0, 1, 2), cache_bytes(model, 1000, 2)),
    ):
        only = [it for it in names if any(f"layers.{i}." in it for i in blocks)]
        assert cache_bytes(model, 1000, 2, [*only, "lm_head.weight"]) == expected
    encoders = make("t5")
    names = [name for name, _ in encoders.named_parameters()]
    whole = cache_bytes(encoders, 100, 2)
    assert cache_bytes(encoders, 100, 2, [it for it in names if it.startswith("encoder.")]) == 0
    assert cache_bytes(encoders, 100, 2, [it for it in names if it.startswith("decoder.")]) == whole


def test_where_a_map_puts_parameters_and_buffers(llama):
    with opened_shape(llama.packed) as (shape, _, _):
        found = devices_of(shape, {"model": 0, "lm_head": 1, "model.layers.2": 1})
        assert found["model.layers.2.mlp.up_proj.weight"] == found["lm_head.weight"] == torch.device("cuda:1")
        assert found["model.norm.weight"] == found["model.rotary_emb.inv_freq"] == torch.device("cuda:0")
        some = devices_of(shape, {"model.embed_tokens": 0, "model.layers": 1})
        assert not {"model.rotary_emb.inv_freq", "lm_head.weight"} & set(some)
        with pytest.raises(InvalidInput, match="on cpu beside 0"):
            devices_of(shape, {"model": 0, "lm_head": "cpu"})


def test_max_tokens_count(llama):
    with opened_shape(llama.packed) as (shape, checkpoint, plan):
        used = [
            plan_streaming(shape, checkpoint, plan, Budget(1 << 40, None, tokens)).used
            for tokens in (1, 100, 10_000)
        ]
        assert used[0] < used[1] < used[2]
        with pytest.raises(OutOfMemory, match=r"a smaller `max_tokens`$"):
            plan_streaming(shape, checkpoint, plan, Budget(1 << 28, None, 1 << 20))


def test_max_batch_counts(tmp_path):
    """Copies of experts, which a refusal names the number of."""
    packed = checkpoint(tmp_path, "mixtral").packed
    with opened_shape(packed) as (shape, files, plan):
        one, eight = (
            plan_streaming(shape, files, plan, Budget(1 << 40, None, 100, max_batch=batch)).parts
            for batch in (1, 8)
        )
        experts = activations_of(shape, 2)
        assert eight["activations"] - one["activations"] == 7 * experts.experts
        with pytest.raises(OutOfMemory, match=r"a smaller `max_tokens` or `max_batch`$"):
            plan_streaming(shape, files, plan, Budget(1 << 20, None, 100))
