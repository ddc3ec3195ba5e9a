"""A save in a thread of its own, beside training."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future

log = logging.getLogger("tpde")


class BackgroundSave:
    """A call in a thread of its own, whose error is kept.

    Ctrl-C may come at any time, in `start` and in `end`, too; then `end` is called again. It does not ask the
    thread: Python's `Thread.join` takes one for ended once it was interrupted there.
    """

    def __init__(self, step: int, call: Callable[[], None]) -> None:
        self.step, self._call = step, call
        self._started, self._owner = False, os.getpid()
        self._result = Future[None]()
        # Not a daemon: the interpreter waits for it at its end.
        self._thread = threading.Thread(target=self._run, name=f"tpde-save-{step}")

    def start(self) -> None:
        """Begin it. At the interpreter's end, which waits for no new thread, do it now."""
        try:
            if begun := threading.main_thread().is_alive():
                self._thread.start()
        except RuntimeError:  # no thread can be started any more
            begun = False
        if not begun:
            self._thread = threading.current_thread()
            self._run()
        self._started = True

    def _run(self) -> None:
        if not self._result.set_running_or_notify_cancel():
            return
        try:
            self._call()
        except BaseException as error:
            try:
                log.error("step %d was not saved: %s", self.step, error)
            finally:
                self._result.set_exception(error)
        else:
            self._result.set_result(None)

    def refuse_itself(self) -> None:
        """Refuse to be waited for by its own thread, which would be for ever.

        Raises
        ------
        RuntimeError
            If this is that thread.
        """
        if threading.current_thread() is self._thread and not self._result.done():
            raise RuntimeError(f"the thread that saves step {self.step} cannot wait for itself")

    def end(self) -> BaseException | None:
        """Wait for its end, and give its error. Nobody is in `start` meanwhile."""
        if self._owner != os.getpid():  # a forked process has no such thread
            return None
        if not self._started and self._result.cancel():  # Ctrl-C came before it did anything
            return None
        return self._result.exception()
