"""Damage that is found while it is decoded: who asks for it, and when.

Waiting for checksums would cost time, so that they are waited for only when something is decoded first. After
that, what a device has found by then is raised when the same thing is wanted next, or by `Checks.settle`.
"""

from __future__ import annotations

from collections.abc import Sequence

from tpde.streaming.cuda_device import Device
from tpde.streaming.pieces import Piece
from tpde.weights.launch import mismatch
from tpde.weights.source import Watched


class DecodedPieces:
    """Pieces that are decoded together.

    Parameters
    ----------
    device : Device
        Where.
    pieces : sequence of Piece
        Their bytes.

    Attributes
    ----------
    verified : bool
        Whether all was once decoded and found right.
    """

    def __init__(self, device: Device, pieces: Sequence[Piece]) -> None:
        self.pieces, self.verified = tuple(pieces), False
        self.handle = device.prepare(self.pieces)
        self._device = device

    def report(self) -> None:
        """Raise what decoding has found since it was last asked.

        Raises
        ------
        Corrupt
            Naming tensor and chunk.
        """
        found = self._device.damage(self.handle)
        if found is None:
            return
        piece = self.pieces[found.work]
        when = "is damaged" if not self.verified else "was damaged since it was first read"
        raise mismatch(
            piece.spans[found.item].tensor.name,
            found.chunk,
            f"; `{piece.extent.source.name}` {when}",
            hint="fetch the file again, and load the model again",
            where=piece.extent.source.name,
        )


class Checks:
    """What was used, and not found right since. Not safe for threads: its owner has a lock.

    Parameters
    ----------
    device : Device
        Where it was used.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._open: dict[Watched, None] = {}  # in the order of use

    def begin(self, its: Sequence[Watched]) -> None:
        """Before some things are used again.

        Raises
        ------
        Corrupt
            What their last use came to.
        """
        for it in its:
            it.report()
            self._open[it] = None

    def end(self, its: Sequence[DecodedPieces]) -> None:
        """After some things were decoded: waits if one of them was so for the first time.

        Raises
        ------
        Corrupt
            What the first time came to.
        """
        if all(it.verified for it in its):
            return
        self._device.decoded()
        for it in its:
            it.report()
            it.verified = True

    def settle(self) -> None:
        """Wait for the device, and ask everything that was used since it was last found right.

        Raises
        ------
        Corrupt
            What one of them came to; calling again raises the next.
        """
        if not self._open:
            return
        self._device.wait()
        for it in [*self._open]:
            it.report()
            del self._open[it]  # not if it raised: there may be more
