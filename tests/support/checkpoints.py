"""Tiny model directories on disk, plain and packed, with a tokenizer made here, and their models compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

import tpde
from support.models import VOCAB, assert_same_bits, make, outputs, torch
from tpde import nn as packed_nn
from tpde.format.constants import SUFFIX


class Pair(NamedTuple):
    """A model's plain directory, the packed one, and its class."""

    plain: Path
    packed: Path
    kind: Any


def byte_tokenizer() -> Any:
    """Give a tokenizer whose tokens are bytes, in a vocabulary of `VOCAB`."""
    transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")
    tokenizers = pytest.importorskip("tokenizers", reason="needs tokenizers")
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = ["<pad>", "<eos>", *letters]
    words += [f"<extra_{i}>" for i in range(VOCAB - len(words))]
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({w: i for i, w in enumerate(words)}, []))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", model_max_length=64
    )


def write(folder: Path, model: Any, **options: Any) -> Pair:
    """Save a model with a tokenizer, and pack it."""
    plain, packed = folder / "plain", folder / "packed"
    model.save_pretrained(plain, **options)
    byte_tokenizer().save_pretrained(plain)
    tpde.pack(plain, packed)
    return Pair(plain, packed, type(model))


def checkpoint(folder: Path, name: str, dtype: Any = torch.bfloat16, **options: Any) -> Pair:
    """Save and pack one of the tiny models."""
    return write(folder, make(name, dtype), **options)


def same_model(name: str, pair: Pair, batch: int = 2, **options: Any) -> Any:
    """Load both, and compare outputs, state, buffers and classes; gives the packed model."""
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
