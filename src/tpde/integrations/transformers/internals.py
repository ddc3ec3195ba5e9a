"""What this package uses of transformers beyond its documented interface, all of it.

No other module here names anything of transformers that begins with an underscore, nor what its
documentation does not describe. `tpde.nn` names two: `_experts_implementation` of configurations and
`_is_hf_initialized` of parameters; `tpde.loading` asks any model for `all_tied_weights_keys`.
`RELIED_ON` says since which version each is there and what breaks without it, and a test looks for each in
the version that is installed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

__all__ = [
    "WeightConverter",
    "WeightRenaming",
    "dot_natural_key",
    "rename_source_key",
]


class Reliance(NamedTuple):
    """Something that may change without notice.

    Attributes
    ----------
    name : str
        What it is: of a module of transformers, or behind a `.` of models, behind a `:` of configurations.
    since : str
        The first version of transformers in which it is as here, of those that were tried.
    breaks : str
        What does not work without it.
    """

    name: str
    since: str
    breaks: str


RELIED_ON = (
    Reliance("conversion_mapping.get_model_conversion_mapping", "5.0", "`tpde plan`"),
    Reliance("core_model_loading.WeightConverter", "5.0", "which packed tensors become which weights"),
    Reliance("core_model_loading.WeightRenaming", "5.0", "which packed tensors become which weights"),
    Reliance("core_model_loading.dot_natural_key", "5.0", "the order of fused experts"),
    Reliance("core_model_loading.rename_source_key", "5.0", "which packed tensors become which weights"),
    Reliance("core_model_loading.revert_weight_conversion", "5.0", "`save_pretrained` of packed models"),
    Reliance(
        "integrations.moe.use_experts_implementation", "5.13", "experts with fused kernels: `tpde.nn.routed`"
    ),
    Reliance("modeling_utils._get_dtype", "5.13", "the dtype, where `config.json` names none"),
    Reliance("quantizers.base.HfQuantizer.preprocess_model", "5.0", "loading"),
    Reliance("quantizers.base.HfQuantizer.update_weight_conversions", "5.8", "loading: weights are random"),
    Reliance("quantizers.base.HfQuantizer.param_element_size", "5.0", '`device_map="auto"`'),
    Reliance("quantizers.base.HfQuantizer.remove_quantization_config", "5.0", "saving unpacked models"),
    Reliance(".all_tied_weights_keys", "5.0", "tied weights"),
    Reliance("._from_config", "5.0", "`tpde plan`"),
    Reliance("._get_dtype_plan", "5.1", "weights that a model keeps in another dtype"),
    Reliance("._keys_to_ignore_on_load_unexpected", "5.9", "loading: the list was no set before"),
    Reliance("._weight_conversions", "5.0", "`save_pretrained` of packed and unpacked models"),
    Reliance(".save_pretrained", "5.13", "telling that it is given weights that are not the model's"),
    Reliance(".tie_weights", "5.13", "loading: it compared tied weights that have no data"),
    Reliance(":_attn_implementation", "5.0", "budgets: what attention takes"),
    Reliance(":_experts_implementation", "5.0", "budgets: whether experts are copied"),
)


def conversion_mapping(model: Any) -> list[Any]:
    """What transformers does to a checkpoint's tensors on their way into a model."""
    return get_model_conversion_mapping(model)


def on_meta(kind: Any, config: Any, dtype: torch.dtype) -> Any:
    """A model without data, of a class of models or of an automatic one."""
    with torch.device("meta"):
        return kind._from_config(config, dtype=dtype)


def dtype_plan(model: Any, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Weights that a model keeps in another dtype than `dtype`, by globs."""
    return model._get_dtype_plan(dtype)  # type: ignore[no-any-return]


def tied_weights(model: Any) -> dict[str, str]:
    """Names of tied parameters and those of what each is tied to: the model's own, which may be changed."""
    return model.all_tied_weights_keys  # type: ignore[no-any-return]


def mark_initialized(parameter: torch.Tensor) -> None:
    """Let transformers fill no random numbers into a parameter that no file has."""
    parameter._is_hf_initialized = True  # type: ignore[attr-defined]


def ignored_keys(model: Any) -> set[str]:
    """Patterns of tensors that a checkpoint may have and a model has not, without a word."""
    return set(model._keys_to_ignore_on_load_unexpected or ())


def ignore_keys(model: Any, patterns: Iterable[str]) -> Callable[[], None]:
    """Add to `ignored_keys`; gives what undoes it."""
    before = model.__dict__.get("_keys_to_ignore_on_load_unexpected", False)
    model._keys_to_ignore_on_load_unexpected = ignored_keys(model) | set(patterns)

    def undo() -> None:
        if before is False:
            del model._keys_to_ignore_on_load_unexpected
        else:
            model._keys_to_ignore_on_load_unexpected = before

    return undo


def take_conversions(model: Any) -> list[Any] | None:
    """The conversions that a model was loaded with, which saving it will not undo any more.

    None if it was not loaded: saving it would undo those of its class.
    """
    found: list[Any] | None = getattr(model, "_weight_conversions", None)
    model._weight_conversions = []
    return found


def give_conversions(model: Any, conversions: list[Any] | None) -> None:
    """Let saving a model undo the conversions that `take_conversions` gave."""
    if conversions is None:
        model.__dict__.pop("_weight_conversions", None)
    else:
        model._weight_conversions = conversions


@contextmanager
def _with_conversions(model: Any, conversions: list[Any] | None) -> Iterator[None]:
    before = model._weight_conversions
    model._weight_conversions = conversions
    try:
        yield
    finally:
        model._weight_conversions = before


def revert(model: Any, state: dict[str, Any], conversions: list[Any] | None) -> dict[str, Any]:
    """A state dict as a checkpoint has it: with conversions undone."""
    with _with_conversions(model, conversions):
        return revert_weight_conversion(model, state)  # type: ignore[no-any-return]


def given_state() -> Mapping[str, Any] | None:
    """The state that `save_pretrained` was given, for the function that it calls and that calls this.

    transformers asks a quantized model's quantizer for its state, tells it of no other, and forgets that: an
    average of weights would be saved as the model's own. So it is looked up where it is a local variable.
    """
    asks = sys._getframe(2)
    return asks.f_locals.get("state_dict") if asks.f_code.co_name == "save_pretrained" else None


def asked_for_dtype() -> str | None:
    """The weight file that transformers took a dtype from, for what it calls then and that calls this.

    None if a configuration or the user said it. A quantizer is told the dtype only, so that the file is
    looked up where it is a local variable; the state is one, too, if it was read for that.
    """
    asks = sys._getframe(2)
    here = asks.f_locals if asks.f_code.co_name == "_get_dtype" else {}
    files = here.get("checkpoint_files")
    return files[0] if files and here.get("state_dict") is not None else None


def forget_quantized(model: Any) -> None:
    """Let a model compute as one that is not quantized.

    transformers leaves a mark in configurations by which some models, such as Jamba, compute a layer in
    another order, for the sake of weights that are no matrices.
    """
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.config.__dict__.pop("_is_quantized", None)


def attention_of(config: Any) -> str | None:
    """The implementation of attention that a configuration asks for."""
    return getattr(config, "_attn_implementation", None)


def experts_of(config: Any) -> str | None:
    """The implementation of fused experts that a configuration asks for."""
    return getattr(config, "_experts_implementation", None)
