"""A packed weight as the rest of PyTorch sees it: a parameter.

It has the plain weight's shape, dtype and device; reading these decodes nothing. Whatever computes with it
gets a decoded copy. It cannot be changed, but for another packed weight that is copied to it, or values that
it has already.
"""

from __future__ import annotations

import contextlib
from typing import NoReturn, SupportsIndex, cast

import torch
from torch import Tensor

from tpde.errors import InvalidInput, PackedWeight
from tpde.weights.frozen import CONTIGUOUS, as_looked_up, as_weight, formatted
from tpde.weights.functions import Operator, Packed, call, dispatch
from tpde.weights.packed_memory import no_memory
from tpde.weights.packed_tensor import PackedTensor, rebuild_tensor
from tpde.weights.readonly import Function
from tpde.weights.transforms import refuse_trace, untransformed

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class PackedParameter(Packed):
    """A parameter whose value is a packed weight.

    Its own `requires_grad` is false: it cannot be trained. What the plain weight says is kept, since PyTorch
    chooses kernels by it; setting it to false is allowed, as freezing a plain weight is.

    Parameters
    ----------
    packed : PackedTensor
        The weight. Another `PackedParameter` gives its own.
    requires_grad : bool
        What the plain weight says.
    memory_format : torch.memory_format
        Of the plain weight. What is packed is contiguous, and put in another one when it is decoded.

    Raises
    ------
    PackedWeight
        If `packed` is an ordinary tensor.

    Attributes
    ----------
    packed : PackedTensor
        The weight at rest.
    plain_requires_grad : bool
        What the plain weight says.
    memory_format : torch.memory_format
        Of the plain weight.

    Examples
    --------
    >>> parameter = PackedParameter(packed)  # doctest: +SKIP
    >>> parameter.shape, parameter.dtype  # decodes nothing  # doctest: +SKIP
    (torch.Size([4096, 4096]), torch.bfloat16)
    >>> x @ parameter.t()  # decodes  # doctest: +SKIP
    """

    def __new__(
        cls,
        packed: PackedTensor | Tensor,
        requires_grad: bool = False,
        memory_format: torch.memory_format = CONTIGUOUS,
    ) -> PackedParameter:
        """A parameter for a packed weight."""
        if isinstance(packed, PackedParameter):  # accelerate makes parameters anew
            memory_format = packed.memory_format
            requires_grad, packed = requires_grad or packed.plain_requires_grad, packed.packed
        if not isinstance(packed, PackedTensor):
            raise PackedWeight(
                f"a packed parameter holds a packed weight, not a {type(packed).__name__}",
                hint="call `tpde.unpack_module(module)` first to give it other values",
            )
        strides = None
        if memory_format is not CONTIGUOUS:
            strides = torch.empty(packed.shape, device="meta").to(memory_format=memory_format).stride()
        # What is made in inference mode could not be trained around; to switch it off switches gradients on.
        inference = torch.is_inference_mode_enabled()
        with torch.inference_mode(False) if inference else contextlib.nullcontext():
            made: PackedParameter = torch.Tensor._make_wrapper_subclass(
                cls, packed.shape, strides, dtype=packed.dtype, device=packed.device, requires_grad=False
            )
        torch._C._set_throw_on_mutable_data_ptr(made)  # `to_dlpack` asks nobody, and would point to nothing
        made.packed, made.plain_requires_grad = packed, requires_grad
        made.memory_format = memory_format
        return made

    # ---- what it holds ----

    def plain(self, room: int = 0) -> Tensor:
        """The weight decoded, in memory of its own, which says of gradients what the plain one says.

        Parameters
        ----------
        room : int
            Bytes of that memory, at least.

        Raises
        ------
        Corrupt
            Naming tensor and chunk.
        PackedWeight
            If it is larger than any buffer, or a tracer would keep it.
        """
        refuse_trace(self.packed.name)
        with untransformed():
            flat = self.packed.decoded(room).view(-1).view(torch.uint8)
            weight = as_weight(flat, self.packed.dtype, self.packed.shape, self.plain_requires_grad)
            return formatted(weight, self.memory_format)

    def like(self, packed: PackedTensor) -> PackedParameter:
        """Another packed weight, in a parameter that says the same of gradients and memory format."""
        return PackedParameter(packed, self.plain_requires_grad, self.memory_format)

    def detached(self) -> PackedParameter:
        """The same weight in another parameter, which was never to be trained."""
        return PackedParameter(self.packed, memory_format=self.memory_format)

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of a matrix, as `embedding` looks them up."""
        return as_looked_up(self.packed.rows(ids), self.plain_requires_grad)

    def takes(self, values: Tensor) -> bool:
        """Whether `values` can be copied here: another packed weight, or what this one holds already.

        Raises
        ------
        InvalidInput, PackedWeight
            If it is a packed weight that is not alike: see `PackedTensor.check_load`.
        """
        if isinstance(values, PackedParameter):
            if values.packed is not self.packed:
                self.packed.check_load(values.packed)
            return True
        if not isinstance(values, Tensor) or values.is_meta or values.shape != self.shape:
            return False
        mine, word = self.packed.decoded().view(-1), _INTEGERS[self.packed.dtype.itemsize]
        theirs = values.detach().to(mine.device, mine.dtype).contiguous().view(-1)
        return torch.equal(mine.view(word), theirs.view(word))

    def sync(self) -> None:
        """Say where the weight is, after it was moved."""
        with torch._C.DisableTorchFunctionSubclass():
            moved = PackedParameter(self.packed, memory_format=self.memory_format)
            if super().device != self.packed.device or super().stride() != moved.stride():
                torch.Tensor.data.__set__(self, moved)  # type: ignore[attr-defined]

    def _use_count(self) -> int:
        """Refuse to be swapped: `torch.utils.swap_tensors` asks both tensors for it first."""
        raise PackedWeight(
            f"`{self.packed.name}` is packed, and cannot be swapped for another tensor",
            hint="call `tpde.unpack_module(module)` first",
        )

    def _typed_storage(self) -> NoReturn:  # which `__torch_function__` is not asked for
        raise no_memory(self.packed.name, "_typed_storage")

    # ---- copying ----

    def __deepcopy__(self, memo: dict[int, object]) -> PackedParameter:
        found = memo.get(id(self))
        if found is None:
            packed = memo.get(id(self.packed)) or self.packed.__deepcopy__(memo)
            found = memo[id(self)] = self.like(cast(PackedTensor, packed))  # a copy of one
        return cast(PackedParameter, found)

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        return rebuild_parameter, (self.packed, self.plain_requires_grad, str(self.memory_format))

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        ratio = self.packed.packed_bytes / max(self.packed.nbytes, 1)
        return (
            f"PackedParameter({list(self.packed.shape)}, {self.packed.dtype}, device={self.packed.device}, "
            f"packed={ratio:.3f})"
        )

    # ---- computing ----

    @classmethod
    def __torch_function__(
        cls,
        func: Function[object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Answer what needs no values, refuse what changes them, and compute the rest from a decoded copy."""
        return call(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Operator,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """The same for code in C++, which does not ask `__torch_function__`."""
        return dispatch(func, args, kwargs or {})


# Formats by their names, each with the number of dimensions that it is for; 0 is any.
_FORMATS = {
    str(it): (it, rank)
    for it, rank in ((CONTIGUOUS, 0), (torch.channels_last, 4), (torch.channels_last_3d, 5))
}


def rebuild_parameter(packed: PackedTensor, requires_grad: bool, memory_format: str) -> PackedParameter:
    """A packed parameter from what `pickle` kept of it.

    Raises
    ------
    InvalidInput
        If it is no packed weight, or names a memory format that such a weight cannot have.
    """
    if not isinstance(packed, PackedTensor):
        raise InvalidInput(f"what was pickled is no packed weight, but a {type(packed).__name__}")
    known = _FORMATS.get(memory_format) if isinstance(memory_format, str) else None
    if known is None or known[1] not in (0, len(packed.shape)):
        raise InvalidInput(
            f"`{packed.name}` of shape {list(packed.shape)} was pickled with {str(memory_format)[:200]!r}, "
            "which is no memory format of such a weight",
            hint="fetch it again",
        )
    return PackedParameter(packed, requires_grad, known[0])


# What `torch.load(weights_only=True)` may call: both check what they are given.
torch.serialization.add_safe_globals([rebuild_parameter, rebuild_tensor])
