"""What libraries take packed models for: quantized ones, by a configuration and a quantizer.

Both libraries have their own base classes of the same names. These stand before them.
"""

from __future__ import annotations

from typing import Any

from tpde.errors import InvalidInput, NotPacked, PackedWeight, UnsupportedVersion
from tpde.format.constants import METHOD, VERSION


class PackedConfig:
    """The `quantization_config` of a packed model, in its `config.json`.

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
        If the version is no number. If the model was quantized before it was packed: its quantizer and this
        one cannot both load it.
    """

    def __init__(self, version: int = VERSION, source: Any = None, **_: Any) -> None:
        if isinstance(version, bool) or not isinstance(version, int) or version < 1:
            raise InvalidInput(
                f"`version` in the `quantization_config` is {version!r:.50}, which is no number from 1 on",
                hint="mend the model's `config.json`, or fetch it again",
                where="version",
                found=version,
                needed=VERSION,
            )
        if version != VERSION:
            raise UnsupportedVersion(
                f"the weights have format version {version}; this tpde reads version {VERSION}",
                hint="upgrade tpde",
                found=version,
                needed=VERSION,
            )
        if source is not None:
            method = source.get("quant_method") if isinstance(source, dict) else source
            how = "in a way that is not named" if method is None else f"with `{method}`"
            raise InvalidInput(
                f"the model was quantized {how} before it was packed, and cannot run from packed weights",
                hint="restore it with `tpde unpack`",
            )
        self.quant_method: Any = METHOD
        self.version = version


class PackedQuantizer:
    """Loads packed weights into a model, and saves them.

    Raises
    ------
    NotPacked
        If it should quantize a model.

    Attributes
    ----------
    streamed : bool
        The model's weights come from its files under a budget.
    """

    pre_quantized: bool
    streamed = False

    def __init__(self, quantization_config: Any, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)  # type: ignore[call-arg]  # the library's own
        if not self.pre_quantized:
            raise NotPacked(
                "`TpdeConfig` loads packed models, and packs none",
                hint=(
                    "pack the model with `tpde pack` first, or load it plain and call "
                    "`tpde.pack_module(model)`"
                ),
            )

    def require_bytes(self) -> None:
        """Refuse to save what has its bytes in files only.

        Raises
        ------
        PackedWeight
            If weights are streamed.
        """
        if self.streamed:
            raise PackedWeight(
                "the model streams its weights from its packed files under a VRAM budget",
                hint="copy these files, or load it without `vram=` and save that",
            )

    @property
    def is_trainable(self) -> bool:
        """Whether adapters can be trained on it: they can."""
        return True
