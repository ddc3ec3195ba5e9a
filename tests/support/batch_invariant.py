"""Workers that load as with `VLLM_BATCH_INVARIANT`, for which vLLM's CPU build lacks kernels."""

from __future__ import annotations

from typing import Any

from tpde.integrations.vllm import internals

internals.is_batch_invariant = lambda: True  # in a worker, which imports this before it loads


class Invariant:
    """What workers can do beside: an engine's `worker_extension_cls`."""

    model_runner: Any

    def sides(self) -> dict[str, list[int]]:
        """Those of the matrices that this worker holds."""
        layers = self.model_runner.model.named_modules()
        return {name: it.tpde_shape for name, it in layers if "tpde" in it.__dict__}
