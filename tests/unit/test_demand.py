"""What a model is said to need of memory beside its packed weights covers what it takes."""

import pytest
from support.models import NAMES, inputs, make, torch

transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")

from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from tpde.integrations.streaming.demand import module_calls, plain_bytes  # noqa: E402
from tpde.integrations.transformers.demand import activation_bytes, cache_bytes  # noqa: E402


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
        assert activation_bytes(model, tokens, dtype.itemsize) >= peak
        if name == "llama":
            assert activation_bytes(model, tokens, dtype.itemsize) <= 4 * peak


@pytest.mark.parametrize("name", [it for it in NAMES if it != "bert"])
def test_the_cache_is_covered(name):
    model = make(name)
    without, tokens = measured(name, model, 2, 40, use_cache=False)
    peak, _ = measured(name, model, 2, 40, use_cache=True)
    took = peak - without
    assert cache_bytes(model, tokens, 2) >= took
    assert activation_bytes(model, tokens, 2) + cache_bytes(model, tokens, 2) >= peak


def test_llama_caches_keys_and_values():
    model = make("llama")  # 3 layers, 2 heads of 16
    layer = 2 * 2 * 16 * 2 * 1000
    assert cache_bytes(model, 1000, 2) == 3 * layer * 1.25 + layer


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
