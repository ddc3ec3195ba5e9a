"""Libraries that are not installed, and seem to be."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest


def installed(patch: pytest.MonkeyPatch, name: str) -> None:
    """Let a library be found that has nothing in it."""
    made = ModuleType(name)
    made.__spec__ = ModuleSpec(name, None)
    patch.setitem(sys.modules, name, made)
