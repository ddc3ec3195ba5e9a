"""Of `cuda`, as far as it can be tested without a GPU: descriptors, geometry, caches, nvCOMP."""

from __future__ import annotations

from . import decode, deltas, encode, experts, many_rows, products

MUTANTS = (
    *decode.MUTANTS,
    *deltas.MUTANTS,
    *encode.MUTANTS,
    *experts.MUTANTS,
    *many_rows.MUTANTS,
    *products.MUTANTS,
)
