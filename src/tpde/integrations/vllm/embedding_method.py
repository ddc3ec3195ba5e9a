"""Embeddings and heads with packed weights."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, nn
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from tpde.integrations.vllm import handle_operators, internals
from tpde.integrations.vllm.linear_method import Decoded, TpdeLinearMethod
from tpde.integrations.vllm.report import LoadReport
from tpde.integrations.vllm.weights import Weight, has_bits
from tpde.weights.packed_tensor import PackedTensor


class TpdeEmbeddingMethod(TpdeLinearMethod):
    """Holds the matrix of an embedding or a head packed.

    A head that is tied by the model's configuration, and of which files hold a copy, shares the embedding's
    packed matrix as long as both have the same bits.

    Parameters
    ----------
    report : LoadReport
        See `TpdeLinearMethod`.
    name : str
        What errors call the layer.
    may_share : bool
        Whether there is such a copy.
    """

    def __init__(self, report: LoadReport, name: str, *, may_share: bool = False) -> None:
        super().__init__(report, name)
        self._may_share = may_share and self.uses_meta_device
        self._other: weakref.ref[nn.Module] | None = None

    def pair(self, other: nn.Module) -> None:
        """Be told of the only head beside an embedding, or the embedding beside a head."""
        if self._may_share:
            self._other = weakref.ref(other)

    def _weight_of_other(self) -> Weight | None:
        """That of the other layer, if it is loaded and packed."""
        other = None if self._other is None else self._other()
        weight: Weight | None = None if other is None else other.__dict__.get("tpde")
        return None if weight is None or weight.packed is None else weight

    def _pack(self, plain: Tensor, spare: bool) -> PackedTensor | None:
        other = self._weight_of_other()
        if other is not None and other.packed is not None and has_bits(other.packed, plain):
            return other.packed
        return super()._pack(plain, spare)

    def _reload(self, layer: Any, weight: Weight) -> None:
        """Take other values, also for the other layer until its own come, which may differ."""
        other = self._weight_of_other()
        if other is None or other.packed is not weight.packed or weight.packed is None:
            weight.reload(layer)
        elif other.is_awaited:
            weight.reload(layer)
            other.follow(weight)
        elif has_bits(weight.packed, layer.weight.detach().contiguous()):
            weight.put_back(layer)
        else:
            weight.part()
            weight.reload(layer)

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
        """The embedding itself is the head: it multiplies, too, and has the head's bias, if there is one.

        Where the model has PyTorch's own embedding, as Whisper, which stays plain, so does the head.
        """
        if not isinstance(getattr(embed_tokens, "quant_method", None), TpdeEmbeddingMethod):
            layer.quant_method = self._plain
            return self._plain.tie_weights(layer, embed_tokens)  # type: ignore[no-any-return]
        embed_tokens.register_parameter("bias", layer.bias)
        return embed_tokens

    def _needs_values(self) -> bool:
        """A draft without embeddings or a head is given the model's."""
        return not internals.may_be_draft()
