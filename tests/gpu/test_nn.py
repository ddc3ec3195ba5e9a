"""Packed models on a CUDA device: bits, graphs, streams, threads, memory, damage."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from typing import Any

import pytest
from support.models import CAUSAL, NAMES, VOCAB, assert_same_bits, inputs, make, outputs, torch
from torch import nn

from tpde.errors import Corrupt, PackedWeight
from tpde.nn import PackedParameter, pack_module, packed_modules, unpack_module

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


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_cuda_graph(name: str) -> None:
    """A captured step decodes when it is replayed, and replays agree with the plain model."""
    model = make(name, device="cuda")
    took = inputs(name, 2, 6, "cuda")["input_ids"]
    other = torch.randint(0, VOCAB, took.shape, device="cuda")
    with torch.no_grad():
        expected = [model(it, use_cache=False).logits for it in (took, other)]
        pack_module(model, min_bytes=0)
        static = took.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                model(static, use_cache=False)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = model(static, use_cache=False).logits
        for ids, logits in zip((took, other), expected, strict=True):
            static.copy_(ids)
            graph.replay()
            assert_same_bits(found, logits, "replayed")
            assert_same_bits(model(ids, use_cache=False).logits, logits, "eager, after a replay")


def test_streams() -> None:
    """Forward passes on two streams take turns in the workspace."""
    model = make("llama", device="cuda")
    batches = [inputs("llama", n, 40, "cuda")["input_ids"] for n in (3, 4)]
    with torch.no_grad():
        expected = [model(it, use_cache=False).logits for it in batches]
        pack_module(model, min_bytes=0)
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        found: list[list[Any]] = [[], []]
        for _ in range(20):
            for number, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    found[number].append(model(batches[number], use_cache=False).logits)
        torch.cuda.synchronize()
    for number, logits in enumerate(expected):
        assert_same_bits(found[number], [logits] * 20, f"stream {number}")


def test_threads() -> None:
    model = make("llama", device="cuda")
    batches = [inputs("llama", n, 24, "cuda")["input_ids"] for n in (2, 5)]
    with torch.no_grad():
        expected = [model(it, use_cache=False).logits for it in batches]
    pack_module(model, min_bytes=0)
    torch.cuda.synchronize()
    wrong: list[BaseException] = []

    def work(number: int) -> None:
        try:
            with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(20):
                    logits = model(batches[number], use_cache=False).logits
                    torch.cuda.current_stream().synchronize()
                    assert_same_bits(logits, expected[number], f"thread {number}")
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[0]


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled(mode: str) -> None:
    model = make("llama", torch.float32, "cuda")
    model.config.num_hidden_layers = 1
    del model.model.layers[1:]
    took = inputs("llama", 2, 8, "cuda")["input_ids"]
    with torch.no_grad():
        expected = model(took, use_cache=False).logits
        pack_module(model, min_bytes=0)
        compiled = torch.compile(model, fullgraph=True, mode=None if mode == "default" else mode)
        for run in range(4):
            found = compiled(took, use_cache=False).logits.clone()
            worst = (found - expected).abs().max().item()
            assert worst < 1e-3, f"run {run}: logits differ by {worst}"
            assert torch.equal(found.argmax(-1), expected.argmax(-1)), f"run {run}: other tokens"
        assert_same_bits(model(took, use_cache=False).logits, expected, "eager, after compiled")
    torch._dynamo.reset()


def test_compiled_block_by_block() -> None:
    """From the second block on, the key is an input."""
    model = make("llama", torch.float32, "cuda")
    took = inputs("llama", 2, 8, "cuda")["input_ids"]
    with torch.no_grad():
        expected = model(took, use_cache=False).logits
        pack_module(model, min_bytes=0)
        for layer in model.model.layers:
            layer.compile(fullgraph=True)
        for run in range(4):
            found = model(took, use_cache=False).logits
            worst = (found - expected).abs().max().item()
            assert worst < 1e-3, f"run {run}: logits differ by {worst}"
    torch._dynamo.reset()


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


class Wide(nn.Module):
    """Blocks large enough that plain weights would show in the allocator's peak."""

    def __init__(self, blocks: int = 12, width: int = 2048) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False))
            for _ in range(blocks)
        )

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = x + block(x)
        return x


def _peak(run: Any) -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("how", ["eager", "graph", "compiled", "backward", "compiled backward"])
def test_memory(how: str) -> None:
    """Never more than the packed weights, a block, and what the plain model needs besides its weights."""
    torch.manual_seed(0)
    graph = torch.cuda.CUDAGraph()
    # The matrix library's workspaces, 32 MiB for each thread and for graphs, which plain models need, too.
    square = torch.ones(64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    (square @ square).sum().backward()
    if how == "graph":
        with torch.cuda.graph(torch.cuda.CUDAGraph()), torch.no_grad():
            square @ square
    gc.collect()
    before = torch.cuda.memory_allocated()  # those, and other tests' leftovers
    backward = how.endswith("backward")
    model = Wide().to("cuda", torch.bfloat16).requires_grad_(False)
    x = torch.randn(16, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=backward)

    def step(forward: Any) -> None:
        with torch.set_grad_enabled(backward):
            y = forward(x)
            if backward:
                y.float().square().mean().backward()
                x.grad = None

    step(model)
    plain = sum(p.numel() * 2 for p in model.parameters())
    torch.cuda.synchronize()
    other = _peak(lambda: step(model)) - torch.cuda.memory_allocated()  # activations
    pack_module(model)
    packed = sum(it.packed.packed_bytes for it in model.parameters() if isinstance(it, PackedParameter))
    block = 2 * 2048 * 2048 * 2
    forward: Any = model
    if how.startswith("compiled"):
        forward = torch.compile(model, fullgraph=True)
    if how == "graph":
        step(model)
        with torch.cuda.graph(graph), torch.no_grad():
            model(x)
        forward = lambda x: graph.replay()  # noqa: E731
    step(forward)
    step(forward)
    base = torch.cuda.memory_allocated() - packed - before
    peak = _peak(lambda: step(forward)) - before
    allowed = packed + block + other + plain * 3 // 100 + (8 << 20)
    assert peak <= allowed, (
        f"peak {peak >> 20} MiB, allowed {allowed >> 20} (plain {plain >> 20}, packed {packed >> 20}, block "
        f"{block >> 20}, activations {other >> 20}, held besides the packed weights {base >> 20})"
    )
    torch._dynamo.reset()


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


class _Reaches(nn.Module):
    """A block that calls something with its weight before it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.change = nn.Linear(256, 256), None

    def forward(self, x: Any) -> Any:
        if self.change is not None:
            with torch.no_grad():
                self.change(self.up.weight)
        return self.up(x)


@pytest.mark.parametrize("trained", [False, True])
def test_changes_in_a_forward_pass(trained: bool) -> None:
    torch.manual_seed(0)
    plain = nn.ModuleList([_Reaches()]).to("cuda", torch.bfloat16).requires_grad_(trained)
    block = pack_module(copy.deepcopy(plain), min_bytes=0)[0]
    x = torch.randn(3, 256, device="cuda", dtype=torch.bfloat16)
    for change in (
        lambda weight: weight.mul_(2),
        lambda weight: weight.data.mul_(2),
        lambda weight: weight.detach().mul_(2),
        lambda weight: weight.t()[3].zero_(),
        lambda weight: torch._foreach_mul_([weight.detach()], 2.0),
    ):
        block.change = change
        for gradients in (False, True):
            with torch.set_grad_enabled(gradients), pytest.raises(PackedWeight, match=r"`0\.up\.weight`"):
                block(x)
    block.change = None
    with torch.no_grad():
        for _ in range(3):
            assert_same_bits(block(x), plain[0](x))


def test_a_block_that_waits_for_another_thread() -> None:
    class Joins(_Reaches):
        def forward(self, x: Any) -> Any:
            found: list[Any] = []
            stream = torch.cuda.current_stream()

            def work() -> None:
                with torch.no_grad(), torch.cuda.stream(stream):
                    found.append(self.up(x))

            thread = threading.Thread(target=work, daemon=True)
            thread.start()
            thread.join(100)
            return found[0] + self.up(x)

    torch.manual_seed(0)
    plain = nn.ModuleList([Joins()]).to("cuda", torch.bfloat16)
    packed = pack_module(copy.deepcopy(plain), min_bytes=0)
    x = torch.randn(3, 256, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        assert_same_bits(packed[0](x), plain[0](x))


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
