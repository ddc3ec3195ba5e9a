"""Weights within transforms of `torch.func`: `grad`, `vmap`, `jvp` and what is made of them.

There, tensors that are made belong to the innermost transform, and have no memory to decode to. A weight is a
constant to all of them, and is decoded outside of all.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack


def transformed() -> bool:
    """Whether this thread computes within a transform."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def untransformed() -> AbstractContextManager[object]:
    """Compute outside of all transforms meanwhile."""
    return temporarily_clear_interpreter_stack()


def is_transformed(tensor: Tensor) -> bool:
    """Whether a tensor belongs to a transform, and so has no memory of its own."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)
