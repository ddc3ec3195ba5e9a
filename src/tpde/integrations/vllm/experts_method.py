"""Mixtures of experts with packed weights."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tpde.integrations.vllm import handle_operators, refusals
from tpde.integrations.vllm.internals import (
    FusedMoEMethodBase,
    UnquantizedFusedMoEMethod,
    initialize_online_processing,
    replace_parameter,
)
from tpde.integrations.vllm.report import LoadReport
from tpde.integrations.vllm.weights import give_handle, hold
from tpde.weights.launch import capturing
from tpde.weights.span import Span

if TYPE_CHECKING:
    from tpde.weights.packed_tensor import PackedTensor

NAMES = ("w13_weight", "w2_weight")


class ExpertStack:
    """The matrices of all experts for one of the two products, packed as one tall matrix.

    Parameters
    ----------
    layer : nn.Module
        Whose they are. It gets the blob in their place.
    name : str
        Of its parameter.
    packed : PackedTensor
        Of two dimensions: the experts' matrices, one below the other.
    """

    def __init__(self, layer: Any, name: str, packed: PackedTensor) -> None:
        self._layer, self.packed = weakref.ref(layer), packed
        self.handle, self.shape = f"tpde_{name}", list(layer.get_parameter(name).shape)
        packed.prepare()
        replace_parameter(layer, name, packed.sources[0].memory)
        give_handle(self, layer, self.handle, packed.device)

    def decoded_for(self, ids: Tensor | None) -> Tensor:
        """The matrices as plain vLLM takes them, for what a router chose; of others, anything. None is all.

        The host has to know which these are, so that it waits for the device. While a CUDA graph is recorded
        it cannot, and all are decoded.
        """
        if ids is None or ids.numel() >= self.shape[0] or capturing(ids.device):
            return self.decoded(None)
        numbers = torch.unique(ids)
        layer: Any = self._layer()
        if layer.expert_map is not None:
            numbers = torch.unique(layer.expert_map[numbers.long()])
        return self.decoded([it for it in numbers.tolist() if it >= 0])

    def decoded(self, experts: list[int] | None) -> Tensor:
        """The matrices of some experts, in a tensor with room for all; None is all."""
        if experts is None:
            return self.packed.decoded().view(self.shape)
        size = self.packed.nbytes
        step = size // self.shape[0]
        with torch.inference_mode(False), torch.no_grad():
            room = torch.empty(size, dtype=torch.uint8, device=self.packed.device)
            for first, last in _runs(experts):
                part = room[first * step : (last + 1) * step].view(self.packed.dtype)
                Span(self.packed, first * step, (last + 1) * step).decode_to(part)
            return room.view(self.packed.dtype).view(self.shape)


def _runs(numbers: list[int]) -> list[tuple[int, int]]:
    """Ascending numbers as runs: first and last of each."""
    found: list[tuple[int, int]] = []
    for it in numbers:
        if found and found[-1][1] + 1 == it:
            found[-1] = found[-1][0], it
        else:
            found.append((it, it))
    return found


class _Decoded:
    """A layer as plain vLLM's method takes it: with weights that are there for one call."""

    def __init__(self, layer: Any, w13_weight: Tensor, w2_weight: Tensor) -> None:
        self._layer, self.w13_weight, self.w2_weight = layer, w13_weight, w2_weight

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


class TpdeExpertsMethod(FusedMoEMethodBase):  # type: ignore[misc]
    """Holds experts packed. The experts that are used are decoded, and vLLM's own kernels multiply.

    What is packed is what these kernels take, in the order of their words: vLLM's method prepares plain
    weights for them first.

    Parameters
    ----------
    report : LoadReport
        Which kernels are wanted, and where it is counted what becomes of the weights.
    moe : FusedMoEConfig
        vLLM's description of the experts.
    name : str
        What errors call the layer.
    """

    uses_meta_device = True

    def __init__(self, report: LoadReport, moe: Any, name: str) -> None:
        super().__init__(moe)
        self._report, self._name = report, name
        self._plain = UnquantizedFusedMoEMethod(moe)
        self.experts_cls = self._plain.experts_cls
        self._stacks: dict[str, ExpertStack] | None = None

    @property
    def is_monolithic(self) -> bool:
        """Whether vLLM lets the kernels route, and calls `apply_monolithic`."""
        return bool(self._plain.is_monolithic)

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        """Give the layer the weights that a plain one has, without memory, until all of them were read."""
        with torch.device("meta"):
            self._plain.create_weights(layer, *args, **kwargs)
        initialize_online_processing(layer)

    def maybe_roundup_sizes(self, *args: Any, **kwargs: Any) -> Any:
        """As for plain weights."""
        return self._plain.maybe_roundup_sizes(*args, **kwargs)

    def get_fused_moe_quant_config(self, layer: Any) -> Any:
        """As for plain weights."""
        return self._plain.get_fused_moe_quant_config(layer)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Pack what was loaded. vLLM calls this for each layer, and once more for all."""
        if self._stacks is not None:
            if any(layer.get_parameter(name).dtype != torch.uint8 for name in self._stacks):
                raise refusals.no_reload(self._name)
            return
        self._plain.process_weights_after_loading(layer)
        self.moe_kernel = self._plain.moe_kernel
        self.moe_quant_config = self._plain.moe_quant_config
        self._stacks = {}
        for name in NAMES:
            weight = layer.get_parameter(name).detach()
            if not weight.is_contiguous() or weight.dim() < 2:
                self._report.plain(weight.nbytes, "experts whose kernels take a layout with gaps")
                continue
            packed = hold(self._report, weight.view(-1, weight.shape[-1]), f"{self._name}.{name}")
            if packed is not None:
                self._stacks[name] = ExpertStack(layer, name, packed)

    def _with_weights(self, layer: Any, ids: Tensor | None) -> Any:
        """The layer with its experts decoded: the seam for products straight from packed ones."""
        assert self._stacks is not None
        weights = [getattr(layer, name) for name in NAMES]
        for number, name in enumerate(NAMES):
            if (stack := self._stacks.get(name)) is not None:
                handle = getattr(layer, stack.handle)
                weights[number] = handle_operators.experts(ids, handle, stack.shape, stack.packed.dtype)
        return _Decoded(layer, *weights)

    def apply(self, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, **rest: Any) -> Any:
        """The experts' outputs, weighted and added up."""
        return self._plain.apply(self._with_weights(layer, topk_ids), x, topk_weights, topk_ids, **rest)

    def apply_monolithic(self, layer: Any, *args: Any, **kwargs: Any) -> Any:
        """The same, of kernels that route by themselves: all experts are decoded."""
        return self._plain.apply_monolithic(self._with_weights(layer, None), *args, **kwargs)
