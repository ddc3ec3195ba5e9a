"""The table of architectures."""

from __future__ import annotations

from .architecture import Architecture
from .decoders import DECODERS
from .encoders import ENCODERS, SEQ2SEQ
from .others import DIFFUSION, TIMM
from .perception import AUDIO, MULTIMODAL, VISION

_ALL = (DECODERS, ENCODERS, SEQ2SEQ, VISION, AUDIO, MULTIMODAL, DIFFUSION, TIMM)
ARCHITECTURES: dict[str, Architecture] = {it.name: it for group in _ALL for it in group}
