"""What `config.json` says of packed weights."""

from __future__ import annotations

from typing import Any

from transformers.utils.quantization_config import QuantizationConfigMixin

from tpde.errors import InvalidInput, UnsupportedVersion
from tpde.format.constants import VERSION

METHOD = "tpde"


class TpdeConfig(QuantizationConfigMixin):
    """The `quantization_config` of a packed model.

    Parameters
    ----------
    version : int
        Of the format.
    source : dict, optional
        The `quantization_config` of the model that was packed.

    Raises
    ------
    UnsupportedVersion
        If the weights were packed by a newer tpde.
    InvalidInput
        If the model was quantized before it was packed: its quantizer and this one cannot both load it.
    """

    def __init__(self, version: int = VERSION, source: dict[str, Any] | None = None, **_: Any) -> None:
        if version != VERSION:
            raise UnsupportedVersion(
                f"the weights have format version {version}; this tpde reads version {VERSION}",
                hint="upgrade tpde",
                found=version,
                needed=VERSION,
            )
        if source is not None:
            method = source.get("quant_method") if isinstance(source, dict) else source
            raise InvalidInput(
                f"the model was quantized with `{method}` before it was packed, and cannot run from packed "
                "weights",
                hint="restore it with `tpde unpack`",
            )
        self.quant_method = METHOD  # type: ignore[assignment]
        self.version = version
