"""Which of a model's deltas its weights are under."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Choice:
    """A name, of those that all weights of a model that have deltas go by; None is the base.

    Attributes
    ----------
    active : str or None
        What all threads go by.
    recorded : bool
        A CUDA graph was recorded with weights under one of them: it goes on with that one.
    """

    def __init__(self, active: str | None = None) -> None:
        self.active, self.recorded = active, False
        self._own = threading.local()

    def now(self) -> str | None:
        """What this thread goes by."""
        name: str | None = getattr(self._own, "name", self.active)
        return name

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
ALWAYS = Choice(UNNAMED)
"""What goes by no name that anybody chooses: all such changes are decoded together."""
