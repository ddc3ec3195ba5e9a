"""vLLM with packed weights generates what plain vLLM does, bit by bit on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.vllm import Generated, close, engine, generate, generated, kernels, layers

pytest.importorskip("vllm.version", reason="vLLM is not installed: `make test-vllm` runs these")

Models = dict[str, Path]
TPDE = {"quantization": "tpde"}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "as it comes": ("", TPDE),
    "as it comes, exact": ("", kernels("exact")),
    "packed files": ("-packed", {}),
    "packed files, exact": ("-packed", kernels("exact")),
}


@pytest.fixture(scope="session")
def plain(models: Models) -> dict[str, list[Generated]]:
    return {name: generated(models[name]) for name in ("llama", "tied", "experts")}


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[] if "exact" in way else pytest.mark.quick) for way in WAYS]
)
@pytest.mark.parametrize("name", ["llama", "tied", "experts"])
def test_tokens_and_probabilities(
    models: Models, plain: dict[str, list[Generated]], name: str, way: str
) -> None:
    suffix, options = WAYS[way]
    assert generated(models[name + suffix], **options) == plain[name]
    assert len({tuple(it.tokens) for it in plain[name]}) == len(plain[name])


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_other_dtypes(models: Models, dtype: str) -> None:
    """The weights are cast before they are packed."""
    wanted = generated(models["llama"], dtype=dtype)
    assert generated(models["llama-packed"], dtype=dtype) == wanted


@pytest.mark.parametrize("load_format", ["auto", "hf", "safetensors", "tpde"])
def test_load_format(models: Models, plain: dict[str, list[Generated]], load_format: str) -> None:
    assert generated(models["llama-packed"], load_format=load_format) == plain["llama"]
    assert generated(models["llama"], load_format=load_format, **TPDE) == plain["llama"]


def test_dummy_weights(models: Models) -> None:
    found = generated(models["llama"], load_format="dummy", **TPDE)
    assert found == generated(models["llama"], load_format="dummy")


def test_layers_hold_packed_weights(models: Models) -> None:
    import torch

    from tpde.torch import load_file

    files = load_file(models["llama-packed"] / "model.safetensors")
    for how in ("fused", "exact"):
        llm = engine(models["llama"], **kernels(how))
        found = layers(llm)
        for name, parts in {
            "model.layers.1.self_attn.qkv_proj": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
            "model.layers.1.mlp.gate_up_proj": ["mlp.gate_proj", "mlp.up_proj"],
            "model.layers.1.mlp.down_proj": ["mlp.down_proj"],
        }.items():
            layer = found[name]
            assert layer.weight.data.dtype is torch.uint8
            assert layer.weight.dtype is torch.bfloat16, "some models cast to it"
            wanted = torch.cat([files[f"model.layers.1.{part}.weight"] for part in parts])
            assert layer.weight.nbytes < 0.72 * wanted.nbytes
            assert torch.equal(layer.tpde.packed.decoded().view(torch.int16), wanted.view(torch.int16))
            assert layer.tpde.packed.multiplies == (how == "fused")
        close(llm)


def test_experts_that_are_used_are_decoded(models: Models) -> None:
    import torch

    llm = engine(models["experts"], **TPDE)
    name = next(it for it, layer in layers(llm).items() if type(layer).__name__ == "RoutedExperts")
    stacks = layers(llm)[name].quant_method._stacks
    assert set(stacks) == {"w13_weight", "w2_weight"}
    for stack in stacks.values():
        everything = stack.decoded(None).view(torch.int16)
        some = stack.decoded([1, 2, 5]).view(torch.int16)
        assert len(everything) == 8
        for expert in (1, 2, 5):
            assert torch.equal(everything[expert], some[expert])
    close(llm)


def test_a_head_of_its_own(tmp_path: Path) -> None:
    """`config.json` says that the head is tied, the packed files have another one."""
    import json

    from support.vllm import save_llama

    import tpde

    at = save_llama(tmp_path / "plain")
    config = json.loads((at / "config.json").read_text())
    (at / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    tpde.pack(at, tmp_path / "packed")
    assert generated(tmp_path / "packed") == generated(at)


@pytest.mark.quick
def test_kernels_are_compiled_while_weights_are_read(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of each linear layer, the head and the embedding, where they are to be."""
    import torch

    from tpde.cuda import window_products
    from tpde.integrations.vllm import internals, linear_method, weights

    begun: set[tuple[int, ...]] = set()
    when_first_packed: list[set[tuple[int, ...]]] = []

    def hold(*args: Any, **options: Any) -> Any:
        when_first_packed.append(set(begun))
        return weights.hold(*args, **options)

    monkeypatch.setattr(window_products, "compile_ahead", lambda *shape: begun.add(shape))
    monkeypatch.setattr(internals, "load_device", lambda: torch.device("cuda", 3))
    monkeypatch.setattr(internals, "takes_all_weights", lambda: False)  # there is no such device
    monkeypatch.setattr(linear_method, "hold", hold)
    close(engine(models["llama"], **TPDE))
    shapes = {(512, 256), (256, 256), (1024, 256), (256, 512)}  # qkv and both of tokens, o, gate and up, down
    assert when_first_packed[0] == {(*it, 3) for it in shapes}


def test_kernels_of_experts_are_compiled_while_weights_are_read(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from tpde.cuda import window_experts, window_products
    from tpde.integrations.vllm import internals

    begun: set[tuple[int, ...]] = set()
    monkeypatch.setattr(window_products, "compile_ahead", lambda *shape: None)
    monkeypatch.setattr(window_experts, "compile_ahead", lambda *shape: begun.add(shape))
    monkeypatch.setattr(internals, "load_device", lambda: torch.device("cuda", 3))
    monkeypatch.setattr(internals, "takes_all_weights", lambda: False)  # there is no such device
    close(engine(models["experts"], **TPDE))
    assert begun == {(8, 384, 128, 3), (8, 128, 192, 3)}


@pytest.mark.parametrize("name", ["llama", "experts"])
def test_kernels_that_decode_are_compiled_while_weights_are_read(
    models: Models, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """With exact kernels; where nothing is to be on a GPU, none are."""
    import torch

    from tpde.cuda import prefix_kernels
    from tpde.integrations.vllm import internals

    begun: list[tuple[str, int, bool]] = []

    def begin(dtype: str, device: int, *, packing: bool) -> None:
        begun.append((dtype, device, packing))

    monkeypatch.setattr(prefix_kernels, "compile_ahead", begin)
    close(engine(models[name], **kernels("exact")))
    assert not begun
    monkeypatch.setattr(internals, "load_device", lambda: torch.device("cuda", 3))
    monkeypatch.setattr(internals, "takes_all_weights", lambda: False)  # there is no such device
    close(engine(models[name], **kernels("exact")))
    assert set(begun) == {("BF16", 3, True)}
    assert len(begun) > 4


def test_layers_that_stay_plain(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """They run beside packed ones."""
    from tpde.integrations.vllm import linear_method, weights

    def some(report: Any, plain: Any, name: str, **options: Any) -> Any:
        return None if "layers.0" in name else weights.hold(report, plain, name, **options)

    wanted = generated(models["llama"])
    monkeypatch.setattr(linear_method, "hold", some)
    llm = engine(models["llama"], **TPDE)
    assert layers(llm)["model.layers.0.mlp.down_proj"].tpde.packed is None
    assert layers(llm)["model.layers.1.mlp.down_proj"].tpde.packed is not None
    found = generate(llm)
    close(llm)
    assert found == wanted
