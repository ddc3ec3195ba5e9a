"""Linear layers whose sums are not split over GPUs, for results that do not depend on how many there are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tpde.integrations.vllm import internals
from tpde.integrations.vllm.linear_method import TpdeLinearMethod
from tpde.integrations.vllm.report import log


class WholeRowsMethod(TpdeLinearMethod):
    """Holds rows of a matrix of which vLLM gives each GPU some columns (`RowParallelLinear`).

    With columns cut, vLLM rounds each GPU's sums, and adds them. Here each GPU gathers x, and computes its
    share of the result from all columns: the bits that one GPU gives. Elsewhere it has -0, which changes no
    number that it is added to, so that vLLM's own sum over GPUs puts the result together.
    """

    _rank, _size, _is_cut = 0, 1, False  # until a layer creates its weight

    def create_weights(  # vLLM names these arguments
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        **more: Any,
    ) -> None:
        """Give the layer a weight of all columns and of this GPU's rows.

        Of as many columns as vLLM would, with a warning, if rows cannot be shared out evenly.
        """
        self._is_cut = layer.tp_size > 1 and output_size % layer.tp_size == 0
        if self._is_cut:
            self._rank, self._size, input_size_per_partition = layer.tp_rank, layer.tp_size, input_size
            output_partition_sizes = [output_size // layer.tp_size]
            more["weight_loader"] = self.load
            self.report.cut_by_rows()
        elif layer.tp_size > 1:
            log.warning(
                "tpde: %s has %d rows, which %d GPUs cannot share evenly: its sums are split over them, "
                "and results depend on their number",
                *(self._name, output_size, layer.tp_size),
            )
        super().create_weights(
            layer,
            input_size_per_partition=input_size_per_partition,
            output_partition_sizes=output_partition_sizes,
            input_size=input_size,
            output_size=output_size,
            **more,
        )

    def load(self, param: nn.Parameter, loaded_weight: Tensor) -> None:
        """Copy this GPU's rows of a whole matrix, as vLLM's own loader does with columns."""
        rows = param.shape[0]
        assert loaded_weight.shape == (self._size * rows, param.shape[1])
        param.data.copy_(loaded_weight[self._rank * rows :][:rows])

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute this GPU's share of `x @ W.T + bias`, with -0 elsewhere.

        vLLM gives the bias to the first GPU alone. Here each adds its part, before it rounds.
        """
        if not self._is_cut:
            return super().apply(layer, x, bias)
        rows = layer.tpde_shape[0]
        first = self._rank * rows
        added = layer.bias is not None and not layer.skip_bias_add
        bias = layer.bias[first : first + rows] if added else None
        made = super().apply(layer, internals.gather_columns(x), bias)
        return torch.nn.functional.pad(made, (first, layer.output_size - first - rows), value=-0.0)
