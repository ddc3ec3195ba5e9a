"""tpde makes neural-network weights small without changing one bit.

`pack` and `unpack` turn safetensors files and model directories into smaller ones and back, `verify` checks
them, `inspect` tells what is in them, and `safe_open` reads tensors straight from the packed form. `diff`
stores what changed between two states of a model, and `patch` restores it; `make_delta` and `apply_delta` do
so with live tensors, and `CheckpointStore` keeps the steps of a training run.
`pack_module` packs a live PyTorch model, which goes on computing the same bits, and `unpack_module` turns it
back. `tpde.torch` and `tpde.numpy` save and load in the manner of `safetensors.torch` and
`safetensors.numpy`.

Importing this package loads nothing: neither NumPy nor torch, nor the native core.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpde.access import safe_open
    from tpde.errors import (
        AlreadyPacked,
        CompileError,
        Corrupt,
        DestinationExists,
        InvalidArgument,
        InvalidDestination,
        InvalidIndex,
        InvalidInput,
        MissingBase,
        MissingDependency,
        MissingShard,
        NativeError,
        NotJson,
        NotPacked,
        NotSafetensors,
        OutOfMemory,
        PackedWeight,
        ReadError,
        TpdeError,
        Truncated,
        UnknownTensor,
        UnsafePickle,
        UnsupportedDevice,
        UnsupportedDtype,
        UnsupportedVersion,
    )
    from tpde.files.inspection import inspect
    from tpde.files.operations import pack, unpack, verify
    from tpde.files.writer import PackedWriter
    from tpde.format.container import TensorSpec
    from tpde.integrations.register import register
    from tpde.integrations.transformers import from_pretrained
    from tpde.loading.live_models import pack_module, unpack_module
    from tpde.store.checkpoints import CheckpointStore
    from tpde.store.diffing import diff
    from tpde.store.live_deltas import make_delta
    from tpde.store.patching import patch
    from tpde.weights.apply_delta import apply_delta

__version__ = "0.1.0"

_ERRORS = (
    "AlreadyPacked",
    "CompileError",
    "Corrupt",
    "DestinationExists",
    "InvalidArgument",
    "InvalidDestination",
    "InvalidIndex",
    "InvalidInput",
    "MissingBase",
    "MissingDependency",
    "MissingShard",
    "NativeError",
    "NotJson",
    "NotPacked",
    "NotSafetensors",
    "OutOfMemory",
    "PackedWeight",
    "ReadError",
    "TpdeError",
    "Truncated",
    "UnknownTensor",
    "UnsafePickle",
    "UnsupportedDevice",
    "UnsupportedDtype",
    "UnsupportedVersion",
)
_WHERE = {
    **dict.fromkeys(_ERRORS, "errors"),
    "CheckpointStore": "store.checkpoints",
    "PackedWriter": "files.writer",
    "TensorSpec": "format.container",
    "apply_delta": "weights.apply_delta",
    "diff": "store.diffing",
    "from_pretrained": "integrations.transformers",
    "inspect": "files.inspection",
    "make_delta": "store.live_deltas",
    "pack": "files.operations",
    "pack_module": "loading.live_models",
    "patch": "store.patching",
    "register": "integrations.register",
    "safe_open": "access",
    "unpack": "files.operations",
    "unpack_module": "loading.live_models",
    "verify": "files.operations",
}

_MODULES = ("errors", "nn", "numpy", "torch")  # that are used by these names

__all__ = [
    "AlreadyPacked",
    "CheckpointStore",
    "CompileError",
    "Corrupt",
    "DestinationExists",
    "InvalidArgument",
    "InvalidDestination",
    "InvalidIndex",
    "InvalidInput",
    "MissingBase",
    "MissingDependency",
    "MissingShard",
    "NativeError",
    "NotJson",
    "NotPacked",
    "NotSafetensors",
    "OutOfMemory",
    "PackedWeight",
    "PackedWriter",
    "ReadError",
    "TensorSpec",
    "TpdeError",
    "Truncated",
    "UnknownTensor",
    "UnsafePickle",
    "UnsupportedDevice",
    "UnsupportedDtype",
    "UnsupportedVersion",
    "__version__",
    "apply_delta",
    "diff",
    "from_pretrained",
    "inspect",
    "make_delta",
    "pack",
    "pack_module",
    "patch",
    "register",
    "safe_open",
    "unpack",
    "unpack_module",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        if name in ("apply_delta", "make_delta", "pack_module", "unpack_module"):
            from tpde.frameworks import require_torch

            require_torch(f"`tpde.{name}`")
        value = getattr(importlib.import_module(f"tpde.{_WHERE[name]}"), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return importlib.import_module(f"tpde.{name}")
    raise AttributeError(f"module `tpde` has no attribute `{name}`")


def __dir__() -> list[str]:
    return sorted(__all__)
