"""Of `streaming`: the ring, what waits for what, host memory, disks, budgets and predictions."""

from __future__ import annotations

from . import budgets, experts, host, predictions, ring

MUTANTS = (
    *ring.MUTANTS,
    *experts.MUTANTS,
    *host.MUTANTS,
    *budgets.MUTANTS,
    *predictions.MUTANTS,
)
