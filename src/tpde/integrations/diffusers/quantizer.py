"""How diffusers loads and saves packed components: by its interface for quantized ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers.configuration_utils import FrozenDict
from diffusers.quantizers.base import DiffusersQuantizer

from tpde.errors import InvalidInput, PackedWeight
from tpde.format.constants import SUFFIX
from tpde.integrations.diffusers.config import TpdeConfig
from tpde.integrations.diffusers.dtypes import expected_dtype
from tpde.loading.assignment import misshapen
from tpde.loading.checkpoint_files import Checkpoint
from tpde.loading.devices import checked_device, map_entry
from tpde.loading.live_models import unpack_module
from tpde.loading.quantized import PackedQuantizer
from tpde.nn import PackedParameter, PackedTensor, finish, packed_modules, replace_parameter, supports

# Older versions of diffusers, before 0.40, do not ask: they refuse packed components by their configuration.
IS_ASKED = hasattr(DiffusersQuantizer, "maybe_update_state_dict")


class TpdeQuantizer(PackedQuantizer, DiffusersQuantizer):
    """Loads packed weights into a component of a pipeline.

    diffusers calls its methods in this order: `maybe_update_loaded_keys`, `preprocess_model` with the model
    on the `meta` device, `validate_environment` with the final device map, `maybe_update_state_dict` for each
    file, and `postprocess_model`.
    """

    use_keep_in_fp32_modules = True  # as of plain components

    def __init__(self, quantization_config: Any, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._model: Any = None
        self._files: list[str] = []
        self._keep: list[str] = []
        self._dtype: torch.dtype | None = None
        self._device_map: Any = None

    def update_torch_dtype(self, torch_dtype: Any) -> Any:
        """Take note of it."""
        self._dtype = torch_dtype
        return torch_dtype

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Take note of where the component goes."""
        self._device_map = kwargs.get("device_map")

    def maybe_update_loaded_keys(self, loaded_keys: list[str], checkpoint_files: list[str]) -> list[str]:
        """Names as the model has them."""
        self._files = [str(it) for it in checkpoint_files]
        return [name.removesuffix(SUFFIX) for name in loaded_keys]

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        self._model, self._keep = model, kwargs.get("keep_in_fp32_modules") or []
        return model

    @property
    def supports_parallel_loading(self) -> bool:
        """Files are read one after the other."""
        return False

    def maybe_update_state_dict(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Put what stays packed into the model, and decode the rest: gives the plain tensors of a file."""
        names = [name.removesuffix(SUFFIX) for name in state_dict if name.endswith(SUFFIX)]
        plain = {name: it for name, it in state_dict.items() if not name.endswith(SUFFIX)}
        with Checkpoint(self._files) as checkpoint:
            checkpoint.check_plain(plain)
            for name in names:
                stored = checkpoint.packed.get(name)
                if stored is None:
                    raise InvalidInput(
                        f"`{name}{SUFFIX}` is no packed tensor", hint="fetch the component again"
                    )
                found = self._place(name)
                if found is None:  # diffusers says that it has no place
                    continue
                module, leaf, parameter = found
                if tuple(parameter.shape) != stored.shape:
                    raise misshapen(name, stored.shape, parameter.shape)
                device = self._device(name)
                if supports(module, leaf) and self._wanted(name, parameter) is stored.dtype:  # is a float's
                    module._parameters[leaf] = torch.nn.Parameter(
                        parameter.detach().to(stored.dtype), requires_grad=parameter.requires_grad
                    )
                    weight = PackedTensor(checkpoint.read([stored], device)[0])
                    replace_parameter(self._model, name, weight)
                else:
                    (plain[name],) = checkpoint.decode([stored.run], device)
        return plain

    def _place(self, name: str) -> tuple[Any, str, torch.Tensor] | None:
        path, _, leaf = name.rpartition(".")
        try:
            module = self._model.get_submodule(path)
        except AttributeError:
            return None
        found = module._parameters.get(leaf)
        held = module._buffers.get(leaf) if found is None else found
        return None if held is None else (module, leaf, held)

    def _wanted(self, name: str, parameter: torch.Tensor) -> torch.dtype:
        """The dtype that diffusers would give a weight."""
        return expected_dtype(self._keep, name, parameter.dtype if self._dtype is None else self._dtype)

    def _device(self, name: str) -> torch.device:
        where = self._device_map or {"": "cpu"}
        if not isinstance(where, dict):
            return checked_device(where)
        path = map_entry(name, where)
        found = "cpu" if path is None else where[path]
        if str(found) == "disk":
            raise InvalidInput(
                f"`device_map` puts `{path or 'the model'}` on disk",
                hint="packed weights are decoded where they "
                "are: use GPUs with room for all of them, or the CPU for all",
            )
        return checked_device(found)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        self._model, self._files = None, []
        return finish(model)

    def get_state_dict_and_metadata(
        self, state_dict: dict[str, Any], safe_serialization: bool = False
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """What is saved: blobs under their names in the files, and the plain rest.

        Raises
        ------
        PackedWeight
            If weights are streamed, or would be pickled: nothing loads blobs from a `.bin`.
        """
        self.require_bytes()
        state: dict[str, Any] = {}
        for name, value in state_dict.items():
            if isinstance(value, PackedParameter):
                if not safe_serialization:
                    raise PackedWeight(
                        f"`{name}` is packed, and would be saved to a pickle, from which nothing loads it",
                        hint="leave out `safe_serialization=False`, or call `tpde.unpack_module(model)`",
                        where="safe_serialization",
                    )
                (source,) = value.packed.sources
                state[name + SUFFIX] = source.stored()
            else:
                state[name] = value
        return state, {}

    def dequantize(self, model: Any) -> Any:
        """`model.dequantize()`: the plain model."""
        return unpack_module(model)

    @property
    def is_serializable(self) -> bool:
        """Whether `save_pretrained` works: it does."""
        return True


def belong(model: Any) -> None:
    """Let `save_pretrained` of a model with packed weights, or of its pipeline, say that they are."""
    if next(packed_modules(model), None) is not None:
        config = TpdeConfig()
        model.register_to_config(quantization_config=config)
        model.hf_quantizer = TpdeQuantizer(config, pre_quantized=True)
        model.hf_quantizer.streamed = hasattr(model, "tpde_streamer")


def leave(model: Any) -> None:
    """Take from a model that holds nothing packed any more what says that it is quantized."""
    marks = ("quantization_config", "_pre_quantization_dtype")
    kept = {key: it for key, it in model.config.items() if key not in marks}
    model._internal_dict = FrozenDict(kept)  # type: ignore[no-untyped-call]
    for name in ("hf_quantizer", "is_quantized", "quantization_method"):
        model.__dict__.pop(name, None)
