"""Forward passes of a model that has deltas, and what waits for them to end."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from tpde.errors import InvalidInput, PackedWeight
from tpde.memory.forks import renew_in_forks
from tpde.nn.batch_rows import CACHES, ONCE, BatchRows, positional, refuse
from tpde.nn.forward import AroundForward
from tpde.nn.owner import Owner
from tpde.weights.launch import capturing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from typing_extensions import Self

    from tpde.weights.active_delta import ActiveDelta

_PATIENCE_S = 1.0


class Passes:
    """Which threads are in a forward pass: what is changed between passes waits for all of them."""

    def __init__(self) -> None:
        self._ended = threading.Condition()
        self._depth: dict[int, int] = {}  # by threads
        self._waiting = 0  # for all of them to end
        renew_in_forks(self)

    def renew(self) -> None:
        """Forget, after a fork, threads that are not here: all but this one."""
        me = get_ident()
        self._ended, self._waiting = threading.Condition(), 0
        self._depth = {me: self._depth[me]} if me in self._depth else {}

    @contextmanager
    def one(self) -> Iterator[None]:
        """A forward pass of this thread, or one within it."""
        me = get_ident()
        with self._ended:
            if me not in self._depth and self._waiting:
                # Else threads that compute without end leave no moment without one. Not for ever: a pass may
                # wait for this one.
                self._ended.wait_for(lambda: not self._waiting, timeout=_PATIENCE_S)
            self._depth[me] = self._depth.get(me, 0) + 1
        try:
            yield
        finally:
            with self._ended:
                self._depth[me] -= 1
                if not self._depth[me]:
                    del self._depth[me]
                    self._ended.notify_all()

    @contextmanager
    def none(self) -> Iterator[None]:
        """Wait until no thread is in one; inside, none begins.

        Raises
        ------
        PackedWeight
            If this thread is.
        """
        with self._ended:
            if get_ident() in self._depth:
                raise PackedWeight(
                    "the weights of a forward pass would become others before it ends",
                    hint="call `use` between two of them",
                )
            self._waiting += 1
            try:
                self._ended.wait_for(lambda: not self._depth)
                yield
            finally:
                self._waiting -= 1
                self._ended.notify_all()


class Counted(Protocol):
    """The deltas of a model, as its forward passes take them: `tpde.nn.model_deltas.Deltas`."""

    passes: Passes
    active_delta: ActiveDelta

    @property
    def model(self) -> nn.Module:
        """Whose they are."""

    def require_settled(self) -> None:
        """Refuse weights that `use` was interrupted at."""

    def each(
        self,
        calls: Sequence[tuple[str | None, tuple[Any, ...], dict[str, Any]]],
        run: Callable[[tuple[Any, ...], dict[str, Any]], Any],
    ) -> list[Any]:
        """Call something under several deltas, one after the other."""


class AroundModel(AroundForward):
    """A method of a model that has deltas.

    Parameters
    ----------
    deltas : Counted
        The model's.
    model : nn.Module
        See `AroundForward`.
    """

    __slots__ = ("deltas",)

    def __init__(self, deltas: Counted, model: nn.Module) -> None:
        super().__init__(model)
        self.deltas = deltas

    def for_copy(self, owner: Owner) -> Self:
        """See `AroundForward`."""
        made = super().for_copy(owner)
        made.deltas = self.deltas
        return made


class ModelForward(AroundModel):
    """A model's forward pass, which is counted; several, where rows of its batch are under several deltas."""

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As before; nothing changes meanwhile."""
        if is_compiling():
            self.deltas.require_settled()
            if isinstance(self.deltas.active_delta.active, tuple):
                raise InvalidInput(
                    "each row of a batch has a delta of its own, and the model was to be compiled for that",
                    hint=ONCE,
                )
            return self.run(args, kwargs)
        with self.deltas.passes.one():
            self.deltas.require_settled()
            names = self.deltas.active_delta.rows()
            if names is None:
                return self.run(args, kwargs)
            return self._by_requests(BatchRows(names), args, kwargs)

    def _by_requests(self, batch: BatchRows, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A forward pass for each delta, with its rows."""
        if torch._C._get_tracing_state() is not None:
            raise PackedWeight(
                "the rows of each delta would be constants of what `torch.jit.trace` makes",
                hint="trace the model under one delta: `model.use(name)`",
            )
        _require_no_checkpointing(self.deltas.model)
        given = (*args, *kwargs.values())
        if len(batch.places) > 1 and any(isinstance(it, Tensor) and capturing(it.device) for it in given):
            raise PackedWeight(
                f"a CUDA graph would be recorded with weights under {len(batch.places)} deltas",
                hint="record graphs of models that were loaded for one delta each",
            )
        parameters = inspect.signature(self.forward).parameters
        places = positional(parameters)
        place = places.index("use_cache") if "use_cache" in places else len(args)
        if kwargs.get("use_cache") or (place < len(args) and args[place]):
            raise refuse("use_cache", "asks for a cache, which some rows cannot have apart from others")
        more = any(it.kind is inspect.Parameter.VAR_KEYWORD for it in parameters.values())
        if place < len(args):
            args = (*args[:place], False, *args[place + 1 :])
        elif "use_cache" in parameters or (more and any(it in parameters for it in CACHES)):
            kwargs = {**kwargs, "use_cache": False}
        # transformers gives arguments of its models names that say what they hold.
        one = not hasattr(type(self.deltas.model), "main_input_name")
        calls = batch.split(places, args, kwargs, one=one)
        return batch.join(self.deltas.each(calls, self.run))


def _require_no_checkpointing(model: nn.Module) -> None:
    """Refuse activation checkpointing, by the attribute that transformers and diffusers switch it on with.

    The backward pass would call parts of the model again, each by itself: under no row's delta.

    Raises
    ------
    PackedWeight
        Naming the first module that does it.
    """
    if not torch.is_grad_enabled():
        return
    for path, it in model.named_modules():
        if it.training and getattr(it, "gradient_checkpointing", False) is True:
            raise PackedWeight(
                f"`{path or type(model).__name__}` does gradient checkpointing: the backward pass would call "
                "parts of the model by themselves, and each row of a batch has a delta of its own",
                hint=f"switch it off, or {ONCE}",
                where=path or None,
            )
