"""Of `nn`: modules with packed weights, their blocks, workspaces, threads and gradients."""

from __future__ import annotations

from . import deltas, models, modules, workspaces

MUTANTS = (
    *deltas.MUTANTS,
    *workspaces.MUTANTS,
    *modules.MUTANTS,
    *models.MUTANTS,
)
