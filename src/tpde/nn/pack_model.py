"""Packing live models, and turning them back."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from tpde.errors import InvalidArgument, PackedWeight
from tpde.files.given_tensors import require_module
from tpde.memory.device_memory import give_back
from tpde.nn.attached_deltas import leave_deltas
from tpde.nn.replace import (
    finish,
    packed_modules,
    replace_parameter,
    require_packed_class,
    restore,
    supports,
    ungroup,
)
from tpde.nn.slot import Slot
from tpde.nn.unpackable import kept_plain
from tpde.weights.frozen import format_of, formatted
from tpde.weights.pack_tensor import pack_tensors
from tpde.weights.packed_tensor import PackedTensor
from tpde.weights.parameter import PackedParameter

log = logging.getLogger("tpde")

MIN_BYTES = 16384  # smaller weights add more host work than they save memory


def _kept(parameter: nn.Parameter, cannot: str | None, min_bytes: int, adapted: bool) -> str | None:
    """Why a parameter stays plain; None if it may be packed.

    Parameters
    ----------
    parameter : nn.Parameter
        The parameter.
    cannot : str or None
        Why not all that hold it can have it packed.
    min_bytes : int
        As for `pack_module`.
    adapted : bool
        Whether most of the model is frozen.
    """
    if cannot is not None:
        return cannot
    if (
        type(parameter) is not nn.Parameter
        or parameter.layout is not torch.strided
        or not parameter.is_contiguous()
        or not parameter.dtype.is_floating_point
        or parameter.device.type not in ("cpu", "cuda")
    ):
        return "no contiguous tensors of floats on the CPU or a GPU"
    if parameter.numel() * parameter.element_size() < min_bytes:
        return f"smaller than `min_bytes={min_bytes}`"
    if adapted and parameter.requires_grad:
        return "trained, where most of the model is frozen"
    return None


def _memory(parameter: nn.Parameter) -> object:
    """What is equal for parameters that are one, or that read the same memory alike."""
    if type(parameter) is not nn.Parameter or parameter.layout is not torch.strided:
        return id(parameter)
    at = parameter.data_ptr()  # 0 of what has none
    read = parameter.device, parameter.dtype, parameter.shape, parameter.stride()
    return (at, *read) if at else id(parameter)


def _overlapping(parameters: Sequence[nn.Parameter]) -> Iterator[nn.Parameter]:
    """Those that share bytes with another one, of different memory: packed alone, they would be untied."""
    spans = []
    for it in parameters:
        if type(it) is nn.Parameter and it.layout is torch.strided and it.numel() and it.data_ptr():
            last = sum((size - 1) * step for size, step in zip(it.shape, it.stride(), strict=True))
            begin = it.data_ptr()
            spans.append((str(it.device), begin, begin + (last + 1) * it.element_size(), it))
    before: tuple[str, int, int, nn.Parameter] | None = None  # that which ends last
    for span in sorted(spans, key=lambda span: span[:3]):
        if before is not None and before[0] == span[0] and span[1] < before[2]:
            yield from (before[3], span[3])
            before = max(before, span, key=lambda span: span[2])
        else:
            before = span


def _check_min_bytes(min_bytes: Any) -> None:
    """Refuse what is no number of bytes.

    Raises
    ------
    InvalidArgument
        If it is something else.
    """
    if isinstance(min_bytes, bool) or not isinstance(min_bytes, int) or min_bytes < 0:
        raise InvalidArgument(
            f"`min_bytes` is {min_bytes!r:.50}",
            hint="give a number of bytes, a whole one; with 0, weights of all sizes are packed",
            where="min_bytes",
            found=min_bytes,
        )


class _Chosen(NamedTuple):
    """What is done with a model's parameters.

    Attributes
    ----------
    work : list of lists of (str, nn.Parameter)
        Those to be packed, each with all places that have it.
    tied : list of (str, PackedParameter)
        Places that were tied to packed weights since these were packed.
    plain : Counter of str
        How many stay plain, by why.
    """

    work: list[list[tuple[str, nn.Parameter]]]
    tied: list[tuple[str, PackedParameter]]
    plain: Counter[str]


def _choose(model: nn.Module, min_bytes: int) -> _Chosen:
    """Say which parameters are packed.

    Raises
    ------
    InvalidArgument
        If one has no shape yet.
    """
    places: dict[object, list[tuple[str, nn.Parameter, str | None]]] = {}
    sizes = {True: 0, False: 0}  # of what requires gradients, and what does not
    kept = kept_plain(model)
    made = _Chosen([], [], Counter())
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                full = f"{path}.{name}" if path else name
                if is_lazy(parameter):
                    raise InvalidArgument(
                        f"`{full}` has no shape yet",
                        hint="call the model once before it is packed, or load its weights",
                        where=full,
                    )
                cannot = f"such that each {kept[full]}" if full in kept else None
                if not supports(module, name):
                    cannot = "of layers that keep theirs plain, as norms do, or biases"
                before = isinstance(parameter, PackedParameter)  # by an earlier call
                if before and cannot is None and name not in getattr(module, "tpde_slots", ()):
                    made.tied.append((full, parameter))
                memory = _memory(parameter)
                if memory not in places:
                    trained = parameter.plain_requires_grad if before else parameter.requires_grad
                    sizes[trained] += parameter.numel()
                places.setdefault(memory, []).append((full, parameter, cannot))
    overlapping = {id(it) for it in _overlapping([uses[0][1] for uses in places.values()])}
    for uses in places.values():
        cannot = next((it for _, _, it in uses if it is not None), None)
        if id(uses[0][1]) in overlapping:
            cannot = "such that they share memory with others, but not all of it alike"
        most = next((it for _, it, _ in uses if it.requires_grad), uses[0][1])
        why = _kept(most, cannot, min_bytes, sizes[True] < sizes[False])
        if why is None:
            made.work.append([(full, parameter) for full, parameter, _ in uses])
        else:
            made.plain[why] += 1
    return made


def _tensors(work: Sequence[Sequence[tuple[str, nn.Parameter]]]) -> Iterator[tuple[str, Tensor]]:
    """What is packed, one after the other; the memory of those before it is a device's again."""
    for uses in work:
        give_back(uses[0][1].device)
        yield uses[0][0], uses[0][1].data


def _replace(model: nn.Module, uses: Sequence[tuple[str, nn.Parameter]], packed: PackedTensor) -> None:
    """Put a packed weight in all places that have a parameter."""
    made: dict[int, PackedParameter] = {}  # by parameters: tied weights are one, or share memory
    for full, parameter in uses:
        if id(parameter) not in made:
            made[id(parameter)] = PackedParameter(packed, parameter.requires_grad, format_of(parameter))
        replace_parameter(model, full, made[id(parameter)])


def pack_module(model: nn.Module, *, threads: int | None = None, min_bytes: int = MIN_BYTES) -> nn.Module:
    """Pack the weights of modules, in place: what `tpde.pack_module` does, which tells transformers, too.

    Parameters and result are those of `tpde.pack_module`.

    Raises
    ------
    InvalidArgument
        If it is no module, or has a parameter without a shape yet. If `min_bytes` is no number of bytes.
    """
    hint = "`tpde.pack` packs files and directories, and `tpde.torch.save_file` packs tensors"
    require_module(model, "pack_module", hint)
    _check_min_bytes(min_bytes)
    work, tied, plain = _choose(model, min_bytes)
    devices, frozen = {uses[0][1].device for uses in work}, 0
    for uses, packed in zip(work, pack_tensors(_tensors(work), threads), strict=True):
        if packed is not None:
            frozen += uses[0][1].requires_grad
            _replace(model, uses, packed)
        else:
            plain["such that they would not shrink"] += 1
        uses.clear()  # nothing here holds the plain weight any more
    for device in devices:
        give_back(device)
    for full, held in tied:
        replace_parameter(model, full, held)
    if not any(packed_modules(model)):
        what = ", ".join(f"{why} ({count})" for why, count in plain.most_common())
        what = f"its parameters are {what}" if what else "it has no parameters"
        log.warning("nothing of the %s was packed: %s", type(model).__name__, what)
    if frozen:
        log.info("packed parameters of the %s that are no longer trained: %d", type(model).__name__, frozen)
    return finish(model)


def unpack_module(model: nn.Module) -> nn.Module:
    """Turn packed modules back, in place: what `tpde.unpack_module` does, which tells transformers, too.

    Raises
    ------
    InvalidArgument, Corrupt, PackedWeight
        As `tpde.unpack_module`.
    """
    require_module(model, "unpack_module")
    for path, module in packed_modules(model):
        require_packed_class(path or type(model).__name__, module)
    slots = {slot for _, module in packed_modules(model) for slot in module.tpde_slots.values()}
    weights = {it.packed for it in slots} | {it.packed for _, _, it in _packed_parameters(model)}
    for packed in weights:
        for source in packed.sources:
            source.require_restorable()
        if not slots.issuperset(it for it in packed.users() if isinstance(it, Slot)):
            raise PackedWeight(
                f"`{packed.name}` is tied to a weight of a module outside of what is unpacked, which "
                "would no longer be tied",
                hint="unpack a model that holds both",
            )
    active = {packed.active_delta for packed in weights}
    leave_deltas(model, {it for it in active if it is not None})
    ungroup(model)
    made: dict[int, nn.Parameter] = {}  # by packed ones: tied weights are one, or share memory
    memory: dict[int, Tensor] = {}

    def plain(held: PackedParameter) -> nn.Parameter:
        key, packed = id(held), id(held.packed)
        if key not in made:
            if packed not in memory:
                memory[packed] = _own(held)
            with torch.inference_mode(False):  # what is made in inference mode cannot be trained
                made[key] = nn.Parameter(memory[packed], requires_grad=held.plain_requires_grad)
        return made[key]

    for _, module in list(packed_modules(model)):
        restore(module, {name: plain(slot.parameter) for name, slot in module.tpde_slots.items()})
    tied_since = list(_packed_parameters(model))
    for other, name, held in tied_since:
        other._parameters[name] = plain(held)
    return model


def _packed_parameters(model: nn.Module) -> Iterator[tuple[nn.Module, str, PackedParameter]]:
    """Packed weights with the modules that hold them as parameters, and by which names."""
    for module in model.modules():
        for name, held in module._parameters.items():
            if isinstance(held, PackedParameter):
                yield module, name, held


def _own(parameter: PackedParameter) -> Tensor:
    """A weight in memory of exactly its size."""
    with torch.inference_mode(False), torch.no_grad():
        return formatted(parameter.packed.decoded().clone(), parameter.memory_format)


def plain_state_dict(model: nn.Module) -> dict[str, Any]:
    """The state dict that the model would have if it were plain.

    `model.state_dict()` has the same names, and packed weights.

    Parameters
    ----------
    model : nn.Module
        A packed model.

    Returns
    -------
    dict of str to torch.Tensor
        Tied weights share memory.

    Raises
    ------
    InvalidArgument
        If it is no module.
    """
    require_module(model, "plain_state_dict")
    made: dict[int, Tensor] = {}

    def plain(value: Any) -> Any:
        if not isinstance(value, PackedParameter):
            return value
        if id(value.packed) not in made:
            made[id(value.packed)] = _own(value)
        return made[id(value.packed)]

    return {name: plain(value) for name, value in model.state_dict().items()}
