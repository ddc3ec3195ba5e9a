"""Packed models on a CUDA device: bits, gradients, moving, damage."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from support.models import CAUSAL, NAMES, assert_same_bits, inputs, make, outputs, torch
from torch import nn

from tpde.errors import Corrupt, PackedWeight
from tpde.nn import pack_module, packed_modules, unpack_module

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
]


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("name", NAMES)
def test_logits(name: str, batch: int) -> None:
    model = make(name, device="cuda")
    with torch.no_grad():
        expected = outputs(name, model, batch, "cuda")
        again = outputs(name, model, batch, "cuda")
    recorded = outputs(name, model, batch, "cuda")
    assert_same_bits(again, expected, "two plain runs")
    pack_module(model, min_bytes=1024)
    assert list(packed_modules(model))
    with torch.no_grad():
        for run in range(2):  # the first compares checksums
            assert_same_bits(outputs(name, model, batch, "cuda"), expected, f"packed, run {run}")
    assert_same_bits(outputs(name, model, batch, "cuda"), recorded, "packed, with autograd")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    model = make("llama", dtype, "cuda")
    with torch.no_grad():
        expected = outputs("llama", model, 2, "cuda")
        assert_same_bits(outputs("llama", pack_module(model, min_bytes=0), 2, "cuda"), expected)


def test_moving() -> None:
    model = make("qwen2")
    plain = copy.deepcopy(model).cuda()
    pack_module(model, min_bytes=0).to("cuda")
    assert all(tensor.is_cuda for tensor in (*model.parameters(), *model.buffers()))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with torch.no_grad():
        expected = outputs("qwen2", plain, 2, "cuda")
        assert_same_bits(outputs("qwen2", model, 2, "cuda"), expected, "moved")
        assert_same_bits(outputs("qwen2", copy.deepcopy(model), 2, "cuda"), expected, "copied")
        again = pickle.loads(pickle.dumps(model))
        assert_same_bits(outputs("qwen2", again, 2, "cuda"), expected, "pickled")
        model.to("cpu")
        assert_same_bits(outputs("qwen2", model, 2), outputs("qwen2", plain.cpu(), 2), "back on the CPU")
    with pytest.raises(PackedWeight, match="cannot be cast"):
        model.to("cuda", torch.float16)


def test_unpacking() -> None:
    model = make("mixtral", device="cuda")
    plain = copy.deepcopy(model)
    unpack_module(pack_module(model, min_bytes=0))
    for (key, ours), (_, theirs) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert_same_bits(ours, theirs, key)


@pytest.mark.parametrize("name", CAUSAL)
def test_gradients(name: str) -> None:
    """Gradients to the embeddings' output; the attention's own must be deterministic."""
    model = make(name, torch.float32, "cuda").requires_grad_(False)
    took = inputs(name, 2, 6, "cuda")["input_ids"]

    def gradient() -> Any:
        states = model.get_input_embeddings()(took).requires_grad_(True)
        loss = model(inputs_embeds=states, use_cache=False).logits.square().mean()
        loss.backward()
        return [loss.detach(), states.grad]

    expected = gradient()
    if not all(torch.equal(a, b) for a, b in zip(gradient(), expected, strict=True)):
        pytest.skip("two plain runs differ")
    pack_module(model, min_bytes=0)
    assert_same_bits(gradient(), expected)


def test_peft() -> None:
    peft = pytest.importorskip("peft", reason="needs peft")
    runs = []
    for packed in (False, False, True):
        model = make("llama", device="cuda")
        if packed:
            pack_module(model, min_bytes=0)
        torch.manual_seed(3)
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
        model = peft.get_peft_model(model, config)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.5)
        losses = []
        for step in range(4):
            loss = model(inputs("llama", 2, 9 + step, "cuda")["input_ids"]).logits.float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        runs.append(losses)
    if not all(torch.equal(a, b) for a, b in zip(runs[0], runs[1], strict=True)):
        pytest.skip("two plain runs differ")
    assert_same_bits(runs[2], runs[0])


def test_damage() -> None:
    model = make("llama", device="cuda")
    took = inputs("llama", 1, 5, "cuda")
    pack_module(model, min_bytes=0)
    slot = model.model.layers[1].mlp.up_proj
    blob = slot.weight.packed.sources[0].blob
    at = blob.numel() - 2000  # in the last chunk, before the padding
    blob[at] ^= 0x20
    for _ in range(2):
        with torch.no_grad(), pytest.raises(Corrupt, match=r"model.layers.1.mlp.up_proj.weight") as caught:
            model(**took)
        assert caught.value.tensor == "model.layers.1.mlp.up_proj.weight"
        assert caught.value.chunk is not None
    blob[at] ^= 0x20
    with torch.no_grad():
        assert torch.isfinite(model(**took).logits).all()
    # An embedding is verified at its first look-up, wherever the rows are.
    other = pack_module(make("llama", device="cuda"), min_bytes=0)
    other.model.embed_tokens.weight.packed.sources[0].blob[-3000:-2000] = 255
    with torch.no_grad(), pytest.raises(Corrupt, match=r"model.embed_tokens.weight"):
        other(input_ids=torch.zeros(1, 1, dtype=torch.long, device="cuda"))


def test_ids_elsewhere_are_refused() -> None:
    table = pack_module(nn.Embedding(300, 64).cuda(), min_bytes=0)
    with pytest.raises(RuntimeError, match="same device"):
        table(torch.tensor([1]))
    assert_same_bits(table(torch.tensor([7], device="cuda")), unpack_module(table).weight[7:8])


def test_a_second_device() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    model = make("llama")
    with torch.no_grad():
        expected = outputs("llama", copy.deepcopy(model).to("cuda:1"), 2, "cuda:1")
        assert_same_bits(
            outputs("llama", pack_module(model, min_bytes=0).to("cuda:1"), 2, "cuda:1"), expected
        )


def test_transforms() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(256, 256), nn.SiLU(), nn.Linear(256, 64)).to("cuda", torch.bfloat16)
    packed = pack_module(copy.deepcopy(plain), min_bytes=0)
    x = torch.randn(3, 256, device="cuda", dtype=torch.bfloat16)
    for work in (
        lambda model: torch.func.vmap(model)(x),
        lambda model: torch.func.grad(lambda it: model(it).float().sum())(x),
        lambda model: torch.func.jvp(model, (x,), (torch.ones_like(x),))[1],
    ):
        assert_same_bits(work(packed), work(plain))


def test_channels_last() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(16, 64, 3), nn.SiLU(), nn.Conv2d(64, 64, 1), nn.Conv2d(64, 32, 3))
    plain = plain.to("cuda", torch.bfloat16).to(memory_format=torch.channels_last)
    packed = pack_module(copy.deepcopy(plain).to(memory_format=torch.contiguous_format), min_bytes=0)
    packed.to(memory_format=torch.channels_last)
    x = torch.randn(2, 16, 32, 32, device="cuda", dtype=torch.bfloat16)
    x = x.to(memory_format=torch.channels_last)
    with torch.no_grad():
        expected = plain(x)
        assert_same_bits(plain(x), expected, "two plain runs")
        assert_same_bits(packed(x), expected)
        assert packed(x).stride() == expected.stride()
