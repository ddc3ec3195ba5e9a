"""Plain model directories, loaded packed: what a model from packed files is, without the files."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import Pair, checkpoint
from support.commands import invoke
from support.models import NAMES, assert_same_bits, outputs, torch

import tpde
from tpde.errors import InvalidInput, NotPacked, Truncated
from tpde.loading import checkpoint_files as checkpoint_module
from tpde.loading.reading import read_in_turn
from tpde.nn import packed_modules

transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return checkpoint(tmp_path_factory.mktemp("llama"), "llama")


def weights(model: Any) -> dict[str, list[str]]:
    """Names of packed weights by module, and how they are."""
    return {
        f"{path}.{name}": [type(source).__name__ for source in slot.packed.sources]
        for path, module in packed_modules(model)
        for name, slot in module.tpde_slots.items()
    }


def packed_tensors(model: Any) -> list[Any]:
    return [slot.packed for _, it in packed_modules(model) for slot in it.tpde_slots.values()]


@pytest.mark.parametrize("kernels", ["exact", "fused"])
@pytest.mark.parametrize("name", NAMES)
def test_every_architecture(name: str, kernels: Any, tmp_path: Path) -> None:
    pair = checkpoint(tmp_path, name)
    plain = pair.kind.from_pretrained(pair.plain, dtype="auto")
    packed = tpde.from_pretrained(pair.packed, kernels=kernels)
    model = tpde.from_pretrained(pair.plain, pack=True, kernels=kernels)
    assert weights(model) == weights(packed)
    with torch.no_grad():
        assert_same_bits(outputs(name, model, 2), outputs(name, plain, 2))
    model.save_pretrained(tmp_path / "saved")
    tpde.verify(tmp_path / "saved")
    again = tpde.from_pretrained(tmp_path / "saved", kernels=kernels)
    assert weights(again).keys() == weights(model).keys()
    with torch.no_grad():
        assert_same_bits(outputs(name, again, 2), outputs(name, plain, 2))
    tpde.unpack_module(model)
    for key, tensor in plain.state_dict().items():
        assert_same_bits(model.state_dict()[key], tensor)


def test_a_few_at_a_time(llama: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more plain bytes are read than the limit says, or one tensor has."""
    limit = 20 << 10
    read: list[int] = []
    monkeypatch.setattr(checkpoint_module, "GROUP_BYTES", limit)

    def in_turn(groups: Any, *args: Any) -> None:
        listed = [list(group) for group in groups]
        read.extend(sum(it.size for it in group) for group in listed if len(group) > 1)
        read_in_turn(listed, *args)

    monkeypatch.setattr(checkpoint_module, "read_in_turn", in_turn)
    plain = llama.kind.from_pretrained(llama.plain, dtype="auto")
    for kernels in ("exact", "fused"):
        read.clear()
        model = tpde.from_pretrained(llama.plain, pack=True, kernels=kernels)
        assert len(read) > 1
        assert max(read) <= limit
        with torch.no_grad():
            assert_same_bits(outputs("llama", model, 1), outputs("llama", plain, 1))


def test_ties_are_kept(tmp_path: Path) -> None:
    pair = checkpoint(tmp_path, "qwen2")
    model = tpde.from_pretrained(pair.plain, pack=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_shards_and_other_dtypes_of_the_files(tmp_path: Path) -> None:
    pair = checkpoint(tmp_path, "llama", torch.float32, max_shard_size="60KB")
    assert len(list(pair.plain.glob("*.safetensors"))) > 2
    # Copied, so that each weight starts at a multiple of 64 bytes: last bits of products depend on it.
    plain = copy.deepcopy(pair.kind.from_pretrained(pair.plain))
    model = tpde.from_pretrained(pair.plain, pack=True)
    assert weights(model)
    with torch.no_grad():
        assert_same_bits(outputs("llama", model, 1), outputs("llama", plain, 1))


def spoil(weight: Any) -> None:
    """Fill a weight with any finite values, which do not shrink."""
    bits = torch.randint(-(1 << 15), 1 << 15, weight.shape, dtype=torch.int16)
    with torch.no_grad():
        weight.copy_(bits.view(torch.bfloat16).nan_to_num_(0, 0, 0))


def test_what_does_not_shrink_stays_plain(tmp_path: Path) -> None:
    """As `tpde pack` leaves it."""
    pair = checkpoint(tmp_path, "llama")
    plain = pair.kind.from_pretrained(pair.plain, dtype="auto")
    spoil(plain.lm_head.weight)
    with torch.no_grad():
        plain.model.layers[0].mlp.up_proj.weight.fill_(0.5)
    plain.save_pretrained(tmp_path / "odd")
    tpde.pack(tmp_path / "odd", tmp_path / "odd packed")
    expected = weights(tpde.from_pretrained(tmp_path / "odd packed")).keys()
    for kernels in ("exact", "fused"):
        model = tpde.from_pretrained(tmp_path / "odd", pack=True, kernels=kernels)
        assert type(model.lm_head) is torch.nn.Linear
        assert weights(model).keys() == expected
        assert all(it.packed_bytes < it.nbytes for it in packed_tensors(model))
        with torch.no_grad():
            assert_same_bits(outputs("llama", model, 1), outputs("llama", plain, 1))
        model.save_pretrained(tmp_path / f"{kernels} saved")
        tpde.verify(tmp_path / f"{kernels} saved")
        again = tpde.from_pretrained(tmp_path / f"{kernels} saved")
        assert_same_bits(again.state_dict()["lm_head.weight"], plain.lm_head.weight)


def test_what_a_header_makes_larger_stays_plain(tmp_path: Path) -> None:
    """Keys and values of a tiny model in fp16, of 4 KiB."""
    pair = checkpoint(tmp_path, "llama", torch.float16)
    model = tpde.from_pretrained(pair.plain, pack=True)
    assert type(model.model.layers[0].self_attn.k_proj) is torch.nn.Linear
    assert weights(model) == weights(tpde.from_pretrained(pair.packed))


def test_what_does_not_shrink_stays_tied(tmp_path: Path) -> None:
    pair = checkpoint(tmp_path, "qwen2")
    plain = pair.kind.from_pretrained(pair.plain, dtype="auto")
    spoil(plain.lm_head.weight)
    plain.save_pretrained(tmp_path / "odd")
    model = tpde.from_pretrained(tmp_path / "odd", pack=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert type(model.lm_head) is torch.nn.Linear
    assert weights(model)
    with torch.no_grad():
        assert_same_bits(outputs("qwen2", model, 1), outputs("qwen2", plain, 1))


def test_some_experts_that_do_not_shrink_stay_with_the_others(tmp_path: Path) -> None:
    """They are one weight, which is smaller packed; one of which none shrinks stays plain."""
    pair = checkpoint(tmp_path, "mixtral")
    plain = pair.kind.from_pretrained(pair.plain, dtype="auto")
    first, second = (layer.mlp.experts for layer in plain.model.layers)
    spoil(first.down_proj[0])
    spoil(second.down_proj)
    plain.save_pretrained(tmp_path / "odd")
    model = tpde.from_pretrained(tmp_path / "odd", pack=True)
    names = weights(model)
    assert "model.layers.0.mlp.experts.down_proj" in names
    assert "model.layers.1.mlp.experts.down_proj" not in names
    assert "model.layers.1.mlp.experts.gate_up_proj" in names
    with torch.no_grad():
        assert_same_bits(outputs("mixtral", model, 1), outputs("mixtral", plain, 1))


def test_another_dtype_is_left_plain_and_said(llama: Pair, caplog: pytest.LogCaptureFixture) -> None:
    plain = llama.kind.from_pretrained(llama.plain, dtype=torch.float32)
    with caplog.at_level(logging.INFO, "tpde"):
        model = tpde.from_pretrained(llama.plain, pack=True, dtype=torch.float32)
    assert not weights(model)
    assert "is stored as torch.bfloat16 and loaded as torch.float32" in caplog.text
    with torch.no_grad():
        assert_same_bits(outputs("llama", model, 1), outputs("llama", plain, 1))


def test_packed_files_need_nothing_of_it(llama: Pair) -> None:
    model, packed = tpde.from_pretrained(llama.packed, pack=True), tpde.from_pretrained(llama.packed)
    assert weights(model) == weights(packed)
    with torch.no_grad():
        assert_same_bits(outputs("llama", model, 1), outputs("llama", packed, 1))


def test_a_configuration_of_ones_own(llama: Pair) -> None:
    config = transformers.AutoConfig.from_pretrained(llama.plain)
    model = tpde.from_pretrained(llama.plain, pack=True, config=config)
    assert weights(model)
    assert getattr(config, "quantization_config", None) is None


def test_sources_are_left_alone(llama: Pair) -> None:
    before = {it.name: it.read_bytes() for it in llama.plain.iterdir()}
    model = tpde.from_pretrained(llama.plain, pack=True, device_map={"": "cpu"}, attn_implementation="eager")
    assert weights(model)
    assert {it.name: it.read_bytes() for it in llama.plain.iterdir()} == before


def test_refusals(llama: Pair, tmp_path: Path) -> None:
    with pytest.raises(NotPacked, match="is not packed") as found:
        tpde.from_pretrained(llama.plain)
    assert "pack=True" in str(found.value.hint)
    for options in ({"vram": "1GiB"}, {"deltas": {"a": b""}}):
        with pytest.raises(NotPacked, match="is not packed") as found:
            tpde.from_pretrained(llama.plain, **options)
        assert "pack=True" not in str(found.value.hint), "which takes neither"
    with pytest.raises(InvalidInput, match="`vram` takes packed files"):
        tpde.from_pretrained(llama.plain, pack=True, vram="1GiB")
    for path in (llama.plain, llama.packed):
        with pytest.raises(InvalidInput, match="`deltas` takes packed files") as refused:
            tpde.from_pretrained(path, pack=True, deltas={"a": b""})
        assert str(refused.value.hint) == "leave out `pack`, and name a packed model: `tpde pack` makes one"
    with pytest.raises(InvalidInput, match="`pack` is 'yes'"):
        tpde.from_pretrained(llama.plain, pack="yes")  # type: ignore[arg-type]
    quantized = tmp_path / "quantized"
    quantized.mkdir()
    config = json.loads((llama.plain / "config.json").read_text())
    (quantized / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "awq"}})
    )
    with pytest.raises(InvalidInput, match="is quantized with `awq`"):
        tpde.from_pretrained(quantized, pack=True)


def test_a_file_that_ends_early(llama: Pair, tmp_path: Path) -> None:
    for it in llama.plain.iterdir():
        (tmp_path / it.name).write_bytes(it.read_bytes())
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(Truncated):
        tpde.from_pretrained(tmp_path, pack=True)


def test_the_command(llama: Pair) -> None:
    given = ("--prompt", "ab", "--max-new-tokens", "4", "--device", "cpu", "--json")
    packed = invoke("run", str(llama.packed), *given)
    plain = invoke("run", str(llama.plain), "--pack", *given)
    assert plain.exit_code == packed.exit_code == 0
    assert json.loads(plain.stdout)["tokens"] == json.loads(packed.stdout)["tokens"]
    assert json.loads(plain.stdout)["pack"] is True
    refused = invoke("run", str(llama.plain), *given)
    assert refused.exit_code == 2
    assert "or say `--pack`" in refused.stderr
    assert "--pack" not in invoke("run", str(llama.plain), *given, "--vram", "1GiB").stderr
