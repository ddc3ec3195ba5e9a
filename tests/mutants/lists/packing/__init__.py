"""Of `packing`: files and directories become packed ones, and come back."""

from __future__ import annotations

from . import directories, files, verify

MUTANTS = (
    *verify.MUTANTS,
    *files.MUTANTS,
    *directories.MUTANTS,
)
