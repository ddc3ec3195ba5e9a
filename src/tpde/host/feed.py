"""What brings packed bytes to where a device can copy them from."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from tpde.io.sources import Extent


class Event(Protocol):
    """A mark on a stream, such as `torch.cuda.Event`."""

    def synchronize(self) -> None:
        """Wait until the device has passed it."""


class Ticket(Protocol):
    """Bytes that were asked for: `wait` and `copied`, or `cancel` at any time before `copied`.

    Tickets of a feed are waited for in the order of their requests, but for those that are cancelled.
    """

    def ready(self) -> bool:
        """Whether `wait` would return an address at once."""

    def wait(self) -> int:
        """The host address of the bytes, once they are there.

        Raises
        ------
        Truncated
            If the file ends before them.
        ReadError
            If they cannot be read.
        """

    def copied(self, event: Event) -> None:
        """The copy is queued: the bytes are not needed any more once the device has passed the event."""

    def cancel(self) -> None:
        """The bytes will not be wanted. Doing so again, or after `copied`, does nothing."""


class ReadLog(Protocol):
    """What takes note of reads: `tpde.streaming.trace.Trace` does."""

    def read(self, t0_ns: int, t1_ns: int, name: str, nbytes: int) -> None:
        """Bytes came from a file to host memory, between two times of `time.perf_counter_ns`."""


class Feed(Protocol):
    """Bytes of files, asked for ahead of their use.

    Attributes
    ----------
    trace : ReadLog or None
        What takes note of reads, where something is read when it is asked for.
    """

    trace: ReadLog | None

    @property
    def ahead(self) -> int:
        """How many bytes it wants to be asked for ahead; 0 if all are in host memory, or on their way."""

    def request(self, extent: Extent) -> Ticket:
        """Ask for bytes, in the order in which they will be wanted; never blocks."""

    def device_address(self, extent: Extent) -> int | None:
        """Where the device can read the bytes over the bus, without a copy and without asking; or None."""

    def close(self) -> None:
        """Give memory back. No copy may be under way."""


@runtime_checkable
class Filled(Feed, Protocol):
    """A feed whose bytes all come, in the background, whether they are asked for or not."""

    def begin(self) -> None:
        """Let them come from now on. Beginning again does nothing."""

    def complete(self) -> None:
        """Wait until all are there.

        Raises
        ------
        Truncated, ReadError, OutOfMemory, UnsupportedDevice
            If something cannot be brought there.
        """
