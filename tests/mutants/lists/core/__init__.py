"""Of the core in C: layouts, tables, decoding, encoding, threads."""

from __future__ import annotations

from . import decode, encode, windows

MUTANTS = (
    *decode.MUTANTS,
    *encode.MUTANTS,
    *windows.MUTANTS,
)
