"""Custom operators over packed weights, for code that vLLM compiles: see `tpde.integrations.vllm`.

Each takes the handle of what it is about, and what its result looks like.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tpde.integrations.vllm.internals import direct_register_custom_op
from tpde.integrations.vllm.weights import held_by


def _linear(x: Tensor, handle: Tensor, bias: Tensor | None, width: int) -> Tensor:
    made: Tensor = held_by(handle).product(x, bias)
    return made


def _linear_like(x: Tensor, handle: Tensor, bias: Tensor | None, width: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], width))


def _decoded(x: Tensor, handle: Tensor, shape: list[int], dtype: torch.dtype) -> Tensor:
    made: Tensor = held_by(handle).decoded()
    return made


def _decoded_like(x: Tensor, handle: Tensor, shape: list[int], dtype: torch.dtype) -> Tensor:
    return x.new_empty(shape, dtype=dtype)


def _embedding(ids: Tensor, handle: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    made: Tensor = held_by(handle).rows(ids)
    return made


def _embedding_like(ids: Tensor, handle: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    return ids.new_empty((*ids.shape, width), dtype=dtype)


def _experts(ids: Tensor | None, handle: Tensor, shape: list[int], dtype: torch.dtype) -> Tensor:
    stack = held_by(handle)
    made: Tensor = stack.decoded(stack.chosen(ids))
    return made


def _experts_like(ids: Tensor | None, handle: Tensor, shape: list[int], dtype: torch.dtype) -> Tensor:
    return handle.new_empty(shape, dtype=dtype)


_TAGS = (torch.Tag.needs_fixed_stride_order,)
direct_register_custom_op("tpde_linear", _linear, fake_impl=_linear_like, tags=_TAGS)
direct_register_custom_op("tpde_decoded", _decoded, fake_impl=_decoded_like, tags=_TAGS)
direct_register_custom_op("tpde_embedding", _embedding, fake_impl=_embedding_like, tags=_TAGS)
direct_register_custom_op("tpde_experts", _experts, fake_impl=_experts_like, tags=_TAGS)

linear = torch.ops.vllm.tpde_linear
decoded = torch.ops.vllm.tpde_decoded  # computed after `x`: by then an offloaded weight is there
embedding = torch.ops.vllm.tpde_embedding
experts = torch.ops.vllm.tpde_experts
