"""What `config.json` says of packed weights, as transformers reads it."""

from __future__ import annotations

from transformers.utils.quantization_config import QuantizationConfigMixin

from tpde.loading.quantized import PackedConfig


class TpdeConfig(PackedConfig, QuantizationConfigMixin):
    """The `quantization_config` of a packed model: see `PackedConfig`."""
