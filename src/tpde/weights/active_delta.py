"""Which of a model's deltas its weights are under."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

from tpde.errors import InvalidInput, PackedWeight

Chosen: TypeAlias = "str | tuple[str | None, ...] | None"
"""A name, None for the base; of several, each is for one row of a batch."""

WHOLE = "call the whole model, or choose one delta for all rows: `model.use(name)`"
"""What to do where rows of a batch cannot be told apart."""


class ActiveDelta:
    """A name, of those that all weights of a model that have deltas go by; None is the base.

    Attributes
    ----------
    active : str, None, or tuple of them
        What all threads go by. Of a tuple, each is for one row of a batch: then a thread goes by the one
        whose rows it computes, and by none outside of that.
    recorded : bool
        A CUDA graph was recorded with weights under one of them: it goes on with that one.
    settled : bool
        All weights go by `active`. While that becomes another name, and after that was interrupted, some may
        go by the one before.
    """

    def __init__(self, active: str | None = None) -> None:
        self.active: Chosen = active
        self.recorded, self.settled = False, True
        self._own = threading.local()

    def now(self) -> str | None:
        """What this thread goes by.

        Raises
        ------
        InvalidInput
            If each row of a batch has its own, and it computes none.
        PackedWeight
            If some weights may go by another.
        """
        if not hasattr(self._own, "name"):
            self.require_settled()
        name: Chosen = getattr(self._own, "name", self.active)
        if isinstance(name, tuple):
            raise InvalidInput(
                f"each of {len(name)} rows has a delta of its own, and weights are needed that are the same "
                "for all of them",
                hint=WHOLE,
            )
        return name

    def require_settled(self) -> None:
        """Refuse weights some of which may go by another name than others.

        Raises
        ------
        PackedWeight
            If there are.
        """
        if not self.settled:
            raise PackedWeight(
                "the last `use` of the model was interrupted, or is under way in another thread: some of its "
                "weights may be under another delta than others",
                hint="call `use` again",
            )

    def rows(self) -> tuple[str | None, ...] | None:
        """The names of a batch's rows, if each has its own and this thread computes none of them."""
        name = getattr(self._own, "name", self.active)
        return name if isinstance(name, tuple) else None

    @contextmanager
    def at(self, name: str | None) -> Iterator[None]:
        """Let this thread go by a name meanwhile: autograd's backward pass by that of the forward one."""
        before = self._own.__dict__.copy()
        self._own.name = name
        try:
            yield
        finally:
            self._own.__dict__.clear()
            self._own.__dict__.update(before)


UNNAMED = ""
ALWAYS = ActiveDelta(UNNAMED)
"""What goes by no name that anybody chooses: all such changes are decoded together."""
