"""vLLM's sleep mode with packed weights: level 1 brings them back, level 2 would lose them."""

from __future__ import annotations

from typing import Any

from tpde.errors import InvalidInput, PackedWeight
from tpde.format.constants import METHOD
from tpde.integrations.vllm import internals
from tpde.integrations.vllm.internals import CuMemBackend, SleepModeBackendFactory

_WEIGHTS = "weights"  # vLLM's tag of all memory that is taken while a model is loaded

_registered = False


def choose(model_config: Any) -> None:
    """Have a model's workers sleep by `TpdeSleepMode`, where they would by vLLM's own way.

    Raises
    ------
    InvalidInput
        If `TpdeSleepMode` would not be told that weights are thrown away, or CUDA graphs are to be offloaded,
        too, which vLLM does for a mode of its own name alone.
    """
    global _registered  # noqa: PLW0603 - vLLM refuses a name that comes a second time
    if not model_config.enable_sleep_mode or model_config.sleep_mode_backend != "cumem":
        return
    if internals.loses_weights_unheard():
        raise InvalidInput(
            "this vLLM sleeps by other names than those that tpde knows, and would lose packed weights",
            hint="leave `--enable-sleep-mode` out, or install a version of vLLM that tpde supports",
            where="sleep_mode",
        )
    if getattr(model_config, "sleep_mode_offload_cudagraph", False):  # since 0.32
        raise InvalidInput(
            "`--sleep-mode-offload-cudagraph` would do nothing where weights are packed",
            hint="leave it out: CUDA graphs stay on the device",
            where="sleep_mode_offload_cudagraph",
        )
    if not _registered:
        _registered = True
        SleepModeBackendFactory.register_backend(METHOD, __name__, TpdeSleepMode.__name__)
    model_config.sleep_mode_backend = METHOD


class TpdeSleepMode(CuMemBackend):  # type: ignore[misc]
    """vLLM's own way to sleep, at level 1.

    Blobs, and what kernels read beside them, are PyTorch's memory, taken while the model is loaded: vLLM
    copies it to the host, and back to the same addresses. Level 2 throws it away for other weights to be
    loaded, which packed ones refuse.
    """

    def suspend(self, level: int = 1) -> None:
        """Free the device's memory.

        Raises
        ------
        PackedWeight
            If weights would be thrown away.
        """
        if level > 1:
            raise _lost(f"sleep level {level}")
        super().suspend(level)

    def discard(self, tags: tuple[str, ...]) -> None:
        """Free the memory of some tags, without a copy.

        Raises
        ------
        PackedWeight
            If these are the weights'.
        """
        if _WEIGHTS in tags:
            raise _lost(f"discarding `{_WEIGHTS}`")
        super().discard(tags)


def _lost(what: str) -> PackedWeight:
    return PackedWeight(
        f"{what} throws weights away, and packed ones cannot be loaded again while vLLM runs",
        hint="sleep at level 1, which keeps them in host memory; `wake_up` lets requests go on",
        where="sleep_mode",
    )
