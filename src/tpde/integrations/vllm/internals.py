"""What this plugin uses of vLLM beyond what its documentation has plugins use, all of it.

Documented are configurations and methods of quantization, the methods for plain weights, loaders of models
and the current configuration; the other modules here import these from vLLM, and all else from here.
`relied_on` says what breaks without each, and a test looks for all of them in the version that is installed.

vLLM 0.25.1 to 0.33 have all of this. Where they differ, a function here says so.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from vllm import envs
from vllm.config import ModelConfig, get_current_vllm_config, get_current_vllm_config_or_none
from vllm.device_allocator.sleep_mode_backend import CuMemBackend, SleepModeBackendFactory
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, RoutedExperts
from vllm.model_executor.layers.fused_moe.activation import apply_moe_activation
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.reload.layerwise import (
    get_layerwise_info,
    initialize_online_processing,
)
from vllm.model_executor.offloader import prefetch
from vllm.model_executor.offloader.base import get_offloader
from vllm.platforms import current_platform
from vllm.transformers_utils.config import get_safetensors_params_metadata
from vllm.transformers_utils.repo_utils import get_hf_file_to_dict
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.version import __version_tuple__

from tpde.integrations.vllm.relied_on import COMPUTING, SINCE

__all__ = [
    "CuMemBackend",
    "FusedMoEMethodBase",
    "RoutedExperts",
    "SleepModeBackendFactory",
    "UnquantizedFusedMoEMethod",
    "apply_moe_activation",
    "direct_register_custom_op",
    "initialize_online_processing",
]

# By these, vLLM's default loader reads files of checkpoints, and `loader` in its place; others are refused.
FORMATS = "auto", "hf", "safetensors", "fastsafetensors"
_ours_loads = False


def load_device() -> torch.device:
    """Where the model that is being loaded is to be.

    PyTorch's default device is that only while layers are made, not while weights are read.
    """
    config: Any = get_current_vllm_config_or_none()
    if config is None:
        return torch.get_default_device()
    device = torch.device(config.load_config.device or config.device_config.device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


@contextlib.contextmanager
def no_warnings_of_loaders() -> Iterator[None]:
    """Have vLLM say nothing of a load format that gets another loader."""
    log = logging.getLogger(register_model_loader.__module__)
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def track_weights(loader: Any) -> None:
    """Have vLLM refuse a model of whose weights some are in no file, unless it is told not to.

    Of quantized models it does not by default; of layers that are packed while they are loaded, never.
    """
    if getattr(loader, "enable_weights_track", False) is None:
        loader.enable_weights_track = True


def has_values(layer: Any, name: str) -> bool:
    """Whether values came for a layer's parameter by its loader: what is written otherwise is lost.

    Dummy weights come otherwise.
    """
    config: Any = get_current_vllm_config_or_none()
    if config is None or config.load_config.load_format == "dummy":
        return True
    return any(name == it for it, _ in loads_of(layer))


def loads_of(layer: Any) -> list[tuple[str, dict[str, Any]]]:
    """Names of a layer's parameters that values came for, each with what its loader was given."""
    return [(name, given.arguments) for name, given in get_layerwise_info(layer).loaded_weights]


def loads_packed() -> bool:
    """Whether a loader of ours has read a model in this process: vLLM asks for no other from then on."""
    return _ours_loads


def note_loader() -> None:
    """Note that a loader of ours reads a model."""
    global _ours_loads  # noqa: PLW0603
    _ours_loads = True


def may_be_draft() -> bool:
    """Whether the model that is being loaded may be another's draft."""
    config: Any = get_current_vllm_config_or_none()
    return config is not None and config.speculative_config is not None


def takes_all_weights() -> bool:
    """Whether the model that is being loaded takes all that its files have, whole, to one GPU.

    Others leave out what is another rank's or another model's, or is kept in host memory. What can sleep is
    loaded in memory that PyTorch does not give back as it does other.
    """
    config: Any = get_current_vllm_config_or_none()
    if config is None or load_device().type != "cuda" or config.speculative_config is not None:
        return False
    how = config.parallel_config
    if config.model_config.enable_sleep_mode or how.world_size > 1 or how.enable_expert_parallel:
        return False
    return not _offload_backend()


def computes_with_tensors(model: Any) -> bool:
    """Whether a model's code computes with tensors from files, and wants all of them in one place.

    That is the host, as of plain models: on a GPU, exponentials and sums have other bits. Molmo puts two
    tensors together.
    """
    classes = {base for it in {type(it) for it in model.modules()} for base in it.__mro__}
    names = {f"{it.__module__}.{it.__qualname__}" for it in classes}
    return any(f"vllm.{it}" in names for it in COMPUTING)


def head_classifies() -> bool:
    """Whether vLLM makes a classifier of two rows of the head, which are the embeddings' where it is tied."""
    config = get_current_vllm_config().model_config.hf_config
    said = (getattr(it, "classifier_from_token", None) for it in (config, config.get_text_config()))
    return any(said)


def _offload_backend() -> str:
    """How vLLM keeps weights in host memory, as it chooses: `prefetch`, `uva`, or not at all."""
    how: Any = get_current_vllm_config().offload_config
    if how.offload_backend != "auto":
        return str(how.offload_backend)
    if how.prefetch.offload_group_size > 0:
        return "prefetch"
    return "uva" if how.uva.cpu_offload_gb > 0 else ""


def reads_weights_on_host() -> bool:
    """Whether vLLM leaves weights in host memory, and has kernels read them there."""
    return _offload_backend() == "uva"


def prefetches_weights() -> bool:
    """Whether vLLM keeps layers in host memory, and copies each before it runs."""
    return _offload_backend() == "prefetch"


def keeps_buffers_apart() -> bool:
    """Whether several buffers in turn are right whatever the number of layers.

    Before vLLM had this function, a layer's buffer could be overwritten before it ran.
    """
    return hasattr(prefetch, "_get_next_prefetch_index")


def moves_layers() -> bool:
    """Whether something in this process copies layers from host memory.

    Nothing does in 0.26 for models that its second model runner takes, plain ones too; 0.32 has it there.
    """
    return hasattr(get_offloader(), "module_offloaders")


def may_be_offloaded(prefix: str) -> bool:
    """Whether what has this name is in a layer that vLLM keeps in host memory, going by the layer's number.

    Of those that are not, weights may come by the `meta` device; vLLM moves the others before any is read.
    Some models give layers no name.
    """
    if not prefetches_weights():
        return False
    if not prefix:
        return True
    how: Any = get_current_vllm_config().offload_config.prefetch
    numbers = [int(it) for it in prefix.split(".") if it.isdigit()]
    last = how.offload_group_size - how.offload_num_in_group
    return bool(numbers) and bool(numbers[0] % how.offload_group_size >= last)


def mover_of(weight: Tensor) -> Any:
    """What copies a parameter from host memory to a buffer before its layer runs; None if vLLM does not."""
    offloaders: Any = getattr(get_offloader(), "module_offloaders", ())
    for it in (it for one in offloaders for it in one._param_offloaders.values()):
        read = type(it)._param.__get__  # an error if vLLM calls it otherwise, not none of the parameters
        with contextlib.suppress(AttributeError):  # scales of KV caches are gone by then
            if read(it) is weight:
                return it
    return None


def forget_plain(mover: Any) -> None:
    """Let go of a parameter's plain words on the host, once the layer has another parameter.

    When all layers are loaded, vLLM takes what it moves from the parameter. Until then it would hold both.
    """
    if mover._cpu_storage is not None:  # an error if vLLM calls it otherwise, not one attribute more
        mover._cpu_storage = None


def loses_weights_unheard() -> bool:
    """Whether this vLLM lacks a method by which sleeping throws memory away: it may have another name."""
    known = ["suspend"]
    if __version_tuple__[:2] >= SINCE["device_allocator.sleep_mode_backend.CuMemBackend.discard"]:
        known.append("discard")
    return not all(hasattr(CuMemBackend, it) for it in known)


def quantizes_again() -> bool:
    """Whether `--quantization-config` asks for another quantization.

    With `--quantization tpde`, vLLM below 0.30 refuses that by itself; of packed files it says nothing.
    """
    return get_current_vllm_config().model_config.quantization_config is not None


def records_graphs() -> bool:
    """Whether steps are recorded in CUDA graphs, which go on reading the memory that kernels were told of."""
    config: Any = get_current_vllm_config_or_none()
    return config is not None and bool(config.compilation_config.cudagraph_mode.value)


def is_batch_invariant() -> bool:
    """Whether results are not to depend on the batch, as `VLLM_BATCH_INVARIANT=1` asks for."""
    return bool(envs.VLLM_BATCH_INVARIANT)


def gather_columns(x: Tensor) -> Tensor:
    """All columns of a matrix of which each GPU of a tensor parallel group has as many, in its order."""
    gathered: Tensor = tensor_model_parallel_all_gather(x.contiguous())
    return gathered


def fuses_sums_with_norms() -> bool:
    """Whether compiled code adds up over GPUs and normalizes in one kernel, which rounds otherwise.

    By FlashInfer, where that is installed. With `VLLM_BATCH_INVARIANT`, 0.32 does not; 0.26 does.
    """
    config: Any = get_current_vllm_config_or_none()
    return config is not None and bool(config.compilation_config.pass_config.fuse_allreduce_rms)


def prepares_weights() -> bool:
    """Whether plain weights are rearranged for the matrix library, and the compiler does not see products.

    So it is on the CPU. Experts that are loaded again, plain ones too, vLLM 0.32 does not rearrange there.
    """
    return bool(current_platform.is_cpu())


def unties_heads() -> bool:
    """Whether this vLLM takes a head that is in the files where the configuration says that it is tied.

    It does since 0.29, and ties them before.
    """
    return hasattr(ModelConfig, "maybe_untie_word_embeddings")


def names_in_files(model: str, revision: str | None) -> set[str]:
    """The tensors of a model's safetensors files; none if it has no such files."""
    return set(get_safetensors_params_metadata(model, revision=revision) or ())


def quantization_of_files(model: str, revision: str | None) -> dict[str, Any] | None:
    """What a model's files say of quantization, in the places where vLLM looks; None if nothing.

    Of `quantization_config`, vLLM's own configuration has what `--hf-overrides` say, and no more.
    """
    config = get_hf_file_to_dict("config.json", model, revision) or {}
    for part in (config, config.get("text_config") or {}):
        for name in ("quantization_config", "compression_config"):
            if isinstance(part.get(name), dict):
                found: dict[str, Any] = part[name]
                return found
    apart = get_hf_file_to_dict("hf_quant_config.json", model, revision)  # of ModelOpt before 0.31
    return apart and {"quant_method": "modelopt", **apart}


def why_decoded(method: Any, layer: Any) -> str | None:
    """Why a layer's experts are decoded for each product; None if they can be multiplied as in files.

    Parameters
    ----------
    method : UnquantizedFusedMoEMethod
        That has prepared them for its kernels.
    layer : RoutedExperts
        Whose they are.
    """
    backend, spread = method.unquantized_backend, method.moe.moe_parallel_config
    if is_batch_invariant():  # few tokens from windows and many by vLLM's kernels would differ
        return "`VLLM_BATCH_INVARIANT` is set"
    if backend.name != "TRITON":  # others take rows in an order of their own
        return f"{backend.value} kernels have rows in another order; `--moe-backend triton` has not"
    if spread.use_ep or spread.dp_size > 1 or spread.pcp_size > 1:
        return "they are spread over devices, by expert, data or context parallelism"
    if method.moe.has_bias:
        return "they have biases"
    if layer.apply_router_weight_on_input:
        return "their inputs are weighted, not their outputs"
    clamped = (layer.swiglu_limit, layer.swiglu_alpha, layer.swiglu_beta) != (None, None, None)
    if clamped or layer.activation.value not in ("silu", "gelu", "gelu_tanh"):
        return f"their activation is another: {layer.activation.value}{', clamped' if clamped else ''}"
    return None


def token_bytes() -> int:
    """Bytes that a token takes in the KV cache of this process; 0 if that cannot be told."""
    config: Any = get_current_vllm_config_or_none()
    if config is None:
        return 0
    total = 0.0
    for layer in config.compilation_config.static_forward_context.values():
        ask = getattr(layer, "get_kv_cache_spec", None)
        spec = None if ask is None else ask(config)
        if spec is not None:
            total += spec.page_size_bytes / spec.block_size
    return int(total)
