"""What a component's `config.json` says of packed weights, as diffusers reads it."""

from __future__ import annotations

from enum import Enum
from typing import Any

from diffusers.quantizers.quantization_config import QuantizationConfigMixin

from tpde.format.constants import METHOD, VERSION
from tpde.loading.quantized import PackedConfig


class _Method(str, Enum):
    """diffusers takes members of its own, and asks for their `value`."""

    TPDE = METHOD


class TpdeConfig(PackedConfig, QuantizationConfigMixin):
    """The `quantization_config` of a packed component: see `PackedConfig`."""

    def __init__(self, version: int = VERSION, source: Any = None, **others: Any) -> None:
        super().__init__(version, source, **others)
        self.quant_method = _Method.TPDE

    def to_diff_dict(self) -> dict[str, Any]:
        """All of it: diffusers prints configurations by this, which its own base lacks."""
        return self.to_dict()
