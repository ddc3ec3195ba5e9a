"""What is asked of a packed weight and needs none of its values."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from tpde.weights.readonly import Function

_T = torch.Tensor
_PROPERTIES = (
    *("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad", "grad_fn", "names"),
    *("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_sparse_csr", "is_quantized", "is_nested", "is_xpu"),
    *("is_mkldnn", "is_mps", "is_ipu", "is_mtia", "is_maia", "is_vulkan", "is_xla", "itemsize", "nbytes"),
    *(
        "_version",
        "output_nr",
        "retains_grad",
        "_backward_hooks",
        "_base",
        "_grad",
        "_post_accumulate_grad_hooks",
    ),
)
_METHODS = (
    *("size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "storage_offset"),
    *("is_contiguous", "is_floating_point", "is_complex", "is_signed", "get_device", "has_names", "__len__"),
    *("is_inference", "is_conj", "is_neg", "is_same_size", "__hash__", "register_hook", "retain_grad"),
    *(
        "register_post_accumulate_grad_hook",
        "is_pinned",
        "dim_order",
        "_is_view",
        "__format__",
        "is_distributed",
    ),
)
# What is answered without values.
QUERIES: set[object] = {
    *(getattr(_T, name).__get__ for name in _PROPERTIES if hasattr(_T, name)),
    *(getattr(_T, name) for name in _METHODS if hasattr(_T, name)),
    *(torch.is_floating_point, torch.is_complex, torch.is_signed, torch.numel, torch.is_same_size),
    *(torch.is_inference, torch.is_conj, torch.is_neg, torch.get_device),
    _T.grad.__set__,  # type: ignore[union-attr]
}
# What `tensor.type()` says.
TYPES = {
    torch.float32: "FloatTensor",
    torch.float64: "DoubleTensor",
    torch.float16: "HalfTensor",
    torch.bfloat16: "BFloat16Tensor",
}


def new(func: Function[Tensor], weight: Tensor, *args: object, **kwargs: object) -> Tensor:
    """A tensor like it, without its values."""
    return func(torch.empty(0, dtype=weight.dtype, device=weight.device), *args, **kwargs)


def empty_like(func: object, weight: Tensor, **kwargs: object) -> Tensor:
    """Memory like its plain value's."""
    kwargs.pop("memory_format", None)
    empty = cast("Function[Tensor]", torch.empty)  # which says itself what it does not take
    return empty(weight.shape, **{"dtype": weight.dtype, "device": weight.device, **kwargs})
