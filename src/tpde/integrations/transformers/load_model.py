"""`tpde.from_pretrained`."""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tpde.errors import InvalidInput, TpdeError
from tpde.format.constants import METHOD
from tpde.integrations.transformers.folder import (
    model_directory,
    read_config,
    require_files,
    stored_dtype,
)
from tpde.integrations.transformers.keywords import suggesting
from tpde.loading.collection import collect_first, collecting_later
from tpde.loading.devices import WITHOUT_BUDGET, check_gpu, checked_device
from tpde.nn.kernels import Kernels, check_kernels
from tpde.nn.named_deltas import check_names
from tpde.planning.budget import Budget, parse_budget
from tpde.weights.delta_sources import DeltaLike

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_HUB = ("revision", "cache_dir", "local_files_only", "force_download", "token")  # how a model is downloaded


def model_class_of(folder: Path) -> Any:
    """The class of transformers that `config.json` names.

    Raises
    ------
    InvalidInput
        If it names none, or one that this transformers lacks.
    """
    import transformers

    names = read_config(folder).get("architectures") or []
    names = names if isinstance(names, list) else [names]
    found = getattr(transformers, str(names[0]), None) if names else None
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        lacks = f"names {names[:1]}, which transformers {transformers.__version__} lacks"
        raise InvalidInput(
            f"`{folder / 'config.json'}` {lacks if names else 'names no class'}",
            hint=(
                "upgrade transformers, or pass `model_class=` to `tpde.from_pretrained`, such as "
                "`transformers.AutoModelForCausalLM`"
            ),
        )
    return found


def _check_gpus(device_map: Any) -> None:
    """Refuse a budget of GPU memory where a model goes elsewhere."""
    for it in device_map.values() if isinstance(device_map, dict) else [device_map]:
        check_gpu(
            it,
            "name GPUs only (what does not fit them is kept in host memory or in its files by itself), or "
            "leave out `vram`",
        )


def _given_config(config: Any, folder: Path, said: dict[str, Any] | None) -> Any:
    """A configuration that is passed, which says of the weights what the directory's own does.

    Else transformers would find none of those that are packed, and make up all.

    Raises
    ------
    InvalidInput
        If it is none, or of a model that is quantized otherwise.
    """
    from transformers import AutoConfig, PreTrainedConfig

    if isinstance(config, (str, os.PathLike)):
        config = AutoConfig.from_pretrained(config)
    if not isinstance(config, PreTrainedConfig):
        raise InvalidInput(
            f"`config` is a {type(config).__name__}", hint="pass a configuration, or the path of one"
        )
    found = getattr(config, "quantization_config", None)
    method = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
    if found is not None and method != METHOD:
        raise InvalidInput(
            f"`config` is of a model that is quantized with `{method}`, `{folder}` is not",
            hint="leave it out, or pass one without `quantization_config`",
        )
    config = copy.deepcopy(config)
    if said is not None:
        config.quantization_config = said
    elif found is not None:
        del config.quantization_config
    return config


def _named_dtype(folder: Path, config: Any) -> Any:
    """The dtype that a configuration names, the directory's own if none is passed."""
    if config is not None:
        return getattr(config, "dtype", None)
    said = read_config(folder)
    return said.get("dtype") or said.get("torch_dtype")  # the latter is the former's old name


def from_pretrained(
    path: str | os.PathLike[str],
    device: str | int | torch.device | None = None,
    *,
    dtype: torch.dtype | str | None = None,
    model_class: type[Any] | None = None,
    deltas: Mapping[str, DeltaLike] | None = None,
    kernels: Kernels = "exact",
    pack: bool = False,
    vram: int | str | None = None,
    ram: int | str | None = None,
    max_tokens: int | None = None,
    max_batch: int | None = None,
    progress: Callable[[int], None] | None = None,
    **kwargs: Any,
) -> PreTrainedModel:
    """Build a transformers model straight from packed files, its weights staying packed.

    Outputs are those of the plain model, bit for bit, unless `kernels="fused"` is asked for. Neither host
    nor device ever holds the plain weights: device memory is that of the packed ones and of one transformer
    block. With `vram`, it is no more than that, whatever the size of the model: what does not fit stays in
    host memory, or in its files, and is copied to the device while the model computes.

    Parameters
    ----------
    path : path-like
        A model directory that `tpde pack` or `save_pretrained` wrote, or the id of one on the Hugging Face
        hub. With `pack`, a plain one, too.
    device : str, int or torch.device, optional
        Where the model goes: `cpu`, or a CUDA device. By default the GPU that PyTorch uses, or the CPU where
        there is none.
    dtype : torch.dtype or str, optional
        As of transformers' own `from_pretrained`. By default, what `config.json` says; weights that are
        stored otherwise are decoded and cast, and stay plain.
    model_class : type, optional
        Such as `transformers.AutoModelForCausalLM`. By default, the class that `config.json` names.
    deltas : mapping of str to bytes or path-like, optional
        Fine-tunes, as deltas on the model: files that `tpde diff` wrote, by the names that `model.use` takes.
        Each takes what differs, about 5.5 bits for each weight that changed. Not with `vram`.
    kernels : {"exact", "fused"}
        How linear layers are computed. With `"exact"`, weights are decoded, and outputs are the plain
        model's. With `"fused"`, up to 64 rows of inputs are multiplied straight from packed weights: a few
        sequences get their tokens faster than from plain weights on a GPU. Weights are exact, sums are added
        in another order than the matrix library's, the same in batches of any size up to that: see
        `tpde.nn.set_kernels`.
        With `vram`, that is so for weights that stay on the device for it where that makes tokens faster;
        those that are streamed are decoded, and multiplied as with `"exact"`. Not with `deltas`.
    pack : bool
        Take plain safetensors files, too, and pack weights as they come: on a GPU by the GPU, 256 MiB of them
        at a time. The model is one that was loaded from packed files; those need nothing of it. What is
        stored in another dtype than the model's stays plain. Not with `vram` or `deltas`.
    vram : int or str, optional
        Budget of device memory, in bytes or such as `"16GiB"`: all that the process takes of a device beyond
        the bare CUDA context. With `device_map`, of each GPU.
    ram : int or str, optional
        Of host memory that packed weights may be page-locked in; what exceeds it is read from the files each
        time. By default, there is no limit.
    max_tokens : int, optional
        With `vram`: memory is kept for so many tokens, sequences times their length. By default 8192.
    max_batch : int, optional
        With `vram`: memory is kept for so many sequences at once, for what each takes beside its tokens, such
        as copies of experts. By default 8.
    progress : callable, optional
        With `vram`: called with numbers of bytes while they are loaded, in several threads, one at a time.
        What stays in host memory is loaded in the background, and may not all be there on return.
    **kwargs
        For the class's `from_pretrained`, such as `attn_implementation` or `device_map`; and `revision`,
        `cache_dir`, `local_files_only`, `force_download`, `token`, of a model on the hub.

    Returns
    -------
    transformers.PreTrainedModel
        In evaluation mode. With `deltas`, it has a method `use`, which says whose weights the next forward
        pass is computed with, the base's until then, or, given a list, whose each row of a batch; and
        `tpde_deltas`, which says what there is.

    Raises
    ------
    MissingDependency
        If torch or transformers 5.13 is missing.
    NotPacked, InvalidInput
        If it is not a packed model, or a weight file is missing.
    Truncated, Corrupt, UnsupportedVersion
        If a file is damaged, or newer than this version. Chunks are checked when they are decoded first.
    OutOfMemory
        If the device has too little free memory; says how much is needed and free. If `vram` or `ram` cannot
        work; says which would.
    UnsupportedDevice
        If the device is not there, or cannot decode.
    MissingBase
        If a tensor is not what a delta was made from: it is named.

    Examples
    --------
    >>> model = tpde.from_pretrained("packed", device="cuda")  # doctest: +SKIP
    >>> model.generate(**tokenizer("Hello", return_tensors="pt").to("cuda"))  # doctest: +SKIP
    >>> model = tpde.from_pretrained("packed", deltas={"math": "math.tpde"})  # doctest: +SKIP
    >>> model.use("math")  # doctest: +SKIP
    >>> model.use(["math", None])  # for a batch of two requests  # doctest: +SKIP
    """
    budget = parse_budget(vram, ram, max_tokens, max_batch=max_batch)
    return load_model(
        path,
        device,
        budget,
        dtype=dtype,
        model_class=model_class,
        progress=progress,
        deltas=deltas,
        kernels=kernels,
        pack=pack,
        **kwargs,
    )


def load_model(
    path: str | os.PathLike[str],
    device: str | int | torch.device | None,
    budget: Budget | None,
    *,
    dtype: torch.dtype | str | None = None,
    model_class: type[Any] | None = None,
    progress: Callable[[int], None] | None = None,
    deltas: Mapping[str, DeltaLike] | None = None,
    kernels: Kernels = "exact",
    pack: bool = False,
    **kwargs: Any,
) -> PreTrainedModel:
    """`from_pretrained`, with a budget that was read before."""
    from tpde.integrations.transformers.config import TpdeConfig
    from tpde.integrations.transformers.load_target import loading_to
    from tpde.integrations.transformers.skeleton import skeleton

    if deltas is not None:
        check_names(deltas)
        if budget is not None:
            raise InvalidInput(
                "`deltas` stay on the device, where `vram` leaves no room for them",
                hint="pass one of the two",
                where="deltas",
            )
    if check_kernels(kernels) == "fused" and deltas is not None:
        raise InvalidInput(
            '`kernels="fused"` multiplies by weights that stay as they are, and `deltas` change them',
            hint="pass one of the two",
            where="kernels",
        )
    if not isinstance(pack, bool):
        raise InvalidInput(f"`pack` is {pack!r:.50}", hint="say True or False", where="pack", found=pack)
    if pack and (budget is not None or deltas is not None):
        other = "vram" if budget is not None else "deltas"
        raise InvalidInput(
            f"`{other}` takes packed files, and `pack` is for plain ones",
            hint="leave out `pack`, and name a packed model: `tpde pack` makes one",
            where="pack",
        )
    hub = {name: kwargs[name] for name in _HUB if kwargs.get(name) is not None}
    instead = ", or pass `pack=True`" if budget is None and deltas is None else ""
    subfolder = kwargs.pop("subfolder", None) or ""
    folder, said = model_directory(path, pack=pack, instead=instead, subfolder=subfolder, **hub)
    if kwargs.get("config") is not None:
        kwargs["config"] = _given_config(kwargs["config"], folder, said)
    if said is None:
        if kwargs.get("quantization_config") is not None:
            raise InvalidInput(
                "`quantization_config` has weights quantized, and `pack` has them packed as they are",
                hint="pass one of the two",
                where="quantization_config",
            )
        kwargs["quantization_config"] = TpdeConfig()
    if kwargs.get("variant") is None:  # else the files have other names
        require_files(folder)
    kind = model_class_of(folder) if model_class is None else model_class
    if device is not None and "device_map" in kwargs:
        raise InvalidInput("`device` and `device_map` both say where the model goes", hint="pass one of them")
    if budget is not None:
        device_map = kwargs.get("device_map")
        if device_map is None:
            device_map = device = "cuda" if device is None else device
        _check_gpus(device_map)
        checked_device("cuda", WITHOUT_BUDGET)
    # A map says by itself where everything goes.
    target = torch.device("cpu") if device is None and "device_map" in kwargs else checked_device(device)
    dtype = dtype or kwargs.pop("torch_dtype", None) or "auto"
    stored = said is not None and kwargs.get("variant") is None  # else transformers finds it, or has to
    if stored and dtype == "auto" and _named_dtype(folder, kwargs.get("config")) is None:
        dtype = stored_dtype(folder)  # transformers would look at plain tensors only
    known = inspect.signature(from_pretrained).parameters
    with (
        suggesting(kwargs, known),
        collecting_later(),
        loading_to(target, budget, progress, deltas, kernels, pack),
        torch.inference_mode(False),  # adapters could not train on what is made in it
    ):
        try:
            model: PreTrainedModel = kind.from_pretrained(folder, dtype=dtype, **kwargs)
        except TpdeError:
            raise
        except Exception:
            own = kind.__module__.partition(".")[0] == "transformers"  # others may read what they like
            if own and kwargs.keys().isdisjoint(("config", "trust_remote_code")):
                skeleton(folder, kind)  # which raises an error of ours if `config.json` is why
            raise
    if hasattr(model, "_hf_hook"):  # accelerate's put it in cycles, and nobody tells when it is dropped
        collect_first()
    return model
