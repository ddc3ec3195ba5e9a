"""Of `codec` and `format`: blobs, containers, and what files are written and read through."""

from __future__ import annotations

from . import blob, codecs, containers, files

MUTANTS = (
    *blob.MUTANTS,
    *codecs.MUTANTS,
    *containers.MUTANTS,
    *files.MUTANTS,
)
