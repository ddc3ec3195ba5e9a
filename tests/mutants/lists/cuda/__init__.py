"""Of `cuda`, as far as it can be tested without a GPU: descriptors, geometry, caches, nvCOMP."""

from __future__ import annotations

from . import decode, deltas, encode, products

MUTANTS = (
    *decode.MUTANTS,
    *deltas.MUTANTS,
    *encode.MUTANTS,
    *products.MUTANTS,
)
