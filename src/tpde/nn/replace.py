"""Replacing a module's parameters by packed ones, and putting packed modules of a model into groups."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tpde.errors import InvalidInput, PackedWeight
from tpde.files.given_tensors import require_module
from tpde.nn.embedding import PackedEmbedding
from tpde.nn.group import Group, GroupSlot
from tpde.nn.module_state import CONVOLUTIONS
from tpde.nn.modules import PackedModule, is_conv1d, packed_class
from tpde.nn.moving import ask_first, ask_no_more, holders
from tpde.nn.no_deltas import promise_no_use, promise_use
from tpde.nn.owner import CopiedModule, Owner
from tpde.nn.scope import BlockForward
from tpde.nn.slot import Slot
from tpde.nn.workspace import Pool
from tpde.weights.packed_tensor import PackedTensor
from tpde.weights.parameter import PackedParameter

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def supports(module: nn.Module, name: str) -> bool:
    """Whether a parameter of a module can be packed.

    Those are the weights of linear layers, embeddings, convolutions and transformers' `Conv1D`, and the
    three-dimensional parameters of modules that are not PyTorch's own: the fused experts of
    mixture-of-experts models.

    Parameters
    ----------
    module : nn.Module
        What holds the parameter.
    name : str
        Its name there.
    """
    if isinstance(module, torch.jit.ScriptModule):  # its code computes with plain weights
        return False
    if nn.utils.parametrize.is_parametrized(module):  # its class is one of its own, which PyTorch changes
        return False
    if getattr(module, "qconfig", None) is not None:  # it is to be quantized, by code that knows plain layers
        return False
    kind = module.tpde_base if isinstance(module, PackedModule) else type(module)
    parameter = module._parameters.get(name)
    if parameter is None or _computes(kind, name):
        return False
    if name == "weight" and isinstance(module, nn.Embedding):
        # Renormalizing changes the weight, and sparse gradients are those of a trained one.
        return module.max_norm is None and not module.sparse
    if name == "weight" and (isinstance(module, (nn.Linear, *CONVOLUTIONS)) or is_conv1d(kind)):
        return True
    # Of one slice, it is something else, such as the positions of a vision transformer.
    return parameter.dim() == 3 and parameter.shape[0] > 1 and not kind.__module__.startswith("torch.")


def _computes(kind: type[nn.Module], name: str) -> bool:
    """Whether a class has code of its own for reading a parameter or a linear layer's bias.

    Such as a property that scales it: packed modules do not run it.
    """
    names, missing = (name, "bias") if issubclass(kind, nn.Linear) else (name,), object()
    if any(inspect.getattr_static(kind, it, missing) is not missing for it in names):
        return True
    asked = kind.__getattribute__, getattr(kind, "__getattr__", None)
    return asked != (nn.Module.__getattribute__, nn.Module.__getattr__)


def _find(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    try:
        return model.get_submodule(path), leaf
    except AttributeError:
        raise InvalidInput(f"the model has no parameter `{name}`") from None


def replace_parameter(model: nn.Module, name: str, packed: PackedTensor | PackedParameter) -> None:
    """Replace a plain parameter, which may be on the `meta` device, by a packed one.

    Tied parameters are given the same `PackedParameter`. When all are replaced, call `finish`.

    Parameters
    ----------
    model : nn.Module
        What the name is relative to.
    name : str
        The parameter's qualified name, such as `model.layers.0.mlp.up_proj.weight`.
    packed : PackedTensor or PackedParameter
        The weight. A tensor becomes a parameter that says of gradients what the one before says.

    Raises
    ------
    InvalidInput
        If there is no such parameter, it cannot be packed (see `supports`), or has another dtype or shape.
    """
    module, leaf = _find(model, name)
    parameter = module._parameters.get(leaf)
    if parameter is None:
        raise InvalidInput(f"the model has no parameter `{name}`")
    if not supports(module, leaf):
        raise InvalidInput(
            f"`{name}` of a {type(module).__name__} cannot be packed: linear layers, embeddings, "
            "convolutions and fused experts can",
            hint="leave it plain",
        )
    made = PackedParameter(packed, parameter.requires_grad) if isinstance(packed, PackedTensor) else packed
    if made.dtype != parameter.dtype or made.shape != parameter.shape:
        raise InvalidInput(
            f"`{name}` is {parameter.dtype} of shape {list(parameter.shape)}, the packed weight "
            f"{made.dtype} of shape {list(made.shape)}",
            hint="pass one that is alike",
        )
    if isinstance(module, PackedModule):
        slots = module.tpde_slots
    else:
        slots = {}
        module.__dict__["tpde_base"] = type(module)
        module.__dict__["tpde_slots"] = slots
    slots[leaf] = Slot(leaf, made)
    module._parameters[leaf] = made
    module.__class__ = packed_class(module.__dict__["tpde_base"], tuple(slots))


def packed_modules(model: nn.Module) -> Iterator[tuple[str, PackedModule]]:
    """Packed modules with their names.

    Raises
    ------
    InvalidArgument
        If `model` is no module.
    """
    require_module(model, "packed_modules")
    for name, module in model.named_modules():
        if isinstance(module, PackedModule):
            yield name, module


def block_path(model: nn.Module, path: str) -> str | None:
    """The name, up to a number, of the outermost module that is called as a whole; None if there is none.

    docs/format.md 1.5 calls it the block of a tensor. A list of modules is never called.
    """
    parts = path.split(".")
    for i, part in enumerate(parts):
        if part.isdecimal():
            module: Any = model
            for name in parts[: i + 1]:  # `get_submodule` takes three times as long
                module = module._modules[name]
            if not isinstance(module, _CONTAINERS):
                return ".".join(parts[: i + 1])
    return None


def finish(model: nn.Module) -> nn.Module:
    """Put packed weights into groups, wrap the blocks' forward passes, and reserve the workspace.

    Weights of one transformer block are decoded together, when the block is called. Calling this again is
    allowed, and needed after more parameters were replaced.

    Parameters
    ----------
    model : nn.Module
        The whole model: blocks are recognised by the modules' names.

    Returns
    -------
    nn.Module
        `model`.

    Raises
    ------
    UnsupportedDevice, MissingDependency, CompileError
        If blobs are on a GPU that cannot decode them.
    """
    ungroup(model)
    for holder in holders(model):
        ask_first(holder)
        holder.__dict__["__reduce_ex__"] = CopiedModule(Owner(holder))
    promise_use(model)
    pool = Pool()
    members: dict[str, list[GroupSlot]] = {}
    blocks: dict[str, str] = {}
    for name, module in packed_modules(model):
        whole = block_path(model, name)
        for slot in module.tpde_slots.values():
            if isinstance(module, PackedEmbedding):  # rows are decoded as asked for, never all of them
                if slot.packed.together and slot.packed.settled:  # else they may not be there yet
                    slot.packed.prepare_rows()
                continue
            block = whole
            if slot.packed.of_experts:  # decoded by themselves, where they are not multiplied as they are
                block = None
            elif slot.packed.multiplies:  # on the device as it is multiplied
                slot.leave()
                continue
            where = name if block is None else block
            members.setdefault(where, []).append(slot)
            if block is not None:
                blocks[where] = block
    groups = {name: Group(name, slots, pool) for name, slots in members.items()}
    pool.spread = len({slot.device for slots in members.values() for slot in slots}) > 1
    # Decoders are made on the way of each block's weights to a device; here for those that are there already.
    for name, group in sorted(groups.items(), key=lambda item: -item[1].nbytes):
        group.prepare()
        holder = model.get_submodule(name)
        if name in blocks:
            holder.__dict__["tpde_forward"] = BlockForward(group, holder)
            holder.__dict__["forward"] = holder.__dict__["tpde_forward"]
            holder.__dict__["__reduce_ex__"] = CopiedModule(Owner(holder))
        else:  # somebody must hold it, and copy it with the module
            holder.__dict__["tpde_own_group"] = group
    return model


def prepare_rows(model: nn.Module) -> None:
    """Put on the devices what looking up rows needs, also of embeddings that stay in the host's memory.

    Waits until those are there. A CUDA graph may be recorded afterwards.

    Parameters
    ----------
    model : nn.Module
        After `finish`.
    """
    for _, module in packed_modules(model):
        for slot in module.tpde_slots.values() if isinstance(module, PackedEmbedding) else ():
            if slot.packed.together:
                slot.packed.prepare_rows()


def ungroup(model: nn.Module) -> None:
    """Undo what `finish` did."""
    for module in model.modules():
        module.__dict__.pop("tpde_own_group", None)
        ask_no_more(module)
        promise_no_use(module)
        if isinstance(module.__dict__.get("__reduce_ex__"), CopiedModule):
            del module.__dict__["__reduce_ex__"]
        if "tpde_forward" in module.__dict__:
            ours: BlockForward = module.__dict__.pop("tpde_forward")
            ours.group = None  # whoever put something in its place may go on calling it
            ours.leave(module)


def require_packed_class(path: str, module: PackedModule) -> None:
    """Refuse to restore a module whose class others have derived from the packed one: theirs would be lost.

    Raises
    ------
    PackedWeight
        Naming the module.
    """
    if type(module) is not packed_class(module.tpde_base, tuple(module.tpde_slots)):  # type: ignore[arg-type]
        raise PackedWeight(
            f"the class of `{path}`, {type(module).__name__}, was made from the packed module's, and would "
            "be lost by unpacking it",
            hint="give it the class before that one, as `parametrize.remove_parametrizations` does",
            where=path,
        )


def restore(module: PackedModule, plain: dict[str, torch.nn.Parameter]) -> None:
    """Give a packed module back the class that it had, and plain parameters: undoes `replace_parameter`."""
    object.__setattr__(module, "__class__", module.tpde_base)
    for key in ("tpde_base", "tpde_slots"):
        del module.__dict__[key]
    module._parameters.update(plain)
