"""Embeddings from a packed encoder, pooled as sentence-transformers would."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModel, AutoModelForTextEncoding

from tpde.errors import InvalidInput
from tpde.files.documents import json_object, read_modules
from tpde.integrations.transformers.folder import read_config
from tpde.integrations.transformers.run_memory import explained

BATCH = 32


class Recipe(NamedTuple):
    """How a model's hidden states become one vector.

    Attributes
    ----------
    pooling : {"mean", "cls", "max"}
        Over the tokens that are no padding.
    normalize : bool
        To length 1.
    max_length : int or None
        Tokens; what is longer is cut off.
    """

    pooling: str
    normalize: bool
    max_length: int | None


def _read(path: Path) -> dict[str, Any]:
    return json_object(path)[1] if path.exists() else {}


def read_recipe(folder: Path) -> Recipe:
    """What `modules.json` says; without it, the mean, as sentence-transformers does.

    Raises
    ------
    InvalidInput
        If it asks for something else than pooling and normalizing.
    """
    pooling, normalize = "mean", False
    for module in read_modules(folder):
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind == "Pooling":
            pooling = _pooling(folder / str(module.get("path", "")) / "config.json")
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            raise InvalidInput(
                f"`{folder / 'modules.json'}` asks for a `{kind}`, which `--embed` does not have",
                hint="load the model with `tpde.from_pretrained`, and apply it there",
                where=str(folder / "modules.json"),
            )
    settings = _read(folder / "sentence_bert_config.json")
    return Recipe(pooling, normalize, settings.get("max_seq_length"))


def encoder_class(folder: Path) -> Any:
    """What is loaded to embed with: of a T5 and its like the encoder alone, as sentence-transformers does.

    Their decoders ask for tokens of their own.
    """
    alone = read_config(folder).get("model_type") in ("mt5", "t5", "umt5")
    return AutoModelForTextEncoding if alone else AutoModel


def _pooling(path: Path) -> str:
    config = _read(path)
    names = {
        "pooling_mode_mean_tokens": "mean",
        "pooling_mode_cls_token": "cls",
        "pooling_mode_max_tokens": "max",
    }
    asked = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    modes = [names.get(name, name) for name in asked] or [config.get("pooling_mode", "mean")]
    if len(modes) != 1 or modes[0] not in names.values():
        raise InvalidInput(
            f"`{path}` asks for the pooling {', '.join(map(str, modes))}; `--embed` has one of mean, cls "
            "and max",
            hint="load the model with `tpde.from_pretrained`, and pool there",
            where=str(path),
        )
    return str(modes[0])


def _pool(hidden: torch.Tensor, mask: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    wide = mask.unsqueeze(-1).expand(hidden.size()).to(hidden.dtype)
    if recipe.pooling == "cls":
        pooled = hidden[:, 0]
    elif recipe.pooling == "max":
        lowest = max(-1e9, torch.finfo(hidden.dtype).min)  # fp16 has no -1e9
        pooled = hidden.masked_fill(wide == 0, lowest).amax(1)
    else:
        pooled = (hidden * wide).sum(1) / wide.sum(1).clamp(min=1)  # of no tokens: zeros
    return torch.nn.functional.normalize(pooled, p=2, dim=1) if recipe.normalize else pooled


def _positions(model: Any) -> int | None:
    """Tokens that a model has positions for; None if nothing says how many."""
    count = getattr(model.config, "max_position_embeddings", None)
    if count is None:
        return None
    # Where padding has a position of its own, as in RoBERTa, the first token has the one after it.
    tables = [it for name, it in model.named_modules() if name.endswith("position_embeddings")]
    paddings = [getattr(it, "padding_idx", None) for it in tables]
    return int(count) - max((it + 1 for it in paddings if it is not None), default=0)


def embed(model: Any, tokenizer: Any, texts: Sequence[str], recipe: Recipe) -> tuple[torch.Tensor, int]:
    """Embed texts.

    Parameters
    ----------
    model : PreTrainedModel
        An encoder.
    tokenizer : PreTrainedTokenizerBase
        Its tokenizer.
    texts : sequence of str
        In batches of 32.
    recipe : Recipe
        How to pool.

    Returns
    -------
    embeddings : torch.Tensor
        Of shape `(len(texts), dimensions)`, on the CPU, in the model's dtype.
    tokens : int
        How many there were.

    Raises
    ------
    InvalidInput
        If the model has no hidden states to pool, or no text of a batch has tokens.
    OutOfMemory
        If the device has too little free memory.
    """
    out, tokens = [], 0
    limits = [
        recipe.max_length,
        _positions(model),
        tokenizer.model_max_length,
    ]
    limit = min(it for it in limits if it is not None)
    if tokenizer.pad_token is None:
        # The mask hides it: any token does.
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    for at in range(0, len(texts), BATCH):
        inputs = tokenizer(
            list(texts[at : at + BATCH]), padding=True, truncation=True, max_length=limit, return_tensors="pt"
        ).to(model.device)
        if not inputs["input_ids"].shape[1]:
            raise InvalidInput("the texts to embed have no tokens", hint="give texts that are not empty")
        with torch.inference_mode(), explained(model.device, "embedding"):
            hidden = getattr(model(**inputs), "last_hidden_state", None)
            if hidden is None:
                raise InvalidInput(
                    f"a {type(model).__name__} gives no hidden states", hint="`--embed` needs an encoder"
                )
            out.append(_pool(hidden, inputs["attention_mask"], recipe).cpu())
        tokens += int(inputs["attention_mask"].sum())
    return torch.cat(out), tokens
