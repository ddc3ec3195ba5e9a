"""Models built straight from packed files compute the plain models' bits."""

from __future__ import annotations

import gc
import json
import logging
import subprocess
import sys
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import Pair, checkpoint, write
from support.garbage import alive, uncollected
from support.models import CAUSAL, NAMES, VOCAB, assert_same_bits, inputs, make, outputs, torch

import tpde
import tpde.torch
from tpde import nn as packed_nn
from tpde.errors import (
    Corrupt,
    InvalidArgument,
    InvalidInput,
    NotPacked,
    Truncated,
    UnsupportedDevice,
    UnsupportedVersion,
)
from tpde.files.file_writer import FileWriter
from tpde.files.reader import PackedFile
from tpde.format.constants import SUFFIX

transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")


def _same(name: str, pair: Pair, batch: int = 2, **options: Any) -> Any:
    """Compare outputs, state, buffers and classes; gives the packed model."""
    plain = pair.kind.from_pretrained(pair.plain, **options)
    packed = tpde.from_pretrained(pair.packed, **options)
    assert type(packed) is type(plain)
    with torch.no_grad():
        assert_same_bits(outputs(name, packed, batch), outputs(name, plain, batch), name)
    expected, found = plain.state_dict(), packed_nn.plain_state_dict(packed)
    assert list(found) == list(expected)
    for key, value in expected.items():
        assert_same_bits(found[key], value, key)
    buffers = {key: value for key, value in packed.named_buffers() if not key.endswith(SUFFIX)}
    assert list(buffers) == [key for key, _ in plain.named_buffers()]
    for key, value in plain.named_buffers():
        assert_same_bits(buffers[key], value, key)
    assert not packed.training
    return packed


@pytest.mark.parametrize("name", NAMES)
def test_bits(name: str, tmp_path: Path) -> None:
    pair = checkpoint(tmp_path, name)
    packed = _same(name, pair)
    assert packed.hf_quantizer.decoded == 0
    with PackedFile(pair.packed / "model.safetensors") as file:
        names = {
            slot.packed.name for _, it in packed_nn.packed_modules(packed) for slot in it.tpde_slots.values()
        }
        assert names <= set(file.packed_names())
        parts = {
            source.name
            for _, it in packed_nn.packed_modules(packed)
            for slot in it.tpde_slots.values()
            for source in slot.packed.sources
        }
        assert parts == set(file.packed_names())  # every one, and nothing was decoded


@pytest.mark.parametrize("name", CAUSAL)
def test_generation(name: str, tmp_path: Path) -> None:
    pair = checkpoint(tmp_path, name)
    took = inputs(name, 2, 5)["input_ids"]
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = pair.kind.from_pretrained(pair.plain).generate(took, **options)
    assert torch.equal(tpde.from_pretrained(pair.packed).generate(took, **options), expected)


@pytest.mark.parametrize("name", ["qwen2", "mixtral", "t5"])
def test_sharded(name: str, tmp_path: Path) -> None:
    pair = checkpoint(tmp_path, name, max_shard_size="120KB")
    assert len(list(pair.packed.glob("*.safetensors"))) > 1
    _same(name, pair)


def test_experts_are_many_parts_of_one_weight(tmp_path: Path) -> None:
    packed = tpde.from_pretrained(checkpoint(tmp_path, "mixtral").packed)
    experts = packed.model.layers[0].mlp.experts
    names = [it.name.rpartition("experts.")[2] for it in experts.gate_up_proj.packed.sources]
    assert names == [f"{i}.{w}.weight" for i in range(4) for w in ("w1", "w3")]
    assert len(experts.down_proj.packed.sources) == 4


def test_tied_weights_are_there_once(tmp_path: Path) -> None:
    packed = tpde.from_pretrained(checkpoint(tmp_path, "t5").packed)
    modules = [packed.shared, packed.encoder.embed_tokens, packed.decoder.embed_tokens, packed.lm_head]
    assert len({id(module.weight) for module in modules}) == 1
    packed.tie_weights()  # as some code does again later
    assert len({id(module.weight) for module in modules}) == 1


def test_tied_by_the_model_but_not_by_the_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = make("qwen2")
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight) * 0.02)
    model.config.tie_word_embeddings = False
    pair = write(tmp_path, model)
    for folder in (pair.plain, pair.packed):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    with caplog.at_level(logging.INFO, "tpde"):
        _same("qwen2", pair)
    assert "are not tied" in caplog.text


def test_the_same_weight_twice_in_the_files_is_tied(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    pair = checkpoint(tmp_path, "qwen2")
    state = load_file(pair.plain / "model.safetensors")
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    save_file(state, pair.plain / "model.safetensors", {"format": "pt"})
    tpde.pack(pair.plain, pair.packed, force=True)
    packed = _same("qwen2", pair)
    assert packed.lm_head.weight is packed.model.embed_tokens.weight


def test_a_head_that_the_files_lack_is_initialised(tmp_path: Path) -> None:
    pair = checkpoint(tmp_path, "bert")
    kind = transformers.BertForSequenceClassification
    torch.manual_seed(1)
    plain = kind.from_pretrained(pair.plain)
    torch.manual_seed(1)
    packed = tpde.from_pretrained(pair.packed, model_class=kind)
    with torch.no_grad():
        assert_same_bits(packed(**inputs("bert", 2, 7)).logits, plain(**inputs("bert", 2, 7)).logits)


def test_a_base_model_from_a_larger_one(tmp_path: Path) -> None:
    pair = checkpoint(tmp_path, "llama")
    plain = transformers.AutoModel.from_pretrained(pair.plain)
    packed = tpde.from_pretrained(pair.packed, model_class=transformers.AutoModel)
    with torch.no_grad():
        took = inputs("llama", 2, 7)
        assert_same_bits(packed(**took).last_hidden_state, plain(**took).last_hidden_state)


def test_dtype_of_a_config_that_names_none(tmp_path: Path) -> None:
    pair = checkpoint(tmp_path, "gpt2", torch.float16)
    for folder in (pair.plain, pair.packed):
        config = json.loads((folder / "config.json").read_text())
        config.pop("dtype")
        (folder / "config.json").write_text(json.dumps(config))
    packed = _same("gpt2", pair)
    assert packed.dtype is torch.float16
    assert packed.hf_quantizer.decoded == 0


def test_another_dtype_decodes_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pair = checkpoint(tmp_path, "mixtral")
    with caplog.at_level(logging.INFO, "tpde"):
        packed = _same("mixtral", pair, dtype=torch.float32)
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
            packed = _same("llama", pair)
        packed.save_pretrained(tmp_path / "again")
        _same("llama", Pair(pair.plain, tmp_path / "again", pair.kind))
        again = tpde.pack_module(pair.kind.from_pretrained(pair.plain))  # what was cut is packed here
        again.save_pretrained(tmp_path / "packed here")
        _same("llama", Pair(pair.plain, tmp_path / "packed here", pair.kind))
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


def test_zstd_blobs(tmp_path: Path) -> None:
    pair = checkpoint(tmp_path, "llama")
    tpde.pack(pair.plain, pair.packed, codec="zstd", force=True)
    _same("llama", pair)


def test_a_plain_directory(tmp_path: Path) -> None:
    pair = checkpoint(tmp_path, "llama")
    with pytest.raises(NotPacked, match="tpde pack"):
        tpde.from_pretrained(pair.plain)
    with pytest.raises(InvalidInput, match="does not exist"):
        tpde.from_pretrained(tmp_path / "nowhere" / "at all")
    with pytest.raises(InvalidInput, match="is a file"):
        tpde.from_pretrained(pair.packed / "model.safetensors")
    (pair.packed / "config.json").unlink()
    with pytest.raises(InvalidInput, match=r"no `config\.json`"):
        tpde.from_pretrained(pair.packed)


def test_a_config_that_lies(tmp_path: Path) -> None:
    pair = checkpoint(tmp_path, "llama")
    (pair.packed / "model.safetensors").write_bytes((pair.plain / "model.safetensors").read_bytes())
    with pytest.raises(NotPacked, match="no tensor"):
        tpde.from_pretrained(pair.packed)
    config = json.loads((pair.packed / "config.json").read_text())
    config["quantization_config"]["version"] = 9
    (pair.packed / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedVersion, match="version 9"):
        tpde.from_pretrained(pair.packed)
    config["quantization_config"] = {"quant_method": "tpde", "version": 1, "source": {"quant_method": "fp8"}}
    (pair.packed / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidInput, match="quantized with `fp8`"):
        tpde.from_pretrained(pair.packed)
    config["quantization_config"].pop("source")
    (pair.packed / "config.json").write_text(json.dumps(config | {"architectures": ["NoSuchModel"]}))
    with pytest.raises(InvalidInput, match="model_class"):
        tpde.from_pretrained(pair.packed)


@pytest.mark.parametrize("name", ["model.safetensors", "model-00002-of-*.safetensors"])
def test_a_weight_file_is_missing(name: str, tmp_path: Path) -> None:
    pair = checkpoint(tmp_path, "llama", **({"max_shard_size": "100KB"} if "*" in name else {}))
    (gone,) = pair.packed.glob(name)
    gone.unlink()
    with pytest.raises(InvalidInput, match=rf"{gone.name}` does not exist, so that weights are missing"):
        tpde.from_pretrained(pair.packed)


def test_another_shape(tmp_path: Path) -> None:
    pair = checkpoint(tmp_path, "llama")
    config = json.loads((pair.packed / "config.json").read_text())
    (pair.packed / "config.json").write_text(json.dumps(config | {"vocab_size": VOCAB + 1}))
    with pytest.raises(InvalidInput, match=rf"shape \[{VOCAB}, 64\].*needs \[{VOCAB + 1}, 64\]"):
        tpde.from_pretrained(pair.packed)


def _blob(path: Path, name: str) -> tuple[int, int, int]:
    """Where a blob lies in a file: its start, its first chunk, its end."""
    with PackedFile(path) as file:
        entry = file.container.entries[name + SUFFIX]
        header = file.tensor(name).blob.header
        start = file.container.data_start + entry.begin
        return start, start + header.chunks_at, start + header.blob_bytes


@pytest.mark.parametrize("where", ["header", "tables", "chunks"])
def test_damage(where: str, tmp_path: Path) -> None:
    path = checkpoint(tmp_path, "llama").packed / "model.safetensors"
    name = "model.layers.1.mlp.up_proj.weight"
    start, chunks, end = _blob(path, name)
    at = {"header": start + 70, "tables": chunks - 40, "chunks": (chunks + end) // 2}[where]
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)
    if where != "chunks":  # noticed while loading
        with pytest.raises(Corrupt, match=r"layers\.1\.mlp\.up_proj"):
            tpde.from_pretrained(path.parent)
        return
    packed = tpde.from_pretrained(path.parent)
    with torch.no_grad(), pytest.raises(Corrupt) as caught:
        packed(**inputs("llama", 1, 4))
    assert (caught.value.tensor, caught.value.chunk) == (name, 0)


def test_a_file_that_ends_early(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, "llama").packed / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(Truncated):
        tpde.from_pretrained(path.parent)


def test_devices(tmp_path: Path) -> None:
    packed = checkpoint(tmp_path, "llama").packed
    with pytest.raises(UnsupportedDevice, match="not on `meta`"):
        tpde.from_pretrained(packed, "meta")
    with pytest.raises(UnsupportedDevice, match="is no device"):
        tpde.from_pretrained(packed, "gpu")
    with pytest.raises(InvalidInput, match="one of them"):
        tpde.from_pretrained(packed, "cpu", device_map={"": "cpu"})
    if not torch.cuda.is_available():
        with pytest.raises(UnsupportedDevice, match=r'device="cpu"`.*tpde doctor'):
            tpde.from_pretrained(packed, "cuda")


def test_keywords_that_nobody_knows(tmp_path: Path) -> None:
    packed = checkpoint(tmp_path, "llama").packed
    for name, meant in (("kernel", "kernels"), ("delta", "deltas"), ("maxtokens", "max_tokens")):
        with pytest.raises(InvalidArgument, match=rf"takes `{name}`; did you mean `{meant}`") as caught:
            tpde.from_pretrained(packed, "cpu", **{name: "x"})
        assert caught.value.where == name
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        tpde.from_pretrained(packed, "cpu", colour="x")
    assert not tpde.from_pretrained(packed, "cpu", use_cache=False).config.use_cache  # of the configuration


def test_a_transformers_too_old_or_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from tpde.errors import MissingDependency
    from tpde.integrations.transformers.require import require_transformers

    for version in ("4.57.1", "5.12.1", "5.9", "unknown"):
        monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
        with pytest.raises(MissingDependency, match=rf"{version} is too old, 5\.13 .*pip install --upgrade"):
            require_transformers()
    for version in ("5.13.0", "5.23.0.dev0", "6.0"):
        monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
        require_transformers()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingDependency, match=r'pip install "tpde\[transformers\]"'):
        require_transformers()


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("tpde.pack_module", "`tpde.pack_module` needs torch"),
        ("tpde.unpack_module", "`tpde.unpack_module` needs torch"),
        ("tpde.apply_delta", "`tpde.apply_delta` needs torch"),
        ("tpde.make_delta", "`tpde.make_delta` needs torch"),
        ("tpde.from_pretrained", "running models needs torch"),
        ("import tpde.nn", "`tpde.nn` needs torch"),
        ("tpde.nn", "`tpde.nn` needs torch"),
        ("import tpde.integrations.diffusers", "`tpde.integrations.diffusers` needs torch"),
        ("tpde.safe_open(sys.argv[1]).get_tensor('a')", "a PyTorch tensor needs torch"),
    ],
)
def test_what_needs_torch_says_how_to_install_it(code: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    tpde.torch.save_file({"a": torch.ones(3)}, path)
    script = f"""
import sys
sys.modules["torch"] = None  # importing it fails
import tpde, tpde.errors
try:
    {code}
except tpde.errors.MissingDependency as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, check=True)
    assert said in run.stdout
    assert 'pip install "tpde[' in run.stdout


def test_importing_tpde_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, tpde; dir(tpde); sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_modules_are_there_by_their_names_once_they_are_used() -> None:
    code = """
import sys, tpde
assert not {"numpy", "torch"} & set(sys.modules)
assert tpde.numpy.save_file and "torch" not in sys.modules
assert tpde.torch.save and tpde.nn.add_deltas and tpde.errors.NativeError
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_public_names_are_there_and_no_others() -> None:
    assert dir(tpde) == sorted(tpde.__all__)
    for name in tpde.__all__:
        assert getattr(tpde, name).__doc__
    with pytest.raises(AttributeError, match="module `tpde` has no attribute `unpakc`"):
        tpde.unpakc  # noqa: B018


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
        packed = _same("mixtral", pair)
    assert packed.hf_quantizer.decoded == 7
    assert f"7 of {count} packed tensors" in caplog.text
    _, info = pair.kind.from_pretrained(pair.packed, output_loading_info=True)
    assert not info["unexpected_keys"]
    assert not info["missing_keys"]
    packed.save_pretrained(tmp_path / "again")
    _same("mixtral", Pair(pair.plain, tmp_path / "again", pair.kind))


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("error", [None, OSError("nothing there")])
def test_no_pass_over_all_objects(error: OSError | None, enabled: bool, tmp_path: Path) -> None:
    """Garbage is not collected while a model is loaded, and then again as before, whatever happened."""
    pair = checkpoint(tmp_path, "llama")
    seen = []

    class Kind:
        @staticmethod
        def from_pretrained(*args: Any, **options: Any) -> Any:
            seen.append(gc.isenabled())
            if error is not None:
                raise error
            return pair.kind.from_pretrained(*args, **options)

    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with nullcontext() if error is None else pytest.raises(OSError, match="nothing there"):
            tpde.from_pretrained(pair.packed, model_class=Kind)
        assert (seen, gc.isenabled()) == ([False], enabled)
    finally:
        (gc.enable if before else gc.disable)()


@pytest.mark.parametrize("hooks", [False, True])
def test_before_the_next_load_garbage_is_collected_where_accelerate_has_put_hooks(
    hooks: bool, tmp_path: Path
) -> None:
    """They are in cycles with the model: nobody is told when it is dropped."""
    hooked = pytest.importorskip("accelerate.hooks", reason="needs accelerate")
    pair = checkpoint(tmp_path, "llama")

    class Cycle:
        def __init__(self) -> None:
            self.own = self

    class Kind:
        @staticmethod
        def from_pretrained(*args: Any, **options: Any) -> Any:
            made = pair.kind.from_pretrained(*args, **options)
            return hooked.add_hook_to_module(made, hooked.ModelHook()) if hooks else made

    thresholds = gc.get_threshold()
    gc.set_threshold(1 << 30)  # by itself, it begins no more
    try:
        tpde.from_pretrained(pair.packed, model_class=pair.kind)  # what other tests have left is collected
        tpde.from_pretrained(pair.packed, model_class=Kind)
        gone = weakref.ref(Cycle())
        tpde.from_pretrained(pair.packed, model_class=pair.kind)
        assert (gone() is None) == hooks
    finally:
        gc.set_threshold(*thresholds)


def test_a_model_that_is_dropped_is_freed_at_once(tmp_path: Path) -> None:
    pair = checkpoint(tmp_path, "llama")
    model = tpde.from_pretrained(pair.packed)
    with torch.no_grad():
        outputs("llama", model, 2)
    refs = [weakref.ref(it) for it in (*model.modules(), *model.buffers())]
    with uncollected():
        del model
        assert alive(refs) == []
