"""`tpde.nn.add_deltas`: deltas by the names that `model.use` takes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, closing
from typing import Any

from torch import Tensor, nn

from tpde.errors import InvalidInput, MissingBase, PackedWeight
from tpde.files.given_tensors import require_module
from tpde.frameworks import torch_spec
from tpde.nn.attached_deltas import attach, require_none
from tpde.store.states import MEMORY, right_base
from tpde.weights.changed import Variant
from tpde.weights.delta_sources import Delta, DeltaLike, entries_of, only_source, values_of, variants_of
from tpde.weights.packed_tensor import PackedTensor
from tpde.weights.parameter import PackedParameter
from tpde.weights.source import Source


def check_names(deltas: object) -> None:
    """Refuse deltas that have no names by which they can be used.

    Raises
    ------
    InvalidInput
        If it is no mapping, or empty, or has a key that is no text.
    """
    hint = 'pass a mapping such as {"math": "math.tpde"}'
    if not isinstance(deltas, Mapping):
        raise InvalidInput(f"`deltas` is a {type(deltas).__name__}", hint=hint, where="deltas")
    if not deltas or not all(isinstance(it, str) and it for it in deltas):
        raise InvalidInput(f"deltas are called {list(deltas)}", hint=hint, where="deltas")


def add_deltas(model: nn.Module, deltas: Mapping[str, DeltaLike]) -> nn.Module:
    """Let a model have other states of its weights beside its own, each taking what differs.

    Nothing changes until `model.use(name)`. A weight that is packed stays so: a few changes are kept as the
    delta has them, about 5.5 bits for each word that changed, and decoded after the base whenever the weight
    is; weights of which most changed are packed. Plain parameters and buffers are kept as copies.

    Parameters
    ----------
    model : nn.Module
        The base: as `tpde.pack_module` gives it, or any module that holds packed weights.
    deltas : mapping of str to bytes or path-like
        Deltas by the names that `use` takes: what `tpde.make_delta` gives, or files that `tpde diff` wrote.
        Tensors are called as in `model.state_dict()`.

    Returns
    -------
    nn.Module
        `model`, with the method `use`, for all rows of a batch or for each, and `tpde_deltas` that says which
        deltas there are.

    Raises
    ------
    MissingBase
        If a tensor is not what a delta was made from, or not there: it is named, and nothing was changed.
    InvalidInput
        If it is no model, no delta, no name, or the model has deltas already; if what they change is in a
        ScriptModule.
    PackedWeight
        If a delta changes a weight that is made of several tensors, or most of one which does not shrink.
    Truncated, Corrupt, UnsupportedVersion
        If a delta is damaged, or newer than this version.

    Examples
    --------
    >>> model = tpde.pack_module(model)  # doctest: +SKIP
    >>> tpde.nn.add_deltas(model, {"math": "math.tpde"}).use("math")  # doctest: +SKIP
    """
    hint = "pass the model first, such as `tpde.from_pretrained(path)` gives, and then its deltas"
    require_module(model, "add_deltas", hint)
    check_names(deltas)
    require_none(model)
    with ExitStack() as files:
        opened = {name: files.enter_context(closing(Delta(it))) for name, it in deltas.items()}
        state: dict[str, Any] = model.state_dict(keep_vars=True)
        for it in opened.values():
            require_known(it, state, MEMORY)
        uses: dict[int, list[str]] = {}  # of tied ones, each is there once
        for name, tensor in state.items():
            if isinstance(tensor, Tensor):
                uses.setdefault(id(tensor), []).append(name)
        variants: dict[Source, dict[str, Variant]] = {}
        plain: dict[str, dict[str, Tensor]] = {}
        for names in uses.values():
            tensor = state[names[0]]
            entries = entries_of(names, torch_spec(names[0], tensor), opened, MEMORY)
            if not isinstance(tensor, PackedParameter):
                plain[names[0]] = values_of(tensor, entries, opened, MEMORY)
            elif entries:
                _require_codes(tensor.packed)
                source = only_source(tensor.packed, names[0])
                variants[source] = variants_of(source, entries, opened, MEMORY)
    attach(model, list(deltas), variants, {name: it for name, it in plain.items() if it})
    return model


def _require_codes(packed: PackedTensor) -> None:
    """Refuse weights that are multiplied as they are: with deltas to choose from, they are decoded.

    Raises
    ------
    PackedWeight
        Naming the weight.
    """
    if packed.multiplies:
        raise PackedWeight(
            f"`{packed.name}` is in the window layout, and deltas are on weights in prefix codes",
            hint='call `tpde.nn.set_kernels(model, "exact")` first',
            where=packed.name,
        )


def require_known(delta: Delta, names: Mapping[str, object], base: str) -> None:
    """Refuse a delta that has tensors of which there is no base.

    Raises
    ------
    MissingBase
        Naming the first.
    """
    for name in delta.entries:
        if name not in names:
            raise MissingBase(
                f"tensor `{name}` of `{delta.name}` is not in the base `{base}`",
                hint=right_base(base),
                where=name,
            )
