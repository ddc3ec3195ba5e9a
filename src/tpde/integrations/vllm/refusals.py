"""What does not work with packed weights in vLLM, by name."""

from __future__ import annotations

from typing import Any

from vllm.config import get_current_vllm_config

from tpde.errors import InvalidInput, PackedWeight
from tpde.format.constants import METHOD
from tpde.integrations.vllm import internals, sleep_mode
from tpde.integrations.vllm.report import log


def check() -> None:
    """Refuse what vLLM was asked for beside packed weights and does not work; see to it later for sleep.

    Raises
    ------
    InvalidInput
        Naming it.
    """
    if internals.quantizes_again():
        raise InvalidInput(
            "`--quantization-config` asks for another quantization on top of packed weights",
            hint="leave one of the two out",
            where="quantization_config",
        )
    if internals.reads_weights_on_host():
        raise InvalidInput(
            "`--cpu-offload-gb` lets kernels read weights in host memory, which tpde's cannot",
            hint="use `--offload-group-size` instead, which copies layers, packed, before they run",
            where="offload_config",
        )
    config = get_current_vllm_config()
    if internals.prefetches_weights():
        _check_offloading(config)
    sleep_mode.choose(config.model_config)
    _check_head(config.model_config)
    load_format = config.load_config.load_format
    if load_format not in (METHOD, "dummy", *internals.FORMATS):
        raise InvalidInput(
            f"`--load-format {load_format}` brings weights in a way of its own, which neither packs nor "
            "decodes them; vLLM takes `runai_streamer` for models of object storage",
            hint="serve files of a folder or of the hub, and leave `--load-format` out",
            where="load_format",
            found=load_format,
            needed="auto",
        )


def _check_head(model: Any) -> None:
    """Refuse a head that computes in another dtype than the model; models that pool make one of their own."""
    wanted, own = (str(it).removeprefix("torch.") for it in (model.head_dtype, model.dtype))
    if model.runner_type != "pooling" and wanted != own:
        raise InvalidInput(
            f"`head_dtype` asks for a head in {wanted}, and packed ones compute in {own}, as the model does",
            hint='leave it out, or give `--hf-overrides \'{"head_dtype": "model"}\'`',
            where="head_dtype",
            found=wanted,
            needed=own,
        )


def _check_offloading(config: Any) -> None:
    """Refuse what does not work beside layers that vLLM copies from host memory."""
    if not internals.moves_layers():
        raise InvalidInput(
            "`--offload-group-size` does nothing in the model runner that this vLLM takes for the model",
            hint="set `VLLM_USE_V2_MODEL_RUNNER=0` in the environment, or leave the option out",
            where="offload_config",
        )
    beside = None
    if config.parallel_config.pipeline_parallel_size > 1:
        beside = "`--pipeline-parallel-size`"
    elif config.lora_config is not None:
        beside = "`--enable-lora`, for which vLLM would put adapters on the host"
    elif config.offload_config.prefetch.offload_prefetch_step > 1 and not internals.keeps_buffers_apart():
        beside = "`--offload-prefetch-step` above 1, for which this vLLM overwrites buffers too early"
    if beside is not None:
        raise InvalidInput(
            f"`--offload-group-size` does not go with packed weights and {beside}",
            hint="leave one of the two out",
            where="offload_config",
        )


def nothing_moved() -> InvalidInput:
    """The error for a model none of whose layers vLLM keeps in host memory, as it was asked to."""
    return InvalidInput(
        "vLLM keeps no layer of this model in host memory: its code makes them without vLLM's offloading",
        hint="leave `--offload-group-size` out",
        where="offload_config",
    )


def can_pack_experts() -> bool:
    """Whether experts may be packed; a warning says why not.

    Adapters on them take plain weights, and offloading moves them. Where two halves of a batch run at a time,
    one would decode over what the other multiplies.

    Raises
    ------
    InvalidInput
        If vLLM is to move them from device to device while it serves.
    """
    config = get_current_vllm_config()
    if config.lora_config is not None:
        log.warning("tpde: experts stay plain, as adapters (`--enable-lora`) take them")
    elif internals.prefetches_weights():
        log.warning("tpde: experts stay plain, as `--offload-group-size` moves them")
    elif config.parallel_config.use_ubatching:
        log.warning("tpde: experts stay plain, as halves of a batch (`--enable-dbo`) run at a time")
    elif config.parallel_config.enable_eplb:
        raise InvalidInput(
            "`--enable-eplb` moves experts from device to device, which packed ones cannot",
            hint="leave it out",
            where="parallel_config",
        )
    else:
        return True
    return False


def quantized(said: dict[str, Any]) -> InvalidInput:
    """The error for files that are quantized, as they say, where `--hf-overrides` say that they are not."""
    method = said.get("quant_method")
    return InvalidInput(
        f"the model's files are quantized with `{method}`, in whose place `--hf-overrides` put tpde",
        hint="leave `quantization_config` out, or take the files of the model before it was quantized",
        where="quantization_config",
        found=method,
        needed=METHOD,
    )


def no_values(name: str) -> InvalidInput:
    """The error for a layer that vLLM brought no values for."""
    return InvalidInput(
        f"no values came for the weight of `{name}`: the files have none, or vLLM's code for this model "
        "writes them past the layer's loader, so that they cannot be packed",
        hint="see whether the model's files are complete; if they are, serve it without tpde",
        where=name,
    )


def other_loader(name: str) -> InvalidInput:
    """The error for a model that vLLM's own loader reads: it was asked for before there was word of tpde."""
    return InvalidInput(
        f"the weight of `{name}` is to be packed, and vLLM reads it by a loader that cannot: it hears of an "
        "EAGLE draft's `quantization` too late where the model itself is plain",
        hint="serve the model with `--quantization tpde`, too, or leave out that of the draft",
        where=name,
    )


def no_part(name: str, missing: str) -> InvalidInput:
    """The error for a matrix that vLLM merges from several tensors, of which some did not come."""
    return InvalidInput(
        f"values came for a part of `{name}`, and none for {missing}",
        hint="see whether the model's files are complete; to a model that serves, send all parts at a time",
        where=name,
    )


def came_twice(name: str) -> InvalidInput:
    """The error for a tensor that two files have: the layer is packed when the second one comes."""
    return InvalidInput(
        f"tensor `{name}` came twice: two of the model's files hold it, or a file plain and packed",
        hint="remove the file that is not the model's, or leave it out of the index",
        where=name,
    )


def no_room(name: str) -> PackedWeight:
    """The refusal to take other values for a weight that CUDA graphs read."""
    return PackedWeight(
        f"`{name}` cannot take other values where CUDA graphs read it: it is not in the window layout, or "
        "has no room for them",
        hint="start vLLM with the new weights, or with `--enforce-eager`",
        where=name,
    )


def no_parting(name: str) -> PackedWeight:
    """The refusal to take a head and an embedding that differ, where CUDA graphs read one matrix for both."""
    return PackedWeight(
        f"`{name}` is the head and the embedding, whose values were the same; vLLM was asked to load others, "
        "which differ, where CUDA graphs read it",
        hint="start vLLM with the new weights, or with `--enforce-eager`",
        where=name,
    )


def no_reload(name: str) -> PackedWeight:
    """The refusal to take other values for a weight that serves already."""
    return PackedWeight(
        f"`{name}` is packed, and serves; vLLM was asked to load other values into it",
        hint="start vLLM with the new weights",
        where=name,
    )


def no_saving(name: str) -> PackedWeight:
    """The refusal to give the model's tensors as vLLM saves them: blobs, under names of plain weights."""
    return PackedWeight(
        f"`{name}` is packed, and vLLM was asked for the model's tensors as it has them in memory, as "
        "`save_sharded_state` does: nothing could load them",
        hint="pack the model's files instead: `tpde pack MODEL DIR`",
        where=name,
    )


def no_matrix(name: str) -> PackedWeight:
    """The refusal to give a packed matrix as a tensor, to code of a model that is none of its layers'."""
    return PackedWeight(
        f"the weight of `{name or 'an embedding'}` is packed, and code of this model takes it for a plain "
        "matrix, to cut or to multiply it past its layer",
        hint="serve this model without tpde; of a draft, leave its `quantization` out",
        where=name or None,
    )
