"""What packing or unpacking a file came to."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Result:
    """What packing or unpacking a file came to.

    Attributes
    ----------
    source, destination : str
        Paths.
    source_bytes, destination_bytes : int
        Their sizes.
    tensors, packed : int
        How many tensors there are, and how many of them are packed.
    """

    source: str
    destination: str
    source_bytes: int
    destination_bytes: int
    tensors: int
    packed: int

    def at(self, destination: Path) -> Result:
        """The same, where the file has been put since."""
        return dataclasses.replace(self, destination=str(destination))
