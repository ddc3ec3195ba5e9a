"""Models of diffusers built straight from packed files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from tpde.errors import InvalidInput, MissingDependency
from tpde.files.shards import read_index
from tpde.files.weight_files import not_packed
from tpde.format.container import TensorSpec
from tpde.frameworks import torch_dtype
from tpde.integrations.diffusers.dtypes import expected_dtype
from tpde.integrations.diffusers.streamed import planned
from tpde.loading.assignment import assign
from tpde.loading.checkpoint_files import Checkpoint, Stored
from tpde.loading.collection import collecting_later
from tpde.loading.devices import WITHOUT_BUDGET, check_gpu, checked_device
from tpde.loading.runs import Run
from tpde.nn import finish, replace_parameter, supports
from tpde.planning.budget import parse_budget

WEIGHTS = "diffusion_pytorch_model"

M = TypeVar("M", bound=nn.Module)


def weight_files(folder: Path, variant: str | None) -> list[Path]:
    """The weight files of a component, in order.

    Raises
    ------
    InvalidInput
        If there are none, or an index is none.
    """
    stem = WEIGHTS if variant is None else f"{WEIGHTS}.{variant}"
    # Of a variant in shards, diffusers writes the index under either of two names.
    for index in (
        folder / f"{stem}.safetensors.index.json",
        folder / f"{WEIGHTS}.safetensors.index.{variant}.json",
    ):
        if index.exists():
            return read_index(index).files()
    single = folder / f"{stem}.safetensors"
    if not single.is_file():
        raise InvalidInput(
            f"`{folder}` has no `{single.name}`",
            hint=(
                "name the folder of one component of a pipeline, such as `transformer` or `unet`, as `tpde "
                "pack` wrote it"
            ),
        )
    return [single]


def build(model_class: type[M], folder: Path, dtype: torch.dtype) -> M:
    """A model as its `config.json` says, its parameters on the `meta` device, its buffers computed.

    As diffusers does it, `dtype` is the default one meanwhile.

    Raises
    ------
    MissingDependency
        If diffusers, or accelerate, which it uses for this, is missing.
    """
    try:
        import diffusers  # noqa: F401 - so that its absence is named
        from accelerate import init_empty_weights
    except ImportError as error:
        raise MissingDependency(
            f"models of diffusers need it and accelerate, which cannot be imported ({error})",
            hint='run `pip install "tpde[diffusers]"`',
        ) from None
    kind: Any = model_class
    config = {k: v for k, v in kind.load_config(folder).items() if k != "quantization_config"}
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with init_empty_weights(include_buffers=False):
            model: M = kind.from_config(config)
    finally:
        torch.set_default_dtype(before)
    return model.eval()


def load(
    model_class: type[M],
    path: str | os.PathLike[str],
    device: str | int | torch.device | None = None,
    *,
    dtype: torch.dtype | None = None,
    variant: str | None = None,
    vram: int | str | None = None,
    ram: int | str | None = None,
    activations: int | str | None = None,
) -> M:
    """Build a transformer or UNet of a pipeline from packed files, its weights staying packed.

    Outputs are those of diffusers' own `model_class.from_pretrained(..., torch_dtype=dtype)` of the plain
    files, bit for bit. Neither host nor device ever holds all plain weights.

    Parameters
    ----------
    model_class : type
        A model class of diffusers, such as `diffusers.UNet2DConditionModel`.
    path : path-like
        The component's folder in what `tpde pack` wrote, of the component alone or of the whole pipeline.
    device : str, int or torch.device, optional
        Where the model goes: `cpu`, or a CUDA device. By default the GPU that PyTorch uses, or the CPU where
        there is none.
    dtype : torch.dtype, optional
        By default, that in which most weights are stored. Weights that are stored otherwise, or that the
        class keeps in 32 bits, are decoded and cast, and stay plain.
    variant : str, optional
        As of diffusers' own `from_pretrained`, such as `fp16`.
    vram : int or str, optional
        Device memory that is planned for this model, in bytes or such as `"8GiB"`: weights, buffers,
        kernels and `activations`. What does not fit stays in host memory, and is copied to the device while
        the model computes. A pipeline's other components come on top: unlike that of `tpde.from_pretrained`,
        this budget limits neither them nor what a forward pass takes beyond `activations`.
    ram : int or str, optional
        Of host memory that weights may be page-locked in; what exceeds it is read from the files each time.
        By default, there is no limit.
    activations : int or str, optional
        The part of `vram` that is left free for what a forward pass computes: that depends on the images. By
        default 1 GiB.

    Returns
    -------
    nn.Module
        In evaluation mode, to be passed to a pipeline. With `vram`, its `tpde_streamer` brings the weights.

    Raises
    ------
    MissingDependency
        If diffusers or accelerate is missing.
    NotPacked, InvalidInput
        If it is not a packed component, or one of another class, or a budget is none.
    Truncated, Corrupt, UnsupportedVersion
        If a file is damaged, or newer than this version.
    OutOfMemory
        If the device has too little free memory, or `vram` or `ram` cannot work; says which would.
    UnsupportedDevice
        If the device is not there, or cannot decode.

    Examples
    --------
    >>> unet = load(UNet2DConditionModel, "sd-packed/unet", device="cuda")  # doctest: +SKIP
    >>> pipe = StableDiffusionPipeline.from_pretrained("sd", unet=unet).to("cuda")  # doctest: +SKIP
    """
    budget = parse_budget(vram, ram, activations=activations)
    folder = Path(path)
    if budget is None:
        target = checked_device(device)
    else:
        target = checked_device("cuda" if device is None else device, WITHOUT_BUDGET)
        check_gpu(target, 'pass `device="cuda"`, or leave out `vram`')
    files = weight_files(folder, variant)
    # Adapters could not train on what is made in inference mode.
    with torch.inference_mode(False), collecting_later(), Checkpoint(files) as checkpoint:
        if not checkpoint.is_packed:
            raise not_packed(
                folder,
                f"`{folder}` is not packed",
                hint=f"pack it with `tpde pack {folder} {folder.name}-packed`, and name that",
            )
        specs = checkpoint.plain | {name: it.spec for name, it in checkpoint.packed.items()}
        main = _main_dtype(specs) if dtype is None else dtype
        model = build(model_class, folder, main)
        _compare(model, specs, folder)
        packed, plain = _sort(model, checkpoint, specs, main)
        with ExitStack() as undo:
            streaming = None
            if budget is not None:
                streaming = planned(model, packed, target, budget)
                undo.callback(streaming.close)
            for name, wanted in plain.items():
                stored = checkpoint.packed.get(name)
                if stored is None:
                    assign(model, name, checkpoint.plain_tensor(name, target).to(wanted), frozen=True)
                else:
                    assign(model, name, checkpoint.decode([stored.run], target, wanted)[0], frozen=True)
            if streaming is None:
                parts = checkpoint.open(packed, dict.fromkeys(packed, target))
            else:
                parts = streaming.load(model, checkpoint, packed, dict.fromkeys(packed, target))
            for name, weight in parts.items():
                replace_parameter(model, name, weight)
            # What is in no file: buffers that models compute.
            for module in model.modules():
                for name, buffer in module._buffers.items():
                    if buffer is not None and buffer.device.type != "meta":
                        module._buffers[name] = buffer.to(target)
            if streaming is not None:
                streaming.cut(model)
            finish(model)
            if streaming is not None:
                streaming.attach(model)
                streaming.begin(model)
            undo.pop_all()
    from tpde.integrations.diffusers.quantizer import belong  # diffusers is there by now

    belong(model)
    return model


def _main_dtype(specs: Mapping[str, TensorSpec]) -> torch.dtype:
    """The floating-point dtype in which most bytes are stored."""
    sizes: dict[torch.dtype, int] = {}
    for spec in specs.values():
        dtype = torch_dtype(spec.dtype)
        if dtype.is_floating_point:
            sizes[dtype] = sizes.get(dtype, 0) + spec.nbytes
    return max(sizes, key=lambda dtype: sizes[dtype], default=torch.get_default_dtype())


def _compare(model: nn.Module, specs: Mapping[str, TensorSpec], folder: Path) -> None:
    """Check that files and model have the same tensors."""
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    what = type(model).__name__
    for missing, message in (
        ([name for name in wanted if name not in specs], f"`{folder}` lacks `%s`, which a {what} has"),
        ([name for name in specs if name not in wanted], f"`{folder}` has `%s`, which a {what} has not"),
    ):
        if missing:
            more = f" ({len(missing)} tensors)" if len(missing) > 1 else ""
            raise InvalidInput(
                message % missing[0] + more, hint="pass the class that `config.json` names", where=missing[0]
            )
    for name, shape in wanted.items():
        if specs[name].shape != shape:
            raise InvalidInput(
                f"`{name}` has shape {list(specs[name].shape)} in `{folder}`, a {what} of its `config.json` "
                f"needs {list(shape)}",
                hint="fetch `config.json` and the weights together",
                where=name,
                found=specs[name].shape,
                needed=shape,
            )


def _sort(
    model: nn.Module, checkpoint: Checkpoint, specs: Mapping[str, TensorSpec], dtype: torch.dtype
) -> tuple[dict[str, Run[Stored]], dict[str, torch.dtype]]:
    """Give all that is in the files its dtype in the model, without data, and say what stays packed.

    Returns
    -------
    packed : dict of str to Run
        What stays packed, each a run of one tensor.
    plain : dict of str to torch.dtype
        The rest, and what it is to be cast to.
    """
    packed: dict[str, Run[Stored]] = {}
    plain: dict[str, torch.dtype] = {}
    kept = getattr(model, "_keep_in_fp32_modules", None)
    for name, spec in specs.items():
        stored, found = checkpoint.packed.get(name), torch_dtype(spec.dtype)
        wanted = expected_dtype(kept, name, dtype) if found.is_floating_point else found
        path, _, leaf = name.rpartition(".")
        if stored is not None and wanted is found and supports(model.get_submodule(path), leaf):
            packed[name] = stored.run
        else:
            plain[name] = wanted
        assign(model, name, torch.empty(spec.shape, dtype=wanted, device="meta"), frozen=True)
    return packed, plain
