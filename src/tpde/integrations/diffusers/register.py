"""Telling diffusers of packed components."""

from __future__ import annotations

from diffusers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

from tpde.format.constants import METHOD
from tpde.integrations.diffusers.config import TpdeConfig
from tpde.integrations.diffusers.quantizer import IS_ASKED, TpdeQuantizer


def register() -> None:
    """Let diffusers load components whose `config.json` names tpde; before 0.40 it refuses them."""
    if IS_ASKED:
        AUTO_QUANTIZATION_CONFIG_MAPPING.setdefault(METHOD, TpdeConfig)
        AUTO_QUANTIZER_MAPPING.setdefault(METHOD, TpdeQuantizer)
