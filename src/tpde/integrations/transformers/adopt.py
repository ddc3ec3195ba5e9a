"""Models of transformers that were packed in memory, not loaded packed."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from tpde.integrations.transformers.config import TpdeConfig
from tpde.integrations.transformers.quantizer import TpdeHfQuantizer
from tpde.nn import packed_modules


def adopt(model: nn.Module) -> None:
    """Let `save_pretrained` of a model, and of those in it, write what is packed as a packed directory.

    One that another quantizer made is left alone.
    """
    for child in [model] if isinstance(model, PreTrainedModel) else model.children():
        if not isinstance(child, PreTrainedModel):
            adopt(child)
            continue
        quantizer = getattr(child, "hf_quantizer", None)
        if quantizer is None and next(packed_modules(child), None) is not None:
            quantizer = TpdeHfQuantizer(TpdeConfig(), pre_quantized=True)
            quantizer.adopt(child)
        if isinstance(quantizer, TpdeHfQuantizer):
            quantizer.adopt_inner(child)


def release(model: nn.Module) -> None:
    """Leave models that were unpacked, a model or those in it, as they were before they were packed."""
    for child in [model] if isinstance(model, PreTrainedModel) else model.children():
        if not isinstance(child, PreTrainedModel):
            release(child)
            continue
        for inner in child.modules():
            quantizer = getattr(inner, "hf_quantizer", None)
            if isinstance(quantizer, TpdeHfQuantizer) and next(packed_modules(inner), None) is None:
                quantizer.release(inner)
