"""How transformers loads and saves packed models: by its interface for quantized ones."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.quantizers.base import HfQuantizer

from tpde.errors import InvalidInput, NotPacked
from tpde.files.packed_state import MAKE_PLAIN
from tpde.integrations.transformers.config import TpdeConfig
from tpde.integrations.transformers.delta_files import States, read_states
from tpde.integrations.transformers.device_maps import device_of, devices_of, largest_block, spread
from tpde.integrations.transformers.folder import dtype_of_files
from tpde.integrations.transformers.fused import SHARE, fused_names, open_some_fused
from tpde.integrations.transformers.given_state import refuse_others
from tpde.integrations.transformers.internals import (
    asked_for_dtype,
    forget_quantized,
    give_conversions,
    given_state,
    take_conversions,
)
from tpde.integrations.transformers.load_target import LoadTarget, load_target
from tpde.integrations.transformers.packed_parameters import install, tie
from tpde.integrations.transformers.padding_rows import tell_of_rows
from tpde.integrations.transformers.placeholders import Placeholders
from tpde.integrations.transformers.run_memory import MemoryFootprintMethod
from tpde.integrations.transformers.save import state_to_save
from tpde.integrations.transformers.streamed import ModelStreaming
from tpde.integrations.transformers.unpacked import keep_plain, load_plain, report_decoded, some
from tpde.integrations.transformers.warmup import Warmup
from tpde.integrations.transformers.weight_map import WeightMap, expected_dtypes, map_weights
from tpde.loading.checkpoint_files import Checkpoint
from tpde.loading.devices import checked_device
from tpde.loading.live_models import unpack_module
from tpde.loading.quantized import PackedQuantizer
from tpde.memory.device_memory import require
from tpde.nn import PackedTensor, finish, packed_modules
from tpde.nn.attached_deltas import attach
from tpde.nn.kernels import tell_if_none

log = logging.getLogger("tpde")


class TpdeHfQuantizer(PackedQuantizer, HfQuantizer):
    """Loads packed weights into a model, and saves them.

    transformers calls its methods in this order: `preprocess_model` with the model on the `meta` device,
    `update_weight_conversions`, for `device_map="auto"` then `validate_environment` with the map that it
    chose, and `postprocess_model` with the plain weights loaded and everything tied.
    """

    requires_calibration = False

    def __init__(self, quantization_config: TpdeConfig, **kwargs: Any) -> None:
        self._target = load_target()
        self._comes_plain = self._target.pack and not kwargs.get("pre_quantized", True)
        if self._comes_plain:
            kwargs["pre_quantized"] = True  # from here on it is as if it were
        super().__init__(quantization_config, **kwargs)
        self.conversions: list[Any] | None = None
        self.decoded = 0  # packed tensors that the model holds plain
        self._model: Any = None
        self._files: list[str] = []
        self._dtype = torch.float32
        self._device_map: Any = None
        self._checkpoint: Checkpoint | None = None
        self._weights: WeightMap | None = None
        self._placeholders: Placeholders | None = None
        self._parts: dict[str, PackedTensor] = {}
        self._fused: set[str] = set()  # which of them go to the window layout
        self._states: States | None = None

    def update_attn_implementation(self, config: Any) -> Any:
        """Load kernels from now on, under a budget: this is the first call that knows the configuration."""
        target = self._target
        device = target.device if target.budget is not None and target.warmup is None else None
        if device is not None and device.type == "cuda":
            target.warmup = Warmup(config.get_text_config(), device, config.dtype or torch.float32)
        return config

    # Before 5.18 or so, there was only this hook of the same kind.
    update_tp_plan = update_attn_implementation

    def update_dtype(self, dtype: Any) -> Any:
        """Find the dtype where `config.json` names none: transformers has looked at plain tensors only."""
        asked = None if self._comes_plain else asked_for_dtype()
        if asked is not None:
            return dtype_of_files([asked])
        if isinstance(dtype, torch.dtype) and not dtype.is_floating_point:
            raise InvalidInput(
                "`config.json` names no dtype",
                hint="pass `dtype=` to `from_pretrained`, or load it by `tpde.from_pretrained`",
            )
        return dtype

    def update_device_map(self, device_map: Any) -> Any:
        """Apply the device of `loading_to`."""
        device = self._target.device
        self._device_map = device_map if device is None or device_map is not None else {"": device}
        return self._device_map

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Load the packed weights when the last of what that needs is known: where each goes."""
        device_map = kwargs.get("device_map")
        if self._weights is not None and isinstance(device_map, dict):
            self._device_map = device_map
            self._load()

    def param_element_size(self, model: Any, param_name: str, param: torch.Tensor) -> float:
        """Bytes that an element takes on a device: fewer if it is packed."""
        run = self._weights.runs.get(param_name) if self._weights is not None else None
        if run is None:
            return float(param.element_size())
        if param_name in self._fused:
            return SHARE * run.dtype.itemsize
        packed = sum(part.packed_bytes for part in run.parts)
        return packed / max(param.numel(), 1)

    def adjust_max_memory(self, max_memory: dict[Any, Any]) -> dict[Any, Any]:
        """Leave room for one plain block on each GPU."""
        if self._weights is None:
            return max_memory
        if self._target.budget is not None:
            return spread(max_memory, self._model, self.param_element_size)
        room = largest_block({name: run.nbytes for name, run in self._weights.runs.items()})
        return {
            key: max(value - room, 0) if isinstance(key, int) and isinstance(value, int) else value
            for key, value in max_memory.items()
        }

    def _process_model_before_weight_loading(
        self,
        model: Any,
        checkpoint_files: Sequence[str] | None = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> Any:
        # What is stored plain is loaded, and cast if needed, exactly as from a plain checkpoint.
        self.pre_quantized = False
        self._model, self._files = model, [os.fspath(file) for file in checkpoint_files or ()]
        self._dtype = dtype if dtype is not None else torch.get_default_dtype()
        return model

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any = None) -> list[Any]:
        """Load the packed weights, now that transformers' conversions are known."""
        if self._weights is None and self._files and self._model is not None:
            self._checkpoint = Checkpoint(self._files, pack=self._target.pack)
            try:
                if not (self._checkpoint.is_packed or self._target.pack):
                    raise NotPacked(
                        f"no tensor in `{os.path.dirname(self._files[0])}` is packed, though its "
                        "`config.json` says so",
                        hint=MAKE_PLAIN,
                    )
                self._weights = map_weights(self._model, self._checkpoint, weight_conversions, self._dtype)
                if not self._checkpoint.is_packed:  # transformers loads what cannot be packed
                    report_decoded(self._weights, self._checkpoint)
                    self._weights = self._weights._replace(decoded=[], unexpected=[])
                if self._target.kernels == "fused":
                    # Under a budget, experts are fetched as they are routed to.
                    alone = self._target.budget is None
                    self._fused = fused_names(self._model, self._weights.runs, experts=alone)
                if not isinstance(self._device_map, str):
                    self._load()
            except BaseException:
                self._checkpoint.close()
                raise
        return weight_conversions

    def _load(self) -> None:
        """Read every blob to its device, decode what must be, and hide it all from transformers."""
        assert self._checkpoint is not None
        assert self._weights is not None
        model, weights, checkpoint = self._model, self._weights, self._checkpoint
        try:
            where = devices_of(model, self._device_map)
            where |= {name: device_of(name, self._device_map) for name in weights.runs}
            for device in set(where.values()):
                checked_device(device)
            target = self._target
            if target.budget is None:
                for device in {where[name] for name in weights.runs}:
                    self._require(weights, device)
                self._parts = open_some_fused(model, checkpoint, weights.runs, where, self._fused)
                keep_plain(model, weights.runs, self._parts)
                decoded = self._decode(weights, checkpoint)
            else:
                streaming = ModelStreaming(
                    target.budget, target.progress, warmup=target.warmup, fused=self._fused
                )
                target.streaming = streaming
                streaming.plan(model, checkpoint, weights, where)
                # First, since for a moment it needs the blobs, too.
                decoded = self._decode(weights, checkpoint)
                self._parts = streaming.load(model, checkpoint, weights.runs, where)
                self.streamed = bool(streaming.streamers)
            # Last: where there is no room, nothing is read.
            checkpoint.check_plain(name for it in weights.plain for name in chain(*it.names.values()))
            names = [*weights.runs, *decoded]
            tie(model, weights.runs, self._parts)
            if target.deltas is not None:
                expected = expected_dtypes(model, self._dtype)
                base = os.path.dirname(self._files[0])
                self._states = read_states(
                    target.deltas, model, checkpoint, weights, self._parts, expected, base
                )
        finally:
            checkpoint.close()
        if weights.unexpected:
            log.warning(
                "packed tensors that have no place in %s are left out: %s",
                type(model).__name__,
                some(weights.unexpected),
            )
        seen = [*weights.halves(checkpoint), *weights.of_plain()]
        self._placeholders = Placeholders(model, names, seen, self._install)

    def _require(self, weights: WeightMap, device: torch.device) -> None:
        """Refuse before anything is read if a device has too little free memory."""
        here = {
            name: run for name, run in weights.runs.items() if device_of(name, self._device_map) == device
        }
        packed = {part.name: part.packed_bytes for run in here.values() for part in run.parts}
        for name in self._fused.intersection(here):
            packed |= {part.name: int(SHARE * part.nbytes) for part in here[name].parts}
        room = largest_block({name: run.nbytes for name, run in here.items()})
        plain = sum(
            tensor.numel() * tensor.element_size()
            for name, tensor in self._model.state_dict().items()
            if name not in weights.runs and device_of(name, self._device_map) == device
        )
        need = sum(packed.values()) + room + plain
        require(need, device, f"{type(self._model).__name__}, packed, with one block plain,")

    def _decode(self, weights: WeightMap, checkpoint: Checkpoint) -> list[str]:
        """Put what cannot stay packed into the model as it would be without packing; returns its names."""
        expected = expected_dtypes(self._model, self._dtype)
        names = []
        for source, _ in weights.decoded:
            device = device_of(source.target, self._device_map)
            names += load_plain(self._model, source, checkpoint, device, expected(source.target))
        self.decoded = report_decoded(weights, checkpoint)
        return names

    def _install(self) -> None:
        install(self._model, self._parts)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        written: list[str] = []
        if self._placeholders is not None:
            self._placeholders.close()
            written = self._placeholders.written
        self.pre_quantized = True
        # Saving converts packed weights itself; transformers would try to decode them.
        self.conversions = take_conversions(model)
        forget_quantized(model)
        model.get_memory_footprint = MemoryFootprintMethod(model)
        self._model = self._checkpoint = self._weights = self._placeholders = None
        self._parts, self._files = {}, []
        kernels, streaming, fused = self._target.kernels, self._target.streaming, bool(self._fused)
        self._target, self._fused = LoadTarget(), set()
        if streaming is not None:
            streaming.cut(model)
            streaming.route(model)
        finish(model)
        if kernels == "fused" and fused and streaming is not None:
            streaming.tell_if_no_windows()
        elif kernels == "fused":
            tell_if_none(model)
        if self._states is not None:
            attach(model, *self._states)
            self._states = None
        if streaming is not None:
            streaming.attach(model)
            streaming.begin(model)
        tell_of_rows(model, written)
        self.adopt_inner(model)
        return model

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Blobs under their names in the source, and the plain rest.

        Where nothing is packed any more, the model is an ordinary one from here on, and saved as such.

        Raises
        ------
        PackedWeight
            If weights are streamed, or `save_pretrained` was given a state that is not the model's.
        """
        self.require_bytes()
        given = given_state()
        if next(packed_modules(model), None) is None:
            self.release(model)
            return dict(model.state_dict() if given is None else given), {}
        if given is not None:
            refuse_others(model, given)
        model.config.quantization_config = self.quantization_config
        return state_to_save(model, self.conversions), {}

    def adopt(self, model: Any) -> None:
        """Belong to a model that was packed in memory: saving it writes its blobs."""
        self.conversions = take_conversions(model)
        model.hf_quantizer = self
        model.get_memory_footprint = MemoryFootprintMethod(model)

    def adopt_inner(self, model: Any) -> None:
        """Have the models that are in this one saved likewise, each by itself: `model.model`."""
        for inner in model.modules():
            if inner is model or not isinstance(inner, PreTrainedModel):
                continue
            if getattr(inner, "hf_quantizer", None) is None and next(packed_modules(inner), None) is not None:
                made = type(self)(TpdeConfig(), pre_quantized=True)
                made.streamed = self.streamed
                made.adopt(inner)

    def release(self, model: Any) -> None:
        """Leave a model that holds nothing packed any more as it was without this."""
        give_conversions(model, self.conversions)
        self.remove_quantization_config(model)  # type: ignore[no-untyped-call]
        for name in ("get_memory_footprint", "is_quantized"):
            model.__dict__.pop(name, None)

    def dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        """`model.dequantize()`: the plain model, cast only if a dtype is given."""
        made = unpack_module(model)
        return made if dtype is None else made.to(dtype)

    def is_serializable(self) -> bool:
        """Whether `save_pretrained` works: it does."""
        return True

    @property
    def is_compileable(self) -> bool:
        """Whether `generate` may record a whole pass in CUDA graphs: not what comes from files."""
        return not self.streamed
