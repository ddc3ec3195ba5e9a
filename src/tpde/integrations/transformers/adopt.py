"""Models of transformers that were packed in memory, not loaded packed."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from tpde.integrations.transformers.config import TpdeConfig
from tpde.integrations.transformers.quantizer import TpdeHfQuantizer
from tpde.nn import packed_modules


def adopt(model: nn.Module) -> None:
    """Let `save_pretrained` of a model, or of one in it, write what is packed as a packed directory.

    One that another quantizer made is left alone.
    """
    for child in [model] if isinstance(model, PreTrainedModel) else model.children():
        if not isinstance(child, PreTrainedModel):
            adopt(child)
        elif getattr(child, "hf_quantizer", None) is None and next(packed_modules(child), None) is not None:
            TpdeHfQuantizer(TpdeConfig(), pre_quantized=True).adopt(child)


def release(model: nn.Module) -> None:
    """Leave models that were unpacked, a model or those in it, as they were before they were packed."""
    for child in [model] if isinstance(model, PreTrainedModel) else model.children():
        quantizer = getattr(child, "hf_quantizer", None)
        if not isinstance(child, PreTrainedModel):
            release(child)
        elif isinstance(quantizer, TpdeHfQuantizer) and next(packed_modules(child), None) is None:
            quantizer.release(child)
