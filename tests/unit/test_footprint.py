"""What a model is said to need of memory beside its packed weights covers what it takes."""

import inspect
import re

import pytest
from support.models import NAMES, inputs, make, torch

transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")

from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from tpde.errors import OutOfMemory  # noqa: E402
from tpde.integrations.transformers.activations import activations_of  # noqa: E402
from tpde.integrations.transformers.model_footprint import cache_bytes  # noqa: E402
from tpde.integrations.transformers.recurrent import _Peak  # noqa: E402
from tpde.integrations.transformers.tokens import check_experts, check_sequences, check_tokens  # noqa: E402
from tpde.loading.footprint import module_calls, plain_bytes  # noqa: E402


class Live(TorchDispatchMode):
    """Adds up the bytes that are alive after each operation, except those of known tensors."""

    def __init__(self, known):
        super().__init__()
        self.peak, self._live = 0, {}
        self._known = {it.untyped_storage()._cdata for it in known}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for it in tree_leaves(out):
            if isinstance(it, torch.Tensor) and it.untyped_storage()._cdata not in self._known:
                storage = it.untyped_storage()
                self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._live = {key: it for key, it in self._live.items() if not it[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._live.values()))
        return out


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Llama", {}),
        ("Gemma2", {"final_logit_softcapping": 30.0, "head_dim": 8}),
        ("Cohere", {"logit_scale": 0.25}),
        ("Granite", {"logits_scaling": 8.0}),
    ],
)
def test_logits_are_covered(kind, options):
    """Of a vocabulary so large that nothing else counts, scaled or bounded by the model or not."""
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=20_000,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        **options,
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(torch.bfloat16).eval()
    ids = torch.ones(1, 64, dtype=torch.long)
    with torch.no_grad(), Live([*model.parameters(), *model.buffers(), ids]) as live:
        model(input_ids=ids, use_cache=False)
    said = activations_of(model, 2).bytes(64, 1)
    assert live.peak <= said <= 1.6 * live.peak


def measured(name, model, batch, length, **options):
    took = inputs(name, batch, length)
    if name == "t5":
        took["decoder_input_ids"] = took["input_ids"]
    with torch.no_grad(), Live([*model.parameters(), *model.buffers(), *took.values()]) as live:
        model(**took, **options)
    return live.peak, batch * length * (2 if name == "t5" else 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", NAMES)
def test_activations_are_covered(name, dtype):
    model = make(name, dtype)
    for batch, length in ((1, 120), (4, 30), (1, 16)):
        peak, tokens = measured(
            name, model, batch, length, **({} if name == "bert" else {"use_cache": False})
        )
        assert activations_of(model, dtype.itemsize).bytes(tokens, batch) >= peak
        if name == "llama":
            assert activations_of(model, dtype.itemsize).bytes(tokens, batch) <= 4 * peak


WAYS = {
    "greedy": {"do_sample": False},
    "sample": {"do_sample": True, "top_k": 0},
    "top_k": {"do_sample": True, "top_k": 50},
    "top_p": {"do_sample": True, "top_p": 0.9},
    "beams": {"do_sample": True, "num_beams": 3, "top_p": 0.9},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("way", list(WAYS))
def test_choosing_tokens_is_covered(way, dtype):
    """Of a model that is little else than a vocabulary."""
    config = transformers.LlamaConfig(
        vocab_size=20_000,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    model = transformers.LlamaForCausalLM(config).to(dtype).eval()
    took, batch = torch.full((5, 3), 7), 5 * WAYS[way].get("num_beams", 1)
    with torch.no_grad(), Live([*model.parameters(), *model.buffers(), took]) as live:
        mask = torch.ones_like(took)
        model.generate(took, attention_mask=mask, max_new_tokens=3, pad_token_id=0, **WAYS[way])
    activations = activations_of(model, dtype.itemsize)
    each, others = activations.logits + activations.sampling, batch * 6 * activations.states
    assert live.peak <= batch * each + others
    if way == "top_p":
        assert live.peak >= 0.9 * batch * each


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_copies_of_experts_are_covered(name):
    model = make(name)
    model.set_experts_implementation("batched_mm")
    activations = activations_of(model, 2)
    for batch, length in ((1, 1), (5, 1), (3, 7)):
        peak, tokens = measured(name, model, batch, length, use_cache=False)
        token = activations.states + activations.inside + activations.experts
        assert peak <= tokens * token + tokens * tokens * activations.pair
        assert peak >= tokens * activations.experts


def qwen3_moe():
    """The shape of a Qwen3 with 30 B weights, 3 B of them for a token, without data."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=151_936,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
    )
    with torch.device("meta"):
        return transformers.Qwen3MoeForCausalLM._from_config(config, dtype=torch.bfloat16)


def test_copies_of_experts_have_room_of_their_own():
    """Beside all else: while a prompt is continued, keys and values lie in between."""
    made = activations_of(qwen3_moe(), 2)
    expert = 2 * (2 * 768 * 2048 + 768 * 2048)
    assert made.experts == 8 * expert
    assert made.states == 2048 * (2 * 2 + 3 * 4)
    wide = (32 + 2 * 4) * 128 + 2048 + 8 * (2048 + 2048 + 1536)  # attention, experts
    assert made.inside == 2 * 2 * wide
    assert (made.pair, made.logits, made.sampling) == (3, 2 * 151_936, 40 * 151_936)
    logits = 8192 * made.logits + made.sampling
    assert logits > 8192 * made.inside + 3 * 8192**2
    assert made.tokens(8192, 1) == 8192 * made.states + logits
    assert made.tokens(8192, 8) == made.tokens(8192, 1) + 7 * made.sampling
    assert made.copied(8192, 8) == made.copied(2048, 8) == 8
    assert made.bytes(2048, 8) == made.tokens(2048, 8) + 8 * made.experts
    assert (made.copied(1, 8), made.bytes(1, 8)) == (1, made.tokens(1, 1) + made.experts)
    dense = made._replace(experts=0, copies=False)
    assert dense.bytes(8192, 8) == dense.tokens(8192, 8) == made.tokens(8192, 8)


def test_a_refusal_of_copies_says_what_they_take():
    made = activations_of(qwen3_moe(), 2)  # 72 MiB for each token
    check_experts(8, 1, 2048, 8, made)
    check_experts(2, 4, 2048, 8, made)
    for batch, new, takes, more, fewer in (
        (10, 1, 720, 144, "at most 8 x 1 at once"),
        (5, 2, 720, 144, "at most 4 x 2 at once"),
        (1, 9, 648, 72, "fewer at once"),
    ):
        with pytest.raises(OutOfMemory) as caught:
            check_experts(batch, new, 2048, 8, made)
        said = str(caught.value)
        assert f"{batch} x {new} tokens, which takes {takes} MiB, the VRAM budget keeps 576 MiB" in said
        assert fewer in said
        assert f"`max_batch={batch * new}`, which takes {more} MiB more" in said
        assert (caught.value.found, caught.value.needed) == (8 * made.experts, batch * new * made.experts)
        check_experts(batch, new, 2048, batch * new, made)


def test_experts_that_nobody_copies_take_nothing():
    config = qwen3_moe().config
    with torch.device("meta"):
        model = transformers.Qwen3MoeForCausalLM._from_config(
            config, dtype=torch.bfloat16, experts_implementation="eager"
        )
    made = activations_of(model, 2)
    assert made.bytes(2048, 8) == made.tokens(2048, 8)
    with pytest.raises(OutOfMemory, match='`experts_implementation="batched_mm"` and `max_batch=8`'):
        check_experts(8, 1, 2048, 8, made)  # it was set when the model was there


@pytest.mark.parametrize("name", ["llama", "mixtral"])
@pytest.mark.parametrize("limit", [60, 300])
def test_what_errors_advise_does(name, limit):
    """So many sequences, or so many to keep memory for; and no more."""
    activations = activations_of(make(name), 2)
    checks = [(limit, lambda batch, most: check_sequences(batch, limit, most, activations))]
    if name == "mixtral":
        checks += [
            (
                limit // new,
                lambda batch, most, new=new: check_experts(batch, new, limit, most, activations),
            )
            for new in (1, 3)
        ]
    for batch, check in checks:
        with pytest.raises(OutOfMemory) as caught:
            check(batch, 1)
        said = str(caught.value)
        check(batch, int(re.search(r"max_batch=(\d+)", said)[1]))
        fits = re.search(r"at most (\d+)", said)
        if fits:
            check(int(fits[1]), 1)
            with pytest.raises(OutOfMemory):
                check(int(fits[1]) + 1, 1)
    check_tokens(1, limit, limit)
    check_sequences(1, limit, 1, activations)
    check_experts(1, 1, limit, 1, activations)


@pytest.mark.parametrize("name", [it for it in NAMES if it != "bert"])
def test_the_cache_is_covered(name):
    model = make(name)
    without, tokens = measured(name, model, 2, 40, use_cache=False)
    peak, _ = measured(name, model, 2, 40, use_cache=True)
    took = peak - without
    assert cache_bytes(model, tokens, 2) >= took
    assert activations_of(model, 2).bytes(tokens, 2) + cache_bytes(model, tokens, 2) >= peak


def test_llama_caches_keys_and_values():
    model = make("llama")  # 3 layers, 2 heads of 16
    layer = 2 * 2 * 16 * 2 * 1000
    assert cache_bytes(model, 1000, 2) == 3 * layer * 1.25 + layer


@pytest.mark.parametrize("name", ["cache", "past_key_values", "cache_params", "something"])
def test_a_cache_is_known_by_all_its_names(name):
    """Transformers 5.24 calls it otherwise than earlier versions."""
    model = make("llama")
    taken = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)
    forward = lambda **kwargs: None  # noqa: E731
    forward.__signature__ = inspect.Signature([taken])
    model.forward = forward
    assert (cache_bytes(model, 1000, 2) > 0) == (name != "something")


def test_windows_are_cut_out_of_whole_prompts():
    """Transformers' own cache holds what it shows no more, so that it has to be counted."""
    model = make("mistral")  # 2 layers, 2 heads of 16, all with a window of 6
    with torch.no_grad():
        cache = model(**inputs("mistral", 1, 800), use_cache=True).past_key_values
    kept = [it for layer in cache.layers for it in (layer.keys, layer.values)]
    assert {it.shape[-2] for it in kept} == {5}
    layer = 2 * 2 * 16 * 2 * 800
    assert sum(it.untyped_storage().nbytes() for it in kept) == 2 * layer
    assert cache_bytes(model, 800, 2) == 2 * layer * 1.25 + layer


def test_encoders_cache_nothing():
    assert cache_bytes(make("bert"), 1000, 2) == 0


def test_plain_bytes_leave_packed_and_tied_weights_out():
    model = make("qwen2")  # the head is tied to the embedding
    every = plain_bytes(model, ())
    held = {id(it): it for it in (*model.parameters(), *model.buffers())}
    assert 0 <= every - sum(it.nbytes for it in held.values()) < 512 * len(held)
    assert every - plain_bytes(model, {"model.embed_tokens.weight"}) == model.lm_head.weight.nbytes


def test_calls_are_those_of_a_forward_pass():
    model, called = make("llama"), []
    handles = [it.register_forward_hook(lambda *_: called.append(1)) for it in model.modules()]
    with torch.no_grad():
        model(**inputs("llama", 1, 4))
    assert module_calls(model) == pytest.approx(len(called), abs=2)
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize(("itemsize", "each"), [(2, 16), (4, 20)])
def test_learned_position_biases_may_not_be_fused(itemsize, each):
    """Biases, alone and with the mask, and as PyTorch's own attention needs them, scores and weights."""
    config = transformers.T5Config(vocab_size=100, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)
    with torch.device("meta"):
        model = transformers.T5ForConditionalGeneration(config)
    assert activations_of(model, itemsize).pair == 1 + itemsize + 3 * 8 + 4 * each


def test_the_largest_tensor_counts_twice():
    """The allocator may have cut the memory that it had in the layer before."""
    with _Peak([]) as mode:
        large = torch.empty(1000, dtype=torch.uint8, device="meta")
        small = torch.empty(500, dtype=torch.uint8, device="meta")
    assert mode.peak == large.nbytes + small.nbytes + large.nbytes
