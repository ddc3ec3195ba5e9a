"""Embeddings and heads with packed weights."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from tpde.integrations.vllm import handle_operators, internals
from tpde.integrations.vllm.linear_method import Decoded, TpdeLinearMethod


class TpdeEmbeddingMethod(TpdeLinearMethod):
    """Holds the matrix of an embedding or a head packed."""

    def _plain_method(self) -> Any:
        return UnquantizedEmbeddingMethod()

    def embedding(self, layer: Any, ids: Tensor) -> Tensor:
        """Rows of the matrix.

        With exact kernels, compiled code looks them up in the decoded matrix, as in a plain one: PyTorch's
        compiler puts that and the first norm in one kernel, whose sums would go in another order.
        """
        if self._is_seen():
            matrix = handle_operators.decoded(ids, layer.tpde_handle, layer.tpde_shape, layer.params_dtype)
            return self._plain.embedding(Decoded(matrix), ids)  # type: ignore[no-any-return]
        return handle_operators.embedding(  # type: ignore[no-any-return]
            ids, layer.tpde_handle, layer.embedding_dim, layer.params_dtype
        )

    def tie_weights(self, layer: Any, embed_tokens: nn.Module) -> nn.Module:
        """The embedding itself is the head: it multiplies, too, and has the head's bias, if there is one."""
        embed_tokens.register_parameter("bias", layer.bias)
        return embed_tokens

    def _needs_values(self) -> bool:
        """A draft without embeddings or a head is given the model's."""
        return not internals.may_be_draft()
