"""Of `weights`: packed tensors in memory, decoding them, and what others may do with them."""

from __future__ import annotations

from . import decode, deltas, functions, products, resident

MUTANTS = (
    *resident.MUTANTS,
    *deltas.MUTANTS,
    *decode.MUTANTS,
    *functions.MUTANTS,
    *products.MUTANTS,
)
