"""Mixtures of experts with packed weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from tpde.cuda import prefix_kernels, window_experts
from tpde.frameworks import torch_dtype_name
from tpde.integrations.vllm import handle_operators, internals, merged_parts, refusals
from tpde.integrations.vllm.expert_stacks import ExpertStack, Room
from tpde.integrations.vllm.internals import FusedMoEMethodBase, apply_moe_activation
from tpde.integrations.vllm.report import LoadReport
from tpde.integrations.vllm.weights import hold
from tpde.weights.expert_products import Experts
from tpde.weights.launch import capturing

NAMES = ("w13_weight", "w2_weight")


class _WithExperts:
    """A layer as plain vLLM's method takes it: with weights that are there for one call."""

    def __init__(self, layer: Any, w13_weight: Tensor, w2_weight: Tensor) -> None:
        self._layer, self.w13_weight, self.w2_weight = layer, w13_weight, w2_weight

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


class TpdeExpertsMethod(FusedMoEMethodBase):  # type: ignore[misc]
    """Holds experts packed.

    What is packed is what vLLM's kernels take, in the order of their words: vLLM's method prepares plain
    weights for them first. Where that is the order of files, few rows are multiplied straight from windows.
    Otherwise the experts that are used are decoded, and vLLM's kernels multiply.

    Parameters
    ----------
    report : LoadReport
        Which kernels are wanted, and where it is counted what becomes of the weights.
    plain : UnquantizedFusedMoEMethod
        vLLM's own for plain experts.
    room : Room
        Where experts are decoded.
    name : str
        What errors call the layer.
    """

    uses_meta_device = True

    def __init__(self, report: LoadReport, plain: Any, room: Room, name: str) -> None:
        super().__init__(plain.moe)
        self.report, self._plain, self._room, self._name = report, plain, room, name
        self.experts_cls = plain.experts_cls
        self._stacks: dict[str, ExpertStack] | None = None
        self._multiplies, self._prepared, self._counted = False, False, False

    @property
    def is_monolithic(self) -> bool:
        """Whether vLLM lets the kernels route, and calls `apply_monolithic`."""
        return bool(self._plain.is_monolithic)

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        """Give the layer the weights that a plain one has, without memory, until all of them were read."""
        with torch.device("meta"):
            self._plain.create_weights(layer, *args, **kwargs)
        self._compile_ahead(layer)

    def _compile_ahead(self, layer: Any) -> None:
        """Compile kernels for a layer's weights while weights are read."""
        device = internals.load_device()
        if device.type != "cuda":
            return
        for weight in (layer.get_parameter(name) for name in NAMES):
            fused = self.report.kernels == "fused" and weight.dtype is torch.bfloat16
            if fused and weight.dim() == 3:
                experts, rows, columns = weight.shape
                window_experts.compile_ahead(experts, rows, columns, device.index)
            else:
                prefix_kernels.compile_ahead(torch_dtype_name(weight.dtype), device.index, packing=True)

    def maybe_roundup_sizes(self, *args: Any, **kwargs: Any) -> Any:
        """As for plain weights."""
        return self._plain.maybe_roundup_sizes(*args, **kwargs)

    def get_fused_moe_quant_config(self, layer: Any) -> Any:
        """As for plain weights."""
        return self._plain.get_fused_moe_quant_config(layer)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Pack what was loaded. vLLM calls this for each layer, and once more for all."""
        if self._stacks is not None:
            if any(layer.get_parameter(name).data.dtype != torch.uint8 for name in self._stacks):
                self._reload(layer)  # vLLM took the layer apart, and loaded it anew
            return
        for name in NAMES:
            if not internals.has_values(layer, name):
                raise refusals.no_values(f"{self._name}.{name}")
        self._check_parts(layer)
        loaders = {name: getattr(layer.get_parameter(name), "weight_loader", None) for name in NAMES}
        self._plain.process_weights_after_loading(layer)
        self.moe_kernel = self._plain.moe_kernel
        self.moe_quant_config = self._plain.moe_quant_config
        self._stacks = {}
        end = 0
        for name in NAMES:
            weight = layer.get_parameter(name).detach()
            if not weight.is_contiguous() or weight.dim() < 2:
                self.report.plain(weight.nbytes, "experts whose kernels take a layout with gaps")
                continue
            matrices = weight.view(len(weight), -1, weight.shape[-1])
            spare = internals.records_graphs()
            packed = hold(self.report, matrices, f"{self._name}.{name}", spare=spare)
            if packed is not None:
                self._stacks[name] = ExpertStack(layer, name, packed, self._room, end)
                end = self._stacks[name].end
        for name, loader in loaders.items():  # vLLM brings them experts of other ranks, too, which they leave
            layer.get_parameter(name).weight_loader = loader
        self.report.room_bytes = self._room.nbytes
        self._choose(layer)

    def _reload(self, layer: Any) -> None:
        """Take the weights that the layer has now, plain ones again."""
        assert self._stacks is not None
        if internals.prepares_weights():
            raise refusals.no_reload(self._name)
        self._check_parts(layer)
        self._plain.process_weights_after_loading(layer)
        for name, it in self._stacks.items():
            weight = layer.get_parameter(name).detach()
            it.reload(layer, weight.contiguous().view(len(weight), -1, weight.shape[-1]))

    def _check_parts(self, layer: Any) -> None:
        """Refuse experts of which some did not come; of two matrices that are merged, either."""
        first, second = (layer.get_parameter(name) for name in NAMES)
        for name, parts in zip(NAMES, (first.shape[1] // second.shape[2], 1), strict=True):
            merged_parts.check_experts(layer, name, parts, f"{self._name}.{name}")

    def _choose(self, layer: Any) -> None:
        """Settle whether few rows are multiplied from windows, and say why not."""
        assert self._stacks is not None
        if self.report.kernels == "exact" or not self._stacks:
            return
        in_windows = [it.packed.of_experts for it in self._stacks.values()] == [True, True]
        why_not = internals.why_decoded(self._plain, layer) if in_windows else "windows do not hold them"
        self._multiplies = why_not is None
        if why_not is not None and layer.get_parameter(NAMES[0]).is_cuda:
            self.report.decoded(why_not)

    def _with_weights(self, layer: Any, ids: Tensor | None) -> Any:
        """The layer with its experts decoded."""
        assert self._stacks is not None
        weights = {name: getattr(layer, name) for name in NAMES}
        if is_compiling():  # on the CPU: on GPUs, what the compiler sees is vLLM's operator of a whole layer
            for name, it in self._stacks.items():
                handle = getattr(layer, it.handle)
                weights[name] = handle_operators.experts(ids, handle, it.shape, it.packed.dtype)
        elif self._stacks:
            some = next(iter(self._stacks.values())).chosen(ids)
            weights |= {name: it.in_room(some) for name, it in self._stacks.items()}
        return _WithExperts(layer, *weights.values())

    def apply(self, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, **rest: Any) -> Any:
        """The experts' outputs, weighted and added up."""
        if self._multiplies and not self._prepared:  # as a linear layer's: see `Weight.product`
            self._prepared = True
            for it in self._experts():
                it.prepare()
        if self._multiplies and self._fits(x, topk_ids):
            return self._from_windows(layer, x, topk_weights, topk_ids)
        if self._multiplies and not self._counted:
            self._counted = True
            self._take_most(x, topk_ids.shape[1])
        return self._plain.apply(self._with_weights(layer, topk_ids), x, topk_weights, topk_ids, **rest)

    def apply_monolithic(self, layer: Any, *args: Any, **kwargs: Any) -> Any:
        """The same, of kernels that route by themselves: all experts are decoded."""
        return self._plain.apply_monolithic(self._with_weights(layer, None), *args, **kwargs)

    def _experts(self) -> list[Experts]:
        assert self._stacks is not None
        return [self._stacks[name].packed.experts for name in NAMES]

    def _fits(self, x: Tensor, topk_ids: Tensor) -> bool:
        return x.dtype is torch.bfloat16 and all(it.fits(*topk_ids.shape) for it in self._experts())

    def _take_most(self, x: Tensor, each: int) -> None:
        """Take for a moment what products of as many tokens as are computed from windows take.

        vLLM's profiling run may have more, and would count only what its own kernels take.
        """
        first, second = self._experts()
        tokens = min(first.most_rows, second.most_rows) // max(each, 1)
        if tokens and not capturing(x.device):
            rows = tokens * each
            up = rows * first.width * x.itemsize
            down = rows * (second.columns + second.width) * x.itemsize
            more = max(first.taken(tokens, rows), down + second.taken(tokens, rows))
            x.new_empty(up + more, dtype=torch.uint8)

    def _from_windows(self, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """Both products with what is between them, and each token's sum over its experts.

        What else there is to a layer, vLLM does with the result: scaling, shared experts, sums over ranks.
        """
        first, second = self._experts()
        tokens, each = topk_ids.shape
        ids = topk_ids.reshape(-1)
        y = first.product(x, ids, each, None, tokens)
        gated = y.new_empty((len(y), second.columns))
        apply_moe_activation(layer.activation, gated, y)
        return second.weighted(second.product(gated, ids, 1, None, tokens), topk_weights.float())
