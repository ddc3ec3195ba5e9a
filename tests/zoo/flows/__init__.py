"""What users do with a model: each as with the plain one, or refused by name.

A flow is a function that is given `pack`, and returns a dict of tensors. It is run twice with a `pack` that
does nothing, and once with one that packs.
"""

from __future__ import annotations

from .adapters import ADAPTERS
from .copying import COPYING
from .libraries import LIBRARIES
from .processes import PROCESSES
from .tampering import TAMPERING
from .tools import Flow, verdict

FLOWS: dict[str, Flow] = {**ADAPTERS, **COPYING, **TAMPERING, **LIBRARIES, **PROCESSES}

__all__ = ["FLOWS", "verdict"]
