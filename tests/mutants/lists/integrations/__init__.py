"""Of `integrations`: models of transformers and diffusers, their plans, limits and budgets."""

from __future__ import annotations

from . import diffusers, loading, streaming, transformers

MUTANTS = (
    *loading.MUTANTS,
    *streaming.MUTANTS,
    *transformers.MUTANTS,
    *diffusers.MUTANTS,
)
