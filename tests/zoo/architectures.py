"""The table of architectures."""

from __future__ import annotations

from .architecture import Architecture
from .decoders import DECODERS

ARCHITECTURES: dict[str, Architecture] = {it.name: it for it in DECODERS}
