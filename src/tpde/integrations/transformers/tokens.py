"""Holding a model to the number of tokens that its memory budget was made for."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from tpde.errors import OutOfMemory

_IDS, _DECODER = ("input_ids", "inputs_embeds"), ("decoder_input_ids", "decoder_inputs_embeds")
_CACHES = ("past_key_values", "cache_params", "past_key_value")


def check_tokens(batch: int, length: int, limit: int) -> None:
    """Refuse more tokens than memory was kept for.

    Raises
    ------
    OutOfMemory
        Saying what was asked for, what there is room for, and what to do.
    """
    if batch * length > limit:
        raise OutOfMemory(
            f"{batch} x {length} = {batch * length} tokens, those in the cache included, are more than the "
            f"{limit} that the VRAM budget keeps memory for; pass fewer, or load the model with "
            f"`max_tokens={batch * length}`"
        )


class TokenLimit:
    """A forward pre-hook of a model that raises before a call allocates more than its budget holds.

    Counted are the sequences of the batch times the tokens of each: those of this call, those in the cache
    (of a static one, all that it has room for), and those of the encoder.

    Parameters
    ----------
    model : PreTrainedModel
        Whose forward pass it watches.
    limit : int
        Sequences times length, at most.
    """

    def __init__(self, model: Any, limit: int) -> None:
        self.limit = limit
        self._names = list(inspect.signature(model.forward).parameters)
        self._has_encoder = bool(getattr(model.config, "is_encoder_decoder", False))

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the model's forward pass.

        Raises
        ------
        OutOfMemory
            See `check_tokens`.
        """
        batch, length = self.count(dict(zip(self._names, args, strict=False)) | kwargs)
        check_tokens(batch, length, self.limit)

    def count(self, took: Mapping[str, Any]) -> tuple[int, int]:
        """Sequences, and tokens of each, of a call with these arguments."""
        batch, new = _largest(took, _IDS)
        encoded = 0
        if self._has_encoder:
            encoded = new
            outputs = took.get("encoder_outputs")
            if outputs is not None and not new:
                batch, encoded = _shape(outputs[0])
            wide, new = _largest(took, _DECODER)
            if not new:
                wide, new = _largest(took, ("labels",))
            batch = max(batch, wide)
        return batch, encoded + _held(_cache(took), new)


def _shape(value: Tensor) -> tuple[int, int]:
    return (1, value.shape[0]) if value.dim() == 1 else (value.shape[0], value.shape[1])


def _largest(took: Mapping[str, Any], names: tuple[str, ...]) -> tuple[int, int]:
    found = [_shape(took[name]) for name in names if isinstance(took.get(name), Tensor)]
    return max((it[0] for it in found), default=0), max((it[1] for it in found), default=0)


def _cache(took: Mapping[str, Any]) -> Any:
    found = next((took[name] for name in _CACHES if took.get(name) is not None), None)
    return getattr(found, "self_attention_cache", found)


def _held(cache: Any, new: int) -> int:
    """Tokens of a sequence that a cache holds when so many more are in it."""
    if cache is None:
        return new
    # Static layers' lengths are on the GPU, and asking for them would wait for it; they are full size anyway.
    static = [getattr(it, "max_cache_len", None) for it in getattr(cache, "layers", ())]
    room = max((it for it in static if isinstance(it, int)), default=0)
    if room:
        return max(room, new)
    if hasattr(cache, "get_seq_length"):
        return int(cache.get_seq_length()) + new
    try:  # pairs of keys and values
        return int(cache[0][0].shape[-2]) + new
    except (TypeError, IndexError, AttributeError, KeyError):
        return new
