"""A save in a thread of its own, beside training."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

log = logging.getLogger("tpde")


class BackgroundSave:
    """A call in a thread of its own, whose error is kept."""

    def __init__(self, step: int, call: Callable[[], None]) -> None:
        self.step, self._call = step, call
        self.error: BaseException | None = None
        # Not a daemon: the interpreter waits for it at its end.
        self._thread = threading.Thread(target=self._run, name=f"tpde-save-{step}")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._call()
        except BaseException as error:
            self.error = error
            log.error("step %d was not saved: %s", self.step, error)

    def join(self) -> None:
        """Wait for its end."""
        self._thread.join()
