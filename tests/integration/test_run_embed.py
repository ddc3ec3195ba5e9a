"""`tpde run --embed` of models with a decoder, which takes no part in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.checkpoints import byte_tokenizer, checkpoint
from support.commands import process
from support.models import torch

transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")


def test_vectors_of_a_t5_are_its_encoder_s(tmp_path: Path) -> None:
    """As sentence-transformers has them."""
    text = "A text, and more of it."
    pair = checkpoint(tmp_path, "t5", torch.float32)
    done = process("run", pair.packed, "--embed", text, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    model = transformers.T5EncoderModel.from_pretrained(pair.plain)
    with torch.inference_mode():
        alone = model(**byte_tokenizer()(text, return_tensors="pt")).last_hidden_state.mean(1)
    found = torch.tensor([json.loads(done.stdout)], dtype=torch.float32)
    assert torch.equal(found.view(torch.int32), alone.view(torch.int32))
