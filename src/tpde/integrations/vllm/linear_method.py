"""Linear layers with packed weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from vllm.model_executor.layers.linear import LinearMethodBase, UnquantizedLinearMethod

from tpde.cuda import prefix_kernels, window_products
from tpde.frameworks import torch_dtype_name
from tpde.integrations.vllm import handle_operators, internals, merged_parts, refusals
from tpde.integrations.vllm.report import LoadReport
from tpde.integrations.vllm.weights import HANDLE, OffloadedWeight, Weight, hold
from tpde.weights.packed_tensor import PackedTensor


class Decoded:
    """A layer as plain vLLM's method takes it: with a weight that is there for one call."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight


class TpdeLinearMethod(LinearMethodBase):  # type: ignore[misc]
    """Holds a linear layer's weight packed.

    Parameters
    ----------
    report : LoadReport
        Which kernels are wanted, and where it is counted what becomes of the weight.
    name : str
        What errors call the layer.
    """

    def __init__(self, report: LoadReport, name: str) -> None:
        self.report, self._name = report, name
        self.uses_meta_device = not internals.may_be_offloaded(name)
        self._plain = self._plain_method()

    def _plain_method(self) -> Any:
        """What vLLM has for plain weights of such a layer."""
        return UnquantizedLinearMethod()

    def create_weights(self, layer: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Give the layer the weight that a plain one has, without memory, until all of it was read.

        With memory where vLLM moves it to the host at once.
        """
        if not self.uses_meta_device:
            self._plain.create_weights(layer, *args, **kwargs)
            self.report.awaited += not layer.weight.is_meta  # as of a tower that is left out
            return
        with torch.device("meta"):
            self._plain.create_weights(layer, *args, **kwargs)
        self._compile_ahead(layer)

    def _compile_ahead(self, layer: Any) -> None:
        """Compile kernels for a layer's weight while weights are read."""
        weight, device = layer.weight, internals.load_device()
        if device.type != "cuda":
            return
        if self.report.kernels == "fused" and weight.dtype is torch.bfloat16:
            rows, columns = weight.shape
            window_products.compile_ahead(rows, columns, device.index)
        else:
            prefix_kernels.compile_ahead(torch_dtype_name(weight.dtype), device.index, packing=True)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Pack what was loaded. vLLM calls this for each layer, and once more for all."""
        if (before := layer.__dict__.get("tpde")) is not None:
            if HANDLE not in layer._buffers:  # vLLM took the layer apart, and loaded it anew
                merged_parts.check(layer, self._name)
                self._reload(layer, before)
                return
            if before.packed is not None and layer.weight.data.dtype != torch.uint8:
                raise refusals.no_reload(self._name)
            self.report.tell()
            return
        weight: Tensor = layer.weight
        if weight.is_meta:  # of a layer that the model was made without, as a head for embeddings of texts
            if not internals.loads_packed():
                raise refusals.other_loader(self._name)
            return
        if self.uses_meta_device and self._needs_values() and not internals.has_values(layer, "weight"):
            raise refusals.no_values(self._name)
        merged_parts.check(layer, self._name)
        layer.tpde_shape = [*weight.shape]
        mover = internals.mover_of(weight)
        spare = mover is None and internals.records_graphs()
        packed = self._pack(weight.detach().contiguous(), spare)
        if mover is not None:
            self.report.on_host(weight.nbytes, weight.nbytes if packed is None else packed.packed_bytes)
        if packed is not None and mover is not None:
            layer.__dict__["tpde"] = OffloadedWeight(layer, packed, self._plain)
            internals.forget_plain(mover)
        else:
            layer.__dict__["tpde"] = Weight(layer, packed, self._plain)
        if not self.uses_meta_device:
            self.report.awaited -= 1
            if not self.report.awaited and not self.report.any_on_host:
                raise refusals.nothing_moved()
            self.report.tell()

    def _pack(self, plain: Tensor, spare: bool) -> PackedTensor | None:
        return hold(self.report, plain, self._name, spare=spare)

    def _reload(self, layer: Any, weight: Weight) -> None:
        weight.reload(layer)

    def _needs_values(self) -> bool:
        """Whether the layer is of no use without values from files."""
        return True

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x @ W.T + bias`.

        With exact kernels the compiler sees the product, as it does of plain weights: it fuses some with what
        follows, which then rounds otherwise. What it sees depends on nothing but the kernels: vLLM keeps
        compiled code for models that are configured alike, of which other layers may be packed.
        """
        if self._is_seen() and not internals.prepares_weights():
            weight = handle_operators.decoded(x, layer.tpde_handle, layer.tpde_shape, x.dtype)
            return self._plain.apply(Decoded(weight), x, bias)  # type: ignore[no-any-return]
        return handle_operators.linear(x, layer.tpde_handle, bias, layer.tpde_shape[0])  # type: ignore[no-any-return]

    def _is_seen(self) -> bool:
        """Whether the compiler is to see what is computed with the decoded weight."""
        return is_compiling() and self.report.kernels == "exact"
