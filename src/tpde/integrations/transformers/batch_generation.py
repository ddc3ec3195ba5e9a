"""`generate` of a batch whose rows are under several deltas: one generation for each, joined after it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from tpde.errors import InvalidInput
from tpde.nn.batch_rows import ROWS, BatchRows, positional, refuse
from tpde.nn.model_deltas import Deltas
from tpde.nn.passes import AroundModel

# What looks at rows by their places in the batch, or keeps what it is told of them.
_BY_PLACE = ("prefix_allowed_tokens_fn", "logits_processor", "stopping_criteria", "streamer")
_OTHERS = ("assistant_model", "custom_generate", "synced_gpus")  # which are told of one generation only

_WHOLE = {"generation_config", "tokenizer"}  # which may hold tensors that are no rows


class Generate(AroundModel):
    """A model's `generate`: several, where rows of its batch are under several deltas."""

    __slots__ = ()
    method = "generate"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As before, or each row under its own delta; nothing changes meanwhile."""
        if self.deltas.active_delta.rows() is None:
            return self.run(args, kwargs)
        with self.deltas.passes.one():
            self.deltas.require_settled()
            names = self.deltas.active_delta.rows()
            if names is None:  # by now
                return self.run(args, kwargs)
            return self._by_requests(BatchRows(names), args, kwargs)

    def _by_requests(self, batch: BatchRows, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """A generation for each delta, with its rows."""
        signature = inspect.signature(self.forward)
        signature.bind(*args, **kwargs)
        places = positional(signature.parameters)
        given = dict(zip(places, args, strict=False)) | kwargs
        settings = _Settings(given, self.deltas.model)
        _require_joined(given, settings)
        known = dict(ROWS)
        if getattr(self.deltas.model, "main_input_name", None) == "input_ids":
            known["inputs"] = known["input_ids"]
        calls = batch.split(places, args, kwargs, known=known, whole=_WHOLE)
        return _joined(batch, self.deltas.each(calls, self.run), settings)


def by_requests(deltas: Deltas, model: nn.Module) -> Generate | None:
    """What stands for `generate` of a model while each row has a delta of its own: see `METHODS`."""
    return Generate(deltas, model) if isinstance(model, PreTrainedModel) and model.can_generate() else None


class _Settings:
    """What a generation goes by: arguments, the configuration among them, the model's own."""

    def __init__(self, given: Mapping[str, Any], model: Any) -> None:
        self._given = given
        self._configs = [given.get("generation_config"), getattr(model, "generation_config", None)]

    def __call__(self, name: str) -> Any:
        """The first that is not None."""
        found = [self._given.get(name), *(getattr(it, name, None) for it in self._configs)]
        return next((it for it in found if it is not None), None)

    def padding(self) -> int:
        """The token that shorter results are padded with.

        Raises
        ------
        InvalidInput
            If there is none.
        """
        for name in ("pad_token_id", "eos_token_id"):
            found = self(name)
            found = found[0] if isinstance(found, (list, tuple)) and found else found
            if isinstance(found, int):
                return found
        raise InvalidInput(
            "results of other lengths are padded, and the model has no token for that",
            hint="pass `pad_token_id` to `generate`",
            where="pad_token_id",
        )


def _require_joined(given: Mapping[str, Any], settings: _Settings) -> None:
    """Refuse what cannot be done once for each delta.

    Raises
    ------
    InvalidInput
        Naming it.
    """
    for name in _BY_PLACE:
        if given.get(name):
            raise refuse(name, "would be told of rows by their places in one part of the batch")
    for name in _OTHERS:
        if given.get(name):
            raise refuse(name, "goes with one generation, and there would be several")
    if settings("return_dict_in_generate"):
        raise refuse("return_dict_in_generate", "asks for what cannot be joined")
    if settings("cache_implementation") == "paged":
        raise refuse("cache_implementation", "is `paged`, which computes in other threads")


def _joined(batch: BatchRows, found: list[Any], settings: _Settings) -> Tensor:
    """Tokens of all generations, padded on the right to the longest, in the order of the rows.

    Raises
    ------
    InvalidInput
        If there are no tokens, or not as many sequences for each row; if there is no token to pad with.
    """
    counts = [len(rows) for rows in batch.places.values()]
    if not all(isinstance(it, Tensor) and it.dim() == 2 for it in found):
        raise refuse("generate", f"gave a {type(found[0]).__name__}, and tokens can be joined")
    each = found[0].shape[0] // counts[0]
    if any(it.shape[0] != each * n for it, n in zip(found, counts, strict=True)):
        raise refuse("generate", "gave other numbers of sequences for other rows, which cannot be joined")
    longest = max(it.shape[1] for it in found)
    if any(it.shape[1] < longest for it in found):
        pad = settings.padding()
        found = [functional.pad(it, (0, longest - it.shape[1]), value=pad) for it in found]
    return batch.rows_of(found, each)
