"""Weights within transforms of `torch.func`: `grad`, `vmap`, `jvp` and what is made of them.

There, tensors that are made belong to the innermost transform, and have no memory to decode to. A weight is a
constant to all of them, and is decoded outside of all.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad
from torch.fx import _symbolic_trace

from tpde.errors import PackedWeight


def transformed() -> bool:
    """Whether this thread computes within a transform."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def forward_mode() -> bool:
    """Whether forward-mode derivatives are computed, which tpde's operators do not have; may be compiled."""
    return forward_ad._current_level >= 0


def untransformed() -> AbstractContextManager[object]:
    """Compute outside of all transforms meanwhile."""
    return temporarily_clear_interpreter_stack()


def is_transformed(tensor: Tensor) -> bool:
    """Whether a tensor belongs to a transform, and so has no memory of its own."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def refuse_trace(name: str) -> None:
    """Refuse `torch.jit.trace`, `torch.fx.symbolic_trace`, `make_fx`, and what is made of them.

    What they make would hold decoded weights as constants: views of memory that the next layer decodes to.

    Raises
    ------
    PackedWeight
        If this thread is in one.
    """
    if torch._C._get_tracing_state() is not None or _symbolic_trace._is_fx_tracing_flag:
        raise PackedWeight(
            f"the packed weights of `{name}` would be constants of what a tracer makes (`torch.jit.trace`, "
            "`torch.fx`, `torch.func.linearize`)",
            hint="call `tpde.unpack_module(model)` first",
        )


def refuse_export() -> None:
    """Refuse `torch.export`.

    Raises
    ------
    PackedWeight
        If it is under way.
    """
    if torch.compiler.is_exporting():
        raise PackedWeight(
            "the model's weights are packed, and would not be in what `torch.export` makes",
            hint="call `tpde.unpack_module(model)` first",
        )
