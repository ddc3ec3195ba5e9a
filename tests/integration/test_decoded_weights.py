"""Packed tensors that loading decodes: another dtype, conversions, modules that cannot hold them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import Pair, checkpoint, same_model, write
from support.models import assert_same_bits, make, torch

import tpde
from tpde import nn as packed_nn
from tpde.files.file_writer import FileWriter
from tpde.files.reader import PackedFile

transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")


def test_another_dtype_decodes_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pair = checkpoint(tmp_path, "mixtral")
    with caplog.at_level(logging.INFO, "tpde"):
        packed = same_model("mixtral", pair, dtype=torch.float32)
    assert not list(packed_nn.packed_modules(packed))
    assert "is stored as torch.bfloat16 and loaded as torch.float32" in caplog.text
    with PackedFile(pair.packed / "model.safetensors") as file:
        count = len(file.packed_names())
    assert packed.hf_quantizer.decoded == count
    assert f"{count} of {count} packed tensors" in caplog.text


def _cut(core: Any) -> tuple[Any, Callable[[dict[str, Any], str], None]]:
    """Query, key and value are one tensor of the checkpoint."""

    def fuse(state: dict[str, Any], prefix: str) -> None:
        parts = [state.pop(f"{prefix}self_attn.{n}_proj.weight") for n in "qkv"]
        state[prefix + "self_attn.qkv.weight"] = torch.cat(parts)

    targets = [f"self_attn.{n}_proj.weight" for n in "qkv"]
    return core.WeightConverter("self_attn.qkv.weight", targets, operations=[core.Chunk(dim=0)]), fuse


def _interleaved(core: Any) -> tuple[Any, Callable[[dict[str, Any], str], None]]:
    """So are gate and up, a row of one and a row of the other in turn."""

    def fuse(state: dict[str, Any], prefix: str) -> None:
        parts = [state.pop(f"{prefix}mlp.{n}_proj.weight") for n in ("gate", "up")]
        state[prefix + "mlp.gu.weight"] = torch.stack(parts, dim=1).flatten(0, 1)

    targets = ["mlp.gate_proj.weight", "mlp.up_proj.weight"]
    operations = [core.Interleave(dim=0), core.Chunk(dim=0)]
    return core.WeightConverter("mlp.gu.weight", targets, operations=operations), fuse


def _transposed(core: Any) -> tuple[Any, Callable[[dict[str, Any], str], None]]:
    """A matrix lies the other way around."""

    def fuse(state: dict[str, Any], prefix: str) -> None:
        state[prefix + "mlp.turned.weight"] = state.pop(f"{prefix}mlp.down_proj.weight").T.contiguous()

    operations = [core.Transpose(0, 1)]
    return core.WeightConverter("mlp.turned.weight", "mlp.down_proj.weight", operations=operations), fuse


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("conversion", "said"),
    [(_cut, "is cut by"), (_interleaved, "needs the plain weight"), (_transposed, "needs the plain weight")],
)
def test_a_conversion_that_moves_bytes_decodes(
    conversion: Any, said: str, dtype: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Loading converts as transformers would, and saving undoes it."""
    core = pytest.importorskip("transformers.core_model_loading")
    mapping = pytest.importorskip("transformers.conversion_mapping")
    from safetensors.torch import load_file, save_file

    model = make("llama")
    model.config.num_key_value_heads = 4
    model = transformers.LlamaForCausalLM(model.config).to(dtype).eval()
    pair = write(tmp_path, model)
    state, (converter, fuse) = load_file(pair.plain / "model.safetensors"), conversion(core)
    for i in range(3):
        fuse(state, f"model.layers.{i}.")
    save_file(state, pair.plain / "model.safetensors", {"format": "pt"})
    tpde.pack(pair.plain, pair.packed, force=True)
    before = mapping.get_checkpoint_conversion_mapping("llama")
    mapping.register_checkpoint_conversion_mapping("llama", [converter], overwrite=True)
    try:
        with caplog.at_level(logging.INFO, "tpde"):
            packed = same_model("llama", pair)
        packed.save_pretrained(tmp_path / "again")
        same_model("llama", Pair(pair.plain, tmp_path / "again", pair.kind))
        again = tpde.pack_module(pair.kind.from_pretrained(pair.plain))  # what was cut is packed here
        again.save_pretrained(tmp_path / "packed here")
        same_model("llama", Pair(pair.plain, tmp_path / "packed here", pair.kind))
    finally:
        mapping.register_checkpoint_conversion_mapping("llama", before or [], overwrite=True)
    assert packed.hf_quantizer.decoded == 3
    assert said in caplog.text
    tpde.unpack(tmp_path / "packed here", tmp_path / "restored")
    restored = load_file(tmp_path / "restored" / "model.safetensors")
    assert set(restored) == set(state)
    for name, value in state.items():
        assert_same_bits(restored[name], value, name)


def test_a_module_that_cannot_be_packed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Odd(transformers.LlamaForCausalLM):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.table = torch.nn.Parameter(torch.empty(256, 64))
            self.post_init()

        def _init_weights(self, module: Any) -> None:
            super()._init_weights(module)

    torch.manual_seed(0)
    model = Odd(make("llama").config).to(torch.bfloat16)
    model.table.data.normal_(std=0.02)
    pair = write(tmp_path, model)
    with caplog.at_level(logging.INFO, "tpde"):
        packed = tpde.from_pretrained(pair.packed, model_class=Odd)
    assert "1 of 24 packed tensors (32768 bytes)" in caplog.text
    assert "belongs to a Odd, which cannot hold packed weights: `table`" in caplog.text
    assert packed.hf_quantizer.decoded == 1
    assert_same_bits(packed.table, model.table)


def test_experts_some_of_which_are_plain(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fused weight of which one part did not shrink is decoded, the other fused weights are not."""
    plain = "model.layers.0.block_sparse_moe.experts.1.w1.weight"
    may_pack = FileWriter.may_pack
    monkeypatch.setattr(FileWriter, "may_pack", lambda self, name: name != plain and may_pack(self, name))
    pair = checkpoint(tmp_path, "mixtral")
    monkeypatch.undo()
    with PackedFile(pair.packed / "model.safetensors") as file:
        assert plain not in file.packed_names()
        count = len(file.packed_names())
    with caplog.at_level(logging.INFO, "tpde"):
        packed = same_model("mixtral", pair)
    assert packed.hf_quantizer.decoded == 7
    assert f"7 of {count} packed tensors" in caplog.text
    _, info = pair.kind.from_pretrained(pair.packed, output_loading_info=True)
    assert not info["unexpected_keys"]
    assert not info["missing_keys"]
    packed.save_pretrained(tmp_path / "again")
    same_model("mixtral", Pair(pair.plain, tmp_path / "again", pair.kind))
