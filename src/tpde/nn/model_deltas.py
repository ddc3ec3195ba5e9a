"""Several states of one model's weights: a base, and deltas on it, of which one is in use."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from tpde.errors import InvalidInput, PackedWeight
from tpde.memory.turn import Turn
from tpde.nn.group import GroupSlot
from tpde.nn.owner import Owner
from tpde.nn.parts import Parts
from tpde.nn.passes import AroundModel, Passes
from tpde.nn.plain_copies import Copies
from tpde.nn.replace import packed_modules, prepare_rows
from tpde.nn.slot import Slot
from tpde.weights.active_delta import ActiveDelta, Chosen
from tpde.weights.changed import Changed, Variant
from tpde.weights.packed_tensor import PackedTensor
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
    active_delta : ActiveDelta
        Which one is in use.
    passes : Passes
        The model's, which `use` waits for.
    """

    def __init__(self, names: Sequence[str], active_delta: ActiveDelta, owner: Owner) -> None:
        self.names, self.active_delta, self.passes = tuple(names), active_delta, Passes()
        self._owner = owner
        self._copies: list[Copies] = []
        self._tensors: list[PackedTensor] = []
        self._plain: str | None = None  # what plain parameters are under
        self._whole = True  # all of them: what was interrupted may have left some of them under others
        self._turn = Turn()  # plain parameters are under one delta at a time, for all threads
        self._parts: Parts | None = None
        self._methods: list[AroundModel] = []

    @property
    def active(self) -> Chosen:
        """The one in use; None for the base; a tuple, if each row of a batch has its own."""
        return self.active_delta.active

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
            docs/guides/several-fine-tunes.md for what they take.

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
            if chosen == self.active and self.active_delta.settled:
                return
            self._require_unrecorded()
            if isinstance(chosen, tuple):
                for copy in self._copies:
                    copy.check()
                self._begin_requests()
            else:
                self._require_own(chosen)
            self.active_delta.settled = False  # until all is done: Ctrl-C may come at any time
            if isinstance(chosen, tuple):
                for copy in self._copies:
                    copy.note()
            else:
                self._set(chosen)
                self._end_requests()
            self.active_delta.active = chosen
            for slot in self._slots():
                slot.updated()
            self.active_delta.settled = True

    def require_settled(self) -> None:
        """Refuse weights that `use` was interrupted at.

        Raises
        ------
        PackedWeight
            If it was.
        """
        self.active_delta.require_settled()

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
        if self.active_delta.recorded:
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
        with self.active_delta.at(name):
            yield

    def _begin_requests(self) -> None:
        """Refuse parts of the model, and have other methods stand in their places: all, or none of it."""
        if isinstance(self.active, tuple) and self.active_delta.settled:
            return
        self._end_requests()  # what was interrupted may have left a part of it
        model = self.model
        changed = {id(it) for it in self._tensors} | {id(it.tensor()) for it in self._copies}
        try:
            self._parts = Parts(self.active_delta)
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

    def _slots(self) -> list[GroupSlot]:
        return [it for tensor in self._tensors for it in tensor.users() if isinstance(it, Slot)]

    def put(self, model: nn.Module, variants: Mapping[Source, Mapping[str, Variant]]) -> None:
        """Put packed weights in the place of those of a model that deltas change."""
        made = {it: Changed(it, found, self.active_delta) for it, found in variants.items() if found}
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


def _slots_of(model: nn.Module) -> list[GroupSlot]:
    return [slot for _, module in packed_modules(model) for slot in module.tpde_slots.values()]


def deltas_of(model: nn.Module) -> Deltas | None:
    """The deltas of a model, if it has any."""
    found: Deltas | None = model.__dict__.get(NAME)
    return found
