"""Holding a model to the tokens and sequences that its memory budget was made for."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from tpde.errors import OutOfMemory
from tpde.integrations.transformers.activations import Activations
from tpde.integrations.transformers.internals import experts_of
from tpde.nn.batch_rows import CACHES
from tpde.planning.sizes import mib

_SOUNDS = ("input_features", "input_values")
_IDS, _DECODER = ("input_ids", "inputs_embeds"), ("decoder_input_ids", "decoder_inputs_embeds")


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
            f"{limit} that the VRAM budget keeps memory for",
            hint=f"pass fewer, or load the model with `max_tokens={batch * length}`",
            found=limit,
            needed=batch * length,
        )


def check_sequences(batch: int, max_tokens: int, max_batch: int, activations: Activations) -> None:
    """Refuse more sequences than whose next tokens can be chosen in the memory that was kept.

    Raises
    ------
    OutOfMemory
        As `check_tokens`.
    """
    each, room = activations.logits + activations.sampling, activations.tokens(max_tokens, max_batch)
    if batch * each > room:
        raise OutOfMemory(
            f"choosing the next tokens of {batch} sequences takes {mib(batch * each)}, the VRAM budget "
            f"keeps {mib(room)} for a forward pass",
            hint=f"pass at most {room // each} at once, or load the model with `max_batch={batch}`",
            found=room,
            needed=batch * each,
        )


def check_states(batch: int, max_batch: int, activations: Activations) -> None:
    """Refuse more sequences than whose states there is memory for, of models with recurrent layers.

    Raises
    ------
    OutOfMemory
        As `check_tokens`.
    """
    each = activations.recurrent.states
    if each and batch > max_batch:
        raise OutOfMemory(
            f"the states of {batch} sequences take {mib(batch * each)}, the VRAM budget keeps "
            f"{mib(max_batch * each)} for those of {max_batch}",
            hint=f"pass at most {max_batch} at once, or load the model with `max_batch={batch}`",
            found=max_batch * each,
            needed=batch * each,
        )


def check_experts(batch: int, new: int, max_tokens: int, max_batch: int, activations: Activations) -> None:
    """Refuse more tokens than whose experts can be copied in the memory that was kept.

    Raises
    ------
    OutOfMemory
        As `check_tokens`.
    """
    count, room = batch * new, activations.copied(max_tokens, max_batch)
    if activations.experts and count > room:
        fits = room // new
        fewer = f"at most {fits} x {new} at once" if fits else "fewer at once"
        takes, has = count * activations.experts, room * activations.experts
        load = f"`max_batch={count}`"
        if not activations.copies:
            load = f'`experts_implementation="batched_mm"` and {load}'
        raise OutOfMemory(
            f"`batched_mm` copies the experts of {batch} x {new} tokens, which takes {mib(takes)}, the VRAM "
            f"budget keeps {mib(has)} for them",
            hint=f'pass {fewer}, call `model.set_experts_implementation("eager")`, or load the model with '
            f"{load}, which takes {mib(takes - has)} more of `vram`",
            found=has,
            needed=takes,
        )


class Call(NamedTuple):
    """What a call of a model asks for.

    Attributes
    ----------
    batch : int
        Sequences.
    new : int
        Tokens of each that are computed.
    length : int
        Tokens of each, those in the cache and of the encoder included.
    """

    batch: int
    new: int
    length: int


class TokenLimit:
    """A forward pre-hook of a model that raises before a call allocates more than its budget holds.

    Counted are the sequences of the batch times the tokens of each: those of this call, those in the cache
    (of a static one, all that it has room for), and those of the encoder. Sequences are counted beside: each
    takes memory while its next token is chosen, while its experts are copied, and for its states.

    Parameters
    ----------
    model : PreTrainedModel
        Whose forward pass it watches.
    max_tokens, max_batch : int
        Sequences times length, and sequences, for which there is memory.
    activations : Activations
        What the model has in memory.
    """

    def __init__(self, model: Any, max_tokens: int, max_batch: int, activations: Activations) -> None:
        self.max_tokens, self.max_batch, self._activations = max_tokens, max_batch, activations
        self._names = list(inspect.signature(model.forward).parameters)
        self._has_encoder = bool(getattr(model.config, "is_encoder_decoder", False))
        self._samples = bool(activations.logits) and model.can_generate()
        self._config = model.config.get_text_config()
        self._heard = getattr(model, "_get_feat_extract_output_lengths", None)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the model's forward pass.

        Raises
        ------
        OutOfMemory
            See `check_tokens`, `check_states`, `check_sequences` and `check_experts`.
        """
        batch, new, length = self.count(dict(zip(self._names, args, strict=False)) | kwargs)
        check_tokens(batch, length, self.max_tokens)
        check_states(batch, self.max_batch, self._activations)
        if self._samples:
            check_sequences(batch, self.max_tokens, self.max_batch, self._activations)
        # `generate` changes it, from one call to the next.
        if experts_of(self._config) == "batched_mm":
            check_experts(batch, new, self.max_tokens, self.max_batch, self._activations)

    def before_encoder(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the encoder's, which `generate` calls by itself.

        Raises
        ------
        OutOfMemory
            See `check_tokens`.
        """
        names = list(inspect.signature(module.forward).parameters)
        batch, length = self._encoded(dict(zip(names, args, strict=False)) | kwargs)
        check_tokens(batch, length, self.max_tokens)

    def _encoded(self, took: Mapping[str, Any]) -> tuple[int, int]:
        """Sequences, and tokens of each, that an encoder is given, sounds by what is left of them."""
        batch, length = _largest(took, _IDS)
        sound = next((took[name] for name in _SOUNDS if isinstance(took.get(name), Tensor)), None)
        if length or sound is None or self._heard is None:
            return batch, length
        return sound.shape[0], int(self._heard(max(sound.shape[1:])))

    def count(self, took: Mapping[str, Any]) -> Call:
        """What a call with these arguments asks for."""
        batch, new = _largest(took, _IDS)
        encoded = 0
        if self._has_encoder:
            batch, encoded = self._encoded(took)
            outputs = took.get("encoder_outputs")
            if outputs is not None and not encoded:
                batch, encoded = _shape(outputs[0])
            wide, new = _largest(took, _DECODER)
            if not new:
                wide, new = _largest(took, ("labels",))
            batch = max(batch, wide)
        return Call(batch, new, encoded + _held(_cache(took), new))


def limit_tokens(model: Any, max_tokens: int, max_batch: int, activations: Activations) -> None:
    """Hold a model, and its encoder, to the tokens and sequences that there is memory for.

    Parameters
    ----------
    model, max_tokens, max_batch, activations
        As of `TokenLimit`.
    """
    limit = TokenLimit(model, max_tokens, max_batch, activations)
    model.register_forward_pre_hook(limit, with_kwargs=True, prepend=True)
    if getattr(model.config, "is_encoder_decoder", False):
        encoder = model.get_encoder()
        encoder.register_forward_pre_hook(limit.before_encoder, with_kwargs=True, prepend=True)


def _shape(value: Tensor) -> tuple[int, int]:
    return (1, value.shape[0]) if value.dim() == 1 else (value.shape[0], value.shape[1])


def _largest(took: Mapping[str, Any], names: tuple[str, ...]) -> tuple[int, int]:
    found = [_shape(took[name]) for name in names if isinstance(took.get(name), Tensor)]
    return max((it[0] for it in found), default=0), max((it[1] for it in found), default=0)


def _cache(took: Mapping[str, Any]) -> Any:
    found = next((took[name] for name in CACHES if took.get(name) is not None), None)
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
        try:
            return int(cache.get_seq_length()) + new
        except ValueError:  # no layer of it has keys: states are as large, however many tokens went by
            return new
    try:  # pairs of keys and values
        return int(cache[0][0].shape[-2]) + new
    except (TypeError, IndexError, AttributeError, KeyError):
        return new
