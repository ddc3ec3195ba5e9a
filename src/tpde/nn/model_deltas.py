"""Several states of one model's weights: a base, and deltas on it, of which one is in use."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from tpde.errors import InvalidInput, MissingBase, PackedWeight
from tpde.frameworks import torch_spec
from tpde.nn.owner import Owner
from tpde.nn.parts import Parts
from tpde.nn.passes import AroundModel, ModelForward, Passes
from tpde.nn.plain_copies import Copies
from tpde.nn.replace import packed_modules, prepare_rows
from tpde.nn.slot import Slot
from tpde.store.states import MEMORY
from tpde.weights.active_delta import ALWAYS, WHOLE, ActiveDelta, Chosen
from tpde.weights.changed import Changed, Variant
from tpde.weights.delta_sources import Delta, DeltaLike, entries_of, only_source, values_of, variants_of
from tpde.weights.packed_tensor import PackedTensor
from tpde.weights.parameter import PackedParameter
from tpde.weights.source import Source

log = logging.getLogger("tpde")

_LOUD_BYTES = 64 << 20  # of copies: the norms of an 8 B model have 0.5 MiB
NAME = "tpde_deltas"  # the attribute of a model that has them

METHODS: dict[str, Callable[[Any, nn.Module], AroundModel | None]] = {}
"""What stands for other methods than `forward` while each row has a delta of its own: libraries add theirs.

Called with `Deltas` and a model; None where that has no such method.
"""


class Deltas:
    """The deltas of a model: `model.tpde_deltas`.

    Attributes
    ----------
    names : tuple of str
        What they are called.
    choice : ActiveDelta
        Which one is in use.
    passes : Passes
        The model's, which `use` waits for.
    """

    def __init__(self, names: Sequence[str], choice: ActiveDelta, owner: Owner) -> None:
        self.names, self.choice, self.passes = tuple(names), choice, Passes()
        self._owner = owner
        self._copies: list[Copies] = []
        self._tensors: list[PackedTensor] = []
        self._plain: str | None = None  # what plain parameters are under
        self._whole = True  # all of them: what was interrupted may have left some of them under others
        self._turn = threading.RLock()  # plain parameters are under one delta at a time, for all threads
        self._parts: Parts | None = None
        self._methods: list[AroundModel] = []

    @property
    def active(self) -> Chosen:
        """The one in use; None for the base; a tuple, if each row of a batch has its own."""
        return self.choice.active

    @property
    def model(self) -> nn.Module:
        """Whose they are."""
        return self._owner()

    @property
    def nbytes(self) -> int:
        """Bytes that all deltas take on their devices, the base not counted."""
        sources = {it for tensor in self._tensors for it in tensor.sources if isinstance(it, Changed)}
        return sum(it.delta_bytes for it in sources) + sum(it.nbytes for it in self._copies)

    def use(self, name: str | list[str | None] | tuple[str | None, ...] | None) -> None:
        """Choose the delta that the model's weights are under from the next forward pass on.

        Waits for forward passes of other threads that are under way.

        Parameters
        ----------
        name : str, None, or list of them
            One of `model.tpde_deltas.names`; None for the base. Of a list, each is for one row of a batch:
            then `model(...)`, and `model.generate(...)` of transformers, take batches of so many rows, are
            called once for each delta with its rows, and give the results in the order of the rows. See
            docs/run.md for what they take.

        Raises
        ------
        InvalidInput
            If there is none of that name; if a list is empty; if it is something else.
        PackedWeight
            If the caller is within a forward pass; if a CUDA graph was recorded of the model, which would go
            on with the weights that were in use then; if a plain parameter that deltas change was changed by
            others since.

        Notes
        -----
        After it was interrupted, as by Ctrl-C, some weights may be under another delta than others: forward
        passes are refused until it is called again, and comes to its end.

        Examples
        --------
        >>> model.use("math")  # doctest: +SKIP
        >>> model.use(None)  # the base  # doctest: +SKIP
        >>> model.use(["math", None, "law"])  # of a batch's three rows, each  # doctest: +SKIP
        """
        chosen = self._chosen(name)
        with self.passes.none():
            if chosen == self.active and self.choice.settled:
                return
            self._require_unrecorded()
            if isinstance(chosen, tuple):
                for copy in self._copies:
                    copy.check()
                self._begin_requests()
            else:
                self._require_own(chosen)
            self.choice.settled = False  # until all is done: Ctrl-C may come at any time
            if isinstance(chosen, tuple):
                for copy in self._copies:
                    copy.note()
            else:
                self._set(chosen)
                self._end_requests()
            self.choice.active = chosen
            for slot in self._slots():
                slot.updated()
            self.choice.settled = True

    def require_settled(self) -> None:
        """Refuse weights that `use` was interrupted at.

        Raises
        ------
        PackedWeight
            If it was.
        """
        self.choice.require_settled()

    def _chosen(self, name: object) -> Chosen:
        """What `use` was given, if there is that."""
        if not isinstance(name, (list, tuple)):
            return self._known(name)
        if not (name and self.names):
            raise InvalidInput(
                f"`use` was given {len(name)} names, of {len(self.names)} deltas",
                hint="name one for each row",
            )
        return tuple(self._known(it) for it in name)

    def _known(self, name: object) -> str | None:
        if name is None or (isinstance(name, str) and name in self.names):
            return name
        known = ", ".join(map(repr, self.names))
        raise InvalidInput(
            f"the model has no delta {name!r}",
            hint=f"use one of {known}, or None for the base; or a list of them, one for each row",
            found=name,
            needed=self.names,
        )

    def _require_unrecorded(self) -> None:
        if self.choice.recorded:
            raise PackedWeight(
                f"a CUDA graph was recorded with the weights of {self._plain or 'the base'!r}, and would go "
                "on with them",
                hint="record graphs of models that were loaded for one delta each",
            )

    def _is_under(self, name: str | None) -> bool:
        """Whether plain parameters are under a name, all of them."""
        return name == self._plain and self._whole

    def _require_own(self, name: str | None, *, own: bool = False) -> None:
        """Refuse to write over plain parameters that are nobody's but the caller's: see `Copies.check`."""
        if self._is_under(name):
            return
        for it in self._copies:
            it.check(own=own)

    def _set(self, name: str | None) -> None:
        """Have plain parameters under a name."""
        if self._is_under(name):
            return
        self._whole = False
        for it in self._copies:
            it.set(name)
        torch.clear_autocast_cache()  # which keeps casts of parameters, whatever is written to them since
        self._plain, self._whole = name, True

    # ---- a delta for each row ----

    def each(
        self,
        calls: Sequence[tuple[str | None, tuple[Any, ...], dict[str, Any]]],
        run: Callable[[tuple[Any, ...], dict[str, Any]], Any],
    ) -> list[Any]:
        """Call something under several deltas, one after the other; other threads wait to do the same.

        Parameters
        ----------
        calls : sequence of (str or None, tuple, dict)
            Deltas, and what to call it with.
        run : callable
            Takes positional and other arguments.

        Raises
        ------
        PackedWeight
            As `use`.
        """
        found = []
        assert self._parts is not None
        with self._turn, self._parts.opened():
            for name, args, kwargs in calls:
                with self._at(name):
                    found.append(run(args, kwargs))
        return found

    @contextmanager
    def _at(self, name: str | None) -> Iterator[None]:
        """Let this thread's calls be under a name meanwhile."""
        if not self._is_under(name):
            self._require_unrecorded()
        self._require_own(name, own=True)
        self._set(name)
        with self.choice.at(name):
            yield

    def _begin_requests(self) -> None:
        """Refuse parts of the model, and have other methods stand in their places: all, or none of it."""
        if isinstance(self.active, tuple) and self.choice.settled:
            return
        self._end_requests()  # what was interrupted may have left a part of it
        model = self.model
        changed = {id(it) for it in self._tensors} | {id(it.tensor()) for it in self._copies}
        try:
            self._parts = Parts(self.choice)
            self._parts.refuse(model, changed)
            for name, make in METHODS.items():
                if (made := make(self, model)) is not None:
                    self._methods.append(made)
                    model.__dict__[name] = made
        except BaseException:
            self._end_requests()
            raise

    def _end_requests(self) -> None:
        for it in self._methods:
            it.leave(self.model)
        self._methods.clear()
        if self._parts is not None:
            self._parts.remove()
        self._parts = None

    def _slots(self) -> list[Slot]:
        return [it for tensor in self._tensors for it in tensor.users() if isinstance(it, Slot)]

    def put(self, model: nn.Module, variants: Mapping[Source, Mapping[str, Variant]]) -> None:
        """Put packed weights in the place of those of a model that deltas change."""
        made = {it: Changed(it, found, self.choice) for it, found in variants.items() if found}
        packed = {id(slot.packed): slot.packed for slot in _slots_of(model)}
        for tensor in packed.values():
            if not made.keys().isdisjoint(tensor.sources):
                tensor.replace(made)
                self._tensors.append(tensor)
        for slot in self._slots():
            if (group := slot.group) is not None:
                group.prepare()
        prepare_rows(model)

    def copy(self, model: nn.Module, plain: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Keep what deltas make of plain parameters and buffers of a model, by their names in it."""
        for name, values in plain.items():
            path, _, leaf = name.rpartition(".")
            made = Copies(model.get_submodule(path), leaf, name, values)
            for it in self._copies:
                it.require_like(made, self.names)
            self._copies.append(made)
        if (nbytes := sum(it.nbytes for it in self._copies)) >= _LOUD_BYTES:
            log.warning(
                "%d plain parameters that deltas change are kept in up to %d copies (%d bytes): pack the "
                "model to keep what changed alone",
                len(self._copies),
                1 + len(self.names),
                nbytes,
            )

    def close(self) -> None:
        """Have no deltas any longer: what was in use stays."""
        self.names = ()
        self._copies, self._tensors = [], []

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise PackedWeight(
            f"the model has deltas ({', '.join(self.names)}) that share its weights, and cannot be copied or "
            "pickled with them",
            hint="load it again; or save `model.state_dict()`, which is of the delta in use",
        )


def _slots_of(model: nn.Module) -> list[Slot]:
    return [slot for _, module in packed_modules(model) for slot in module.tpde_slots.values()]


def deltas_of(model: nn.Module) -> Deltas | None:
    """The deltas of a model, if it has any."""
    found: Deltas | None = model.__dict__.get(NAME)
    return found


def attach(
    model: nn.Module,
    names: Sequence[str],
    variants: Mapping[Source, Mapping[str, Variant]],
    plain: Mapping[str, Mapping[str, Tensor]],
) -> Deltas:
    """Let a model have deltas, and `use` them.

    Parameters
    ----------
    model : nn.Module
        After `finish`.
    names : sequence of str
        What they are called.
    variants : mapping of Source to mapping of str to Variant
        What they make of the sources of its packed weights.
    plain : mapping of str to mapping of str to torch.Tensor
        What they make of plain parameters and buffers, by their names in the model.

    Raises
    ------
    InvalidInput
        If the model has deltas already, or a method `use` of its own; if it is a ScriptModule, or deltas
        change parameters of one in it.
    """
    _require_none(model)
    _require_no_script(model, plain)
    made = Deltas(names, ActiveDelta(), Owner(model))
    made.copy(model, plain)
    made.put(model, variants)
    model.__dict__[NAME], model.__dict__["use"] = made, made.use
    model.__dict__["tpde_counted"] = model.__dict__["forward"] = ModelForward(made, model)
    return made


def leave_deltas(model: nn.Module, choices: Collection[ActiveDelta]) -> None:
    """Let a model whose weights become plain have no deltas any longer: they are under the one in use.

    Parameters
    ----------
    model : nn.Module
        All that becomes plain.
    choices : collection of ActiveDelta
        By which its weights go.

    Raises
    ------
    PackedWeight
        If they go by those of a model of which this one is a part.
        If `use` was interrupted.
    InvalidInput
        If each row of a batch has its own.
    """
    own = deltas_of(model)
    for it in choices:
        if it is not ALWAYS and (own is None or own.choice is not it):
            raise PackedWeight(
                "the weights are a part of a model with deltas, and would no longer go by its `use`",
                hint="unpack that model",
            )
    if own is None:
        return
    own.require_settled()
    if isinstance(own.active, tuple):
        raise InvalidInput(f"each of {len(own.active)} rows has a delta of its own", hint=WHOLE)
    own.close()
    counted: ModelForward = model.__dict__.pop("tpde_counted")
    for name in (NAME, "use"):
        del model.__dict__[name]
    counted.leave(model)


def _require_none(model: nn.Module) -> None:
    if hasattr(model, "use"):
        has = "deltas already" if deltas_of(model) is not None else "a `use` of its own"
        raise InvalidInput(
            f"the {type(model).__name__} has {has}", hint="load it anew, with all deltas at once"
        )


def _require_no_script(model: nn.Module, names: Collection[str]) -> None:
    """Refuse parameters, of these names, of ScriptModules, which hold them where Python cannot reach them."""
    for path, it in model.named_modules():
        if isinstance(it, torch.jit.ScriptModule) and (
            not path or any(name.startswith(f"{path}.") for name in names)
        ):
            what = f"`{path}`" if path else "the model"
            raise InvalidInput(
                f"{what} is a ScriptModule, and has no deltas",
                hint="add them to the module that it was made of",
                where=path or None,
            )


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
        If it is no delta, no name, or the model has deltas already; if what they change is in a ScriptModule.
    PackedWeight
        If a delta changes a weight that is made of several tensors, or most of one which does not shrink.
    Truncated, Corrupt, UnsupportedVersion
        If a delta is damaged, or newer than this version.

    Examples
    --------
    >>> model = tpde.pack_module(model)  # doctest: +SKIP
    >>> tpde.nn.add_deltas(model, {"math": "math.tpde"}).use("math")  # doctest: +SKIP
    """
    check_names(deltas)
    _require_none(model)
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
                hint="name the base that the delta was made from",
                where=name,
            )
