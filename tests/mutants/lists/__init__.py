"""The mutants, by areas; each list is in the order of the files that it changes."""

from __future__ import annotations

from ..mutant import Mutant
from . import access, cli, codec, core, cuda, integrations, nn, packing, store, streaming, weights

AREAS: dict[str, tuple[Mutant, ...]] = {
    "codec": codec.MUTANTS,
    "core": core.MUTANTS,
    "packing": packing.MUTANTS,
    "store": store.MUTANTS,
    "access": access.MUTANTS,
    "weights": weights.MUTANTS,
    "nn": nn.MUTANTS,
    "streaming": streaming.MUTANTS,
    "integrations": integrations.MUTANTS,
    "cuda": cuda.MUTANTS,
    "cli": cli.MUTANTS,
}
MUTANTS = [it for area in AREAS.values() for it in area]
