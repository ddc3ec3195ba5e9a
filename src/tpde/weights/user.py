"""What keeps something that was derived from a packed weight."""

from __future__ import annotations

from typing import Protocol


class User(Protocol):
    """What a packed weight tells of its changes."""

    def changed(self) -> None:
        """Forget what was derived: the weight's blobs are others, or elsewhere."""

    def updated(self) -> None:
        """Have what was begun with it refused: it has other values, or may have soon."""

    @property
    def recorded(self) -> bool:
        """Whether a CUDA graph was recorded with it."""

    def frozen(self) -> None:
        """Forget what says that the weight requires a gradient: it does not any more."""
