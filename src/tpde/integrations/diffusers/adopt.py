"""Models of diffusers that are packed in memory, not loaded packed, and those that are unpacked."""

from __future__ import annotations

from diffusers.models.modeling_utils import ModelMixin
from torch import nn

from tpde.integrations.diffusers.quantizer import TpdeQuantizer, belong, leave
from tpde.nn import packed_modules


def adopt(model: nn.Module) -> None:
    """Let `save_pretrained` of a model, and of those in it, write what is packed as a packed directory.

    One that another quantizer made is left alone.
    """
    for it in model.modules():
        if isinstance(it, ModelMixin) and getattr(it, "hf_quantizer", None) is None:
            belong(it)


def release(model: nn.Module) -> None:
    """Leave models that were unpacked, a model or those in it, as they were before they were packed."""
    for it in model.modules():
        ours = isinstance(it, ModelMixin) and isinstance(getattr(it, "hf_quantizer", None), TpdeQuantizer)
        if ours and next(packed_modules(it), None) is None:
            leave(it)
