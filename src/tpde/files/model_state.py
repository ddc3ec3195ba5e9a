"""The tensors of a file, loaded into a model: what is missing, and what nobody takes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import numpy as np

from tpde.errors import InvalidInput
from tpde.frameworks import torch_bytes

if TYPE_CHECKING:
    import torch

    State = Mapping[str, torch.Tensor]


def place(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a tensor's bytes are, and how many: of a packed weight, which has none, its blob's."""
    storage, size = tensor.untyped_storage(), tensor.element_size()
    begin = int(tensor.storage_offset()) * size
    return storage.data_ptr() + begin, min(tensor.numel() * size, storage.nbytes() - begin)


def identity(tensor: torch.Tensor) -> tuple[object, ...]:
    """What is equal for tensors that are one: where they lie, and how they are read."""
    read = tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.is_conj(), tensor.is_neg()
    return (*place(tensor), tensor.device, *read)


def load_state(model: torch.nn.Module, state: State, source: str, strict: bool) -> tuple[set[str], list[str]]:
    """Load tensors into a model, whose modules may take other names and shapes than they have.

    Returns
    -------
    missing, unexpected
        As of `tpde.torch.load_model`.

    Raises
    ------
    InvalidInput
        As `tpde.torch.load_model`: the model is as it was.
    """
    import torch

    own = {name: it for name, it in model.state_dict().items() if isinstance(it, torch.Tensor)}
    own = {name: it for name, it in own.items() if not torch.nn.parameter.is_lazy(it)}
    lacks, strange = own.keys() - state.keys(), [name for name in state if name not in own]
    others = [name for name, it in state.items() if name in own and it.shape != own[name].shape]
    for name in others:
        if not own[name].shape and state[name].numel() != 1:  # of which PyTorch takes the first number
            raise _other_shape(name, state, own, source)
    clashes = _clashes(own, state)
    if strict and clashes:
        name, first = next(iter(clashes.items()))
        raise InvalidInput(
            f"`{name}` and `{first}` are one tensor of the model, and differ in `{source}`",
            hint="untie them first, or pass `strict=False`, which loads one of them",
            where=name,
        )
    # Modules may know more names and shapes than they have: that is seen by loading.
    asks = bool(others) or (strict and bool(strange or _left(own, lacks)))
    before = {name: it.clone() for name, it in own.items() if asks and not hasattr(it, "packed")}
    try:
        found = model.load_state_dict(dict(state), strict=False)
    except BaseException as error:
        _restore(own, before)
        if isinstance(error, Exception):  # not Ctrl-C
            if others:
                raise _other_shape(others[0], state, own, source) from None
            _refuse(_left(own, lacks), strange, source, strict)
        raise
    if found is not None:  # a model may load in a way of its own
        lacks, strange = set(found.missing_keys), list(found.unexpected_keys)
    missing = _left(own, lacks)
    if strict and (missing or strange):
        _restore(own, before)
    _refuse(missing, strange, source, strict)
    return missing, [*strange, *clashes]


def _clashes(own: State, state: State) -> dict[str, str]:
    """Names that are one tensor of the model with an earlier one, of which the file has other bits."""
    first, found = dict[tuple[object, ...], str](), dict[str, str]()
    for name in state:
        if name not in own or not own[name].numel():
            continue
        other = first.setdefault(identity(own[name]), name)
        if other != name and not _same(state[name], state[other]):
            found[name] = other
    return found


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return np.array_equal(torch_bytes(one), torch_bytes(other))


def _left(own: State, lacks: Collection[str]) -> set[str]:
    """What of the lacking names is no part of a tensor that was loaded."""
    loaded = [it for name, it in own.items() if name not in lacks]
    known, wholes = {identity(it) for it in loaded}, dict[object, list[tuple[int, int]]]()
    for it in loaded:
        if it.is_contiguous():
            wholes.setdefault(_memory(it), []).append(place(it))

    def covered(tensor: torch.Tensor) -> bool:
        if identity(tensor) in known:
            return True
        begin, last = place(tensor)[0], 0
        if tensor.numel():
            last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        end = begin + (last + 1) * tensor.element_size()
        parts = wholes.get(_memory(tensor), []) if tensor.numel() else []
        return any(at <= begin and end <= at + size for at, size in parts)

    return {name for name in lacks if name not in own or not covered(own[name])}


def _memory(tensor: torch.Tensor) -> object:
    return tensor.device, tensor.untyped_storage().data_ptr()


def _restore(own: State, before: State) -> None:
    import torch

    for name, it in before.items():
        with torch.inference_mode(own[name].is_inference()), torch.no_grad():
            own[name].copy_(it)


def _other_shape(name: str, state: State, own: State, source: str) -> InvalidInput:
    found, needed = tuple(state[name].shape), tuple(own[name].shape)
    return InvalidInput(
        f"tensor `{name}` has the shape {list(found)} in `{source}`, and {list(needed)} in the model",
        hint="build the model that was saved",
        where=name,
        found=found,
        needed=needed,
    )


def _refuse(missing: set[str], unexpected: list[str], source: str, strict: bool) -> None:
    """Refuse what is left, if it is to be `strict`."""
    if not strict or not (missing or unexpected):
        return
    lacks = [
        f"{whose} lacks {len(names)} tensors, such as {', '.join(f'`{it}`' for it in names[:3])}"
        for whose, names in (("it", sorted(missing)), ("the model", unexpected))
        if names
    ]
    raise InvalidInput(
        f"`{source}` is of another model: {'; '.join(lacks)}",
        hint="build the model that was saved, or pass `strict=False`",
        where=source,
        found=unexpected,
        needed=sorted(missing),
    )
