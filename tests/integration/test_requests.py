"""A delta for each request of a batch: each has the bits of its fine-tune on the same rows."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.checkpoints import checkpoint
from support.models import assert_same_bits, inputs, make, torch
from support.tunes import tuned

import tpde
from tpde.errors import InvalidInput, PackedWeight

transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")

LISTS = [["law"], ["math"] * 3, ["math", None, "law"], ["math", "law", "math", None, "law", "math"]]
GREEDY = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}


class Tunes(NamedTuple):
    """Plain models by names, of which None is the base; and the packed one that becomes each."""

    plain: dict[str | None, Any]
    packed: Any


def tunes_of(name: str, folder: Path | None = None) -> Tunes:
    """From files if there is a folder for them, else in memory."""
    base = make(name, torch.float32)
    plain = {None: base, "math": tuned(base, 1), "law": tuned(base, 2)}
    if folder is None:
        packed = tpde.pack_module(copy.deepcopy(base), min_bytes=0)
        tpde.nn.add_deltas(packed, {it: tpde.make_delta(base, plain[it]) for it in ("math", "law")})
        return Tunes(plain, packed)
    pair, deltas = checkpoint(folder, name, torch.float32), {}
    for it in ("math", "law"):
        plain[it].save_pretrained(folder / it)
        deltas[it] = folder / f"{it}.tpde"
        tpde.diff(pair.plain, folder / it, deltas[it])
    return Tunes(plain, tpde.from_pretrained(pair.packed, deltas=deltas))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Tunes:
    return tunes_of("llama", tmp_path_factory.mktemp("llama"))


def places(names: Any) -> dict[str | None, list[int]]:
    return {it: [i for i, other in enumerate(names) if other == it] for it in dict.fromkeys(names)}


def check_tokens(tunes: Tunes, names: Any, took: dict[str, Any], **options: Any) -> Any:
    """Compare what each request gets with its rows alone, under `use` and by the plain fine-tune."""
    tunes.packed.use(names)
    options = GREEDY | options
    found = tunes.packed.generate(**took, **options)
    each = options.get("num_return_sequences", 1)
    assert len(found) == each * len(names)
    for name, rows in places(names).items():
        tunes.packed.use(name)
        part = {key: value[rows] for key, value in took.items()}
        expected = tunes.packed.generate(**part, **options)
        assert torch.equal(expected, tunes.plain[name].generate(**part, **options))
        mine = found[[each * row + i for row in rows for i in range(each)]]
        width = expected.shape[1]
        assert torch.equal(mine[:, :width], expected)
        assert (mine[:, width:] == options["pad_token_id"]).all()
    return found


# ---- forward passes


@pytest.mark.parametrize("name", ["llama", "bert", "t5", "gpt2", "mixtral"])
def test_bits(name: str) -> None:
    tunes = tunes_of(name)
    for names in LISTS:
        tunes.packed.use(names)
        took = inputs(name, len(names), 7)
        took["attention_mask"] = torch.ones_like(took["input_ids"])
        took["attention_mask"][0, :2] = 0
        with torch.no_grad():
            found = tunes.packed(**took, output_hidden_states=True)
            for it, rows in places(names).items():
                part = {key: value[rows] for key, value in took.items()}
                if "use_cache" in (tunes.plain[it].config.to_dict()):
                    part["use_cache"] = False
                expected = tunes.plain[it](**part, output_hidden_states=True)
                assert type(found) is type(expected)
                assert list(found) == list(expected)
                for key, value in expected.items():
                    mine = found[key]
                    mine = mine[rows] if isinstance(mine, torch.Tensor) else [x[rows] for x in mine]
                    assert_same_bits(mine, value, key)


def test_from_files(llama: Tunes) -> None:
    names = ["law", None, "law", "math"]
    llama.packed.use(names)
    took = inputs("llama", 4, 5)["input_ids"]
    with torch.no_grad():
        found = llama.packed(took, return_dict=False)
        assert isinstance(found, tuple)
        for it, rows in places(names).items():
            assert_same_bits(found[0][rows], llama.plain[it](took[rows]).logits)
            embedded = llama.plain[None].get_input_embeddings()(took)
        found = llama.packed(inputs_embeds=embedded, position_ids=torch.arange(5).expand(4, -1)).logits
        again = llama.packed(inputs_embeds=embedded, position_ids=torch.arange(5)[None]).logits
        for it, rows in places(names).items():
            assert_same_bits(found[rows], llama.plain[it](inputs_embeds=embedded[rows]).logits)
        assert_same_bits(again, found)


def test_forward_refuses(llama: Tunes) -> None:
    llama.packed.use(["math", None])
    ids = inputs("llama", 2, 5)["input_ids"]
    cache = transformers.DynamicCache()
    for name, value in {
        "labels": ids,
        "use_cache": True,
        "past_key_values": cache,
        "attention_mask": torch.ones(2, 1, 5, 5),
        "cache_position": torch.arange(5),
        "logits_to_keep": torch.tensor([1, 2]),
        "position_ids": torch.arange(5).expand(3, -1),
        "other": [cache],
    }.items():
        with pytest.raises(InvalidInput, match=f"`{name}`") as caught:
            llama.packed(ids, **{name: value})
        assert caught.value.where == name
    with pytest.raises(InvalidInput, match="`use_cache`"):
        llama.packed(ids, None, None, None, None, None, True)
    assert "past_key_values" not in llama.packed(ids, None, None, None, None, None, False)
    with pytest.raises(InvalidInput, match=r"has 3 rows, .* for 2"):
        llama.packed(inputs("llama", 3, 5)["input_ids"])
    assert llama.packed.tpde_deltas.active == ("math", None)


def test_parts_are_refused(llama: Tunes, tmp_path: Path) -> None:
    llama.packed.use(["math", None])
    ids = inputs("llama", 2, 5)["input_ids"]
    for call in (
        lambda: llama.packed.model(ids),
        lambda: llama.packed.base_model(ids),
        lambda: llama.packed.get_input_embeddings()(ids),
        lambda: llama.packed.model.norm(torch.zeros(2, 5, 64)),
        lambda: llama.packed.model.layers[0](torch.zeros(2, 5, 64)),
        lambda: llama.packed.save_pretrained(tmp_path / "saved"),
        lambda: tpde.unpack_module(llama.packed),
    ):
        with pytest.raises(InvalidInput):
            call()
    llama.packed.use("law")
    with torch.no_grad():
        found = llama.packed.model(ids).last_hidden_state
        assert_same_bits(found, llama.plain["law"].model(ids).last_hidden_state)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # transformers renames these methods
def test_gradient_checkpointing_is_refused_before_it_fails() -> None:
    tunes = tunes_of("llama")
    ids = inputs("llama", 2, 5)["input_ids"]
    tunes.packed.use(["math", None])
    tunes.packed.train().gradient_checkpointing_enable()
    with pytest.raises(PackedWeight, match="does gradient checkpointing"):
        tunes.packed(ids)
    tunes.packed.gradient_checkpointing_disable()
    tunes.packed(ids)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft asks for what transformers renamed
def test_adapters(llama: Tunes) -> None:
    """PEFT calls the whole model, within its own."""
    peft = pytest.importorskip("peft", reason="needs peft")
    tunes = tunes_of("llama")
    config = peft.LoraConfig(target_modules=["q_proj"], r=4)
    torch.manual_seed(3)
    packed = peft.get_peft_model(tunes.packed, config)
    names, took = ["math", "law", "math"], inputs("llama", 3, 5)
    alone = {}
    for name, rows in places(names).items():
        tunes.packed.use(name)
        part = took["input_ids"][rows]
        alone[name] = packed(input_ids=part).logits, packed.generate(input_ids=part, **GREEDY)
    tunes.packed.use(names)
    logits, tokens = packed(**took).logits, packed.generate(**took, **GREEDY)
    for name, rows in places(names).items():
        assert_same_bits(logits[rows], alone[name][0])
        assert torch.equal(tokens[rows], alone[name][1])
    with pytest.raises(InvalidInput):
        packed.base_model.model.model(**took)


# ---- generating


@pytest.mark.parametrize("names", LISTS, ids=len)
@pytest.mark.parametrize("padded", [False, True])
def test_generate(llama: Tunes, names: Any, padded: bool) -> None:
    took = inputs("llama", len(names), 6)
    if padded:
        took["attention_mask"] = torch.ones_like(took["input_ids"])
        for row in range(0, len(names), 2):
            took["attention_mask"][row, : row // 2 + 1] = 0
            took["input_ids"][row, : row // 2 + 1] = 0
    check_tokens(llama, names, took)


@pytest.mark.parametrize("name", ["t5", "gpt2", "mixtral"])
def test_generate_of_others(name: str) -> None:
    took = {"input_ids": inputs(name, 4, 6)["input_ids"]}
    check_tokens(tunes_of(name), ["math", "law", "math", None], took)


def test_generate_lengths(llama: Tunes) -> None:
    """Results end where theirs end, and are padded to the longest."""
    names, took = ["math", "law", None, "math"], inputs("llama", 4, 6)
    llama.packed.use(names)
    free = llama.packed.generate(**took, **(GREEDY | {"max_new_tokens": 8}))
    ends = next(int(it) for it in free[1, 7:] if it not in free[2, 6:])
    found = check_tokens(llama, names, took, max_new_tokens=8, eos_token_id=ends, pad_token_id=1)
    assert found[1, -1] == 1
    llama.packed.use(names)
    again = llama.packed.generate(**took, max_new_tokens=8, do_sample=False, eos_token_id=[ends])
    assert again[1, -1] == ends  # without a token to pad with, the one that ends them
    assert torch.equal(again[1] == ends, found[1].where(found[1] != 1, ends) == ends)


def test_generate_several_sequences(llama: Tunes) -> None:
    names, took = ["math", None, "math"], inputs("llama", 3, 6)
    check_tokens(llama, names, took, num_beams=3, num_return_sequences=2)
    llama.packed.use(names)
    config = transformers.GenerationConfig(
        max_new_tokens=4, num_beams=2, num_return_sequences=2, do_sample=False, pad_token_id=0
    )
    found = llama.packed.generate(took["input_ids"], config)
    assert found.shape == (6, 10)
    assert torch.equal(found[:, :6], took["input_ids"].repeat_interleave(2, 0))


def test_sampling_draws_in_the_order_of_the_deltas(llama: Tunes) -> None:
    names, took = ["math", None, "math"], inputs("llama", 3, 6)["input_ids"]
    options = {"max_new_tokens": 6, "do_sample": True, "pad_token_id": 0}
    torch.manual_seed(5)
    expected = {}
    for name, rows in places(names).items():
        llama.packed.use(name)
        expected[name] = llama.packed.generate(took[rows], **options)
    torch.manual_seed(5)
    llama.packed.use(names)
    found = llama.packed.generate(took, **options)
    for name, rows in places(names).items():
        assert torch.equal(found[rows], expected[name])


def test_generate_refuses(llama: Tunes) -> None:
    llama.packed.use(["math", None])
    took = inputs("llama", 2, 6)["input_ids"]
    for name, value in {
        "return_dict_in_generate": True,
        "streamer": object(),
        "assistant_model": llama.plain[None],
        "prefix_allowed_tokens_fn": lambda row, ids: [1],
        "logits_processor": [lambda ids, scores: scores],
        "stopping_criteria": [lambda ids, scores: True],
        "custom_generate": lambda *args, **kwargs: None,
        "synced_gpus": True,
        "cache_implementation": "paged",
        "past_key_values": transformers.DynamicCache(),
        "pixel_values": torch.zeros(2, 3, 4, 4),
        "negative_prompt_ids": took,
    }.items():
        with pytest.raises(InvalidInput, match=f"`{name}`") as caught:
            llama.packed.generate(took, **GREEDY, **{name: value})
        assert caught.value.where == name
    config = transformers.GenerationConfig(return_dict_in_generate=True)
    with pytest.raises(InvalidInput, match="`return_dict_in_generate`"):
        llama.packed.generate(took, config)
    with pytest.raises(InvalidInput, match=r"has 1 rows, .* for 2"):
        llama.packed.generate(took[:1], **GREEDY)
    with pytest.raises(InvalidInput, match="no argument is known"):
        llama.packed.generate(**GREEDY)
    with pytest.raises(TypeError):
        llama.packed.generate(took, inputs=took)
    assert llama.packed.tpde_deltas.active == ("math", None)
    check_tokens(llama, ["math", None], {"input_ids": took})


def test_errors_within_a_generation_leave_the_choice(llama: Tunes) -> None:
    names, took = ["math", None], inputs("llama", 2, 6)["input_ids"]
    llama.packed.use(names)
    calls = []

    def fail(*_: Any) -> None:
        calls.append(llama.packed.tpde_deltas.active_delta.now())
        if len(calls) == 8:
            raise KeyError("in the second generation")

    hook = llama.packed.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(KeyError, match="in the second"):
        llama.packed.generate(took, **GREEDY)
    hook.remove()
    assert calls == ["math"] * 6 + [None] * 2
    assert llama.packed.tpde_deltas.active == tuple(names)
    check_tokens(llama, names, {"input_ids": took})


def test_generate_is_the_model_s_own_again(llama: Tunes) -> None:
    own = llama.packed.generate
    llama.packed.use(["math"])
    held = llama.packed.generate
    assert held != own
    llama.packed.use("math")
    assert llama.packed.generate == own
    took = inputs("llama", 3, 6)["input_ids"]
    assert torch.equal(held(took, **GREEDY), own(took, **GREEDY))
    llama.packed.use(["math", None, "law"])
    with pytest.raises(InvalidInput, match="`use_cache`"):  # which calls the model once for all
        own(took, **GREEDY)
