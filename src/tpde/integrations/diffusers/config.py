"""What a component's `config.json` says of packed weights, as diffusers reads it."""

from __future__ import annotations

from enum import Enum
from typing import Any

from diffusers.quantizers.quantization_config import QuantizationConfigMixin

from tpde.errors import InvalidInput, UnsupportedVersion
from tpde.format.constants import VERSION

METHOD = "tpde"


class _Method(str, Enum):
    """diffusers takes members of its own, and asks for their `value`."""

    TPDE = METHOD


class TpdeConfig(QuantizationConfigMixin):
    """The `quantization_config` of a packed component.

    Parameters
    ----------
    version : int
        Of the format.
    source : dict, optional
        The `quantization_config` of the component that was packed.

    Raises
    ------
    UnsupportedVersion
        If the weights were packed by a newer tpde.
    InvalidInput
        If the component was quantized before it was packed.
    """

    def __init__(self, version: int = VERSION, source: Any = None, **_: Any) -> None:
        if version != VERSION:
            raise UnsupportedVersion(
                f"the weights have format version {version}; this tpde reads version {VERSION}",
                hint="upgrade tpde",
            )
        if source is not None:
            raise InvalidInput(
                "the component was quantized before it was packed, and cannot run from packed weights",
                hint="restore it with `tpde unpack`",
            )
        self.quant_method: Any = _Method.TPDE
        self.version = version

    def to_diff_dict(self) -> dict[str, Any]:
        """All of it: diffusers prints configurations by this, which its own base lacks."""
        return self.to_dict()
