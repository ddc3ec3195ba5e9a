"""The parameter of a layer whose weight is packed: a blob that says of itself what the plain weight is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tpde.integrations.vllm import refusals
from tpde.weights.packed_tensor import PackedTensor

# What models do with matrices past their layers, by names of `Tensor`, of `torch` and of its `functional`. Of
# a blob these would give bytes, most without a word.
_PARTS = (
    "__getitem__ cat chunk expand flatten flip gather index_select narrow numpy permute repeat reshape roll "
    "split stack t take tolist transpose unbind unfold view where"
)
_PRODUCTS = (
    "__matmul__ __rmatmul__ addmm addmv baddbmm bilinear bmm dot einsum embedding linear matmul mm mv outer "
    "tensordot"
)
_CASTS = "bfloat16 double float half int long type type_as"
_NUMBERS = (
    "__abs__ __add__ __mul__ __neg__ __pow__ __radd__ __rmul__ __rsub__ __rtruediv__ __sub__ __truediv__ abs "
    "add clamp div exp gelu log log_softmax mul neg normalize pow relu sigmoid silu softmax sqrt sub tanh "
    "true_divide all amax amin any argmax argmin max mean min norm prod sort std sum topk var"
)
_NAMES = " ".join((_PARTS, _PRODUCTS, _CASTS, _NUMBERS)).split()
_TAKEN_APART = (
    Tensor.T.__get__,  # type: ignore[attr-defined]
    Tensor.mT.__get__,  # type: ignore[attr-defined]
    *(getattr(owner, it) for owner in (Tensor, torch, functional) for it in _NAMES if hasattr(owner, it)),
)


class BlobParameter(nn.Parameter):
    """A blob where a module has a parameter. Other values are not written into it, and it is not taken apart.

    vLLM copies `data`, which is the blob as a plain tensor. `size` and `dim` are the blob's: PyTorch's
    compiler asks for these, and for its strides, where compiled code has a parameter.
    """

    layer_name = ""  # not `name`, which tensors have, and the compiler reads of no other class
    plain_dtype = torch.uint8  # until it is told
    plain_shape: tuple[int, ...] | None = None

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """The plain weight's: some models cast what they multiply to it. The blob's own is `data.dtype`."""
        return self.plain_dtype

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """The plain weight's: a draft takes the model's embedding if it has as many columns."""
        return self.data.shape if self.plain_shape is None else torch.Size(self.plain_shape)

    @classmethod
    def of(cls, packed: PackedTensor, memory: Tensor | None = None) -> BlobParameter:
        """That of a packed weight of one source, by default in the source's memory."""
        made = cls(packed.sources[0].memory if memory is None else memory, requires_grad=False)
        made.layer_name, made.plain_dtype, made.plain_shape = packed.name, packed.dtype, packed.shape
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As of any parameter, but for what takes a matrix apart, casts it, or computes with it.

        Raises
        ------
        PackedWeight
            If it is that.
        """
        if func in _TAKEN_APART or (func is Tensor.to and _names_dtype(args[1:], kwargs)):
            _refuse([it.layer_name for it in _flat(args, kwargs) if isinstance(it, cls)])
        with torch._C.DisableTorchFunctionSubclass():  # which the compiler can trace
            return func(*args, **(kwargs or {}))

    def weight_loader(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse it: so models load what files hold, which they would compare with the blob's shape.

        Raises
        ------
        PackedWeight
            Always.
        """
        raise refusals.no_reload(self.layer_name)

    def copy_(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse it: so vLLM writes weights that come in the form that it has in memory.

        Raises
        ------
        PackedWeight
            Always.
        """
        raise refusals.no_reload(self.layer_name)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _refuse(names: list[str]) -> None:
    """Raise it; PyTorch's compiler, too, which calls this while it traces, and reports what is raised."""
    raise refusals.no_matrix(names[0] if names else "")


def _names_dtype(args: Any, kwargs: Any) -> bool:
    """Whether arguments of `Tensor.to` have a dtype, or a tensor whose dtype is meant."""
    return any(isinstance(it, torch.dtype | Tensor) for it in _flat(args, kwargs))


def _flat(args: Any, kwargs: Any) -> Iterator[Any]:
    for it in (*args, *(kwargs or {}).values()):
        if isinstance(it, list | tuple):
            yield from it
        else:
            yield it
