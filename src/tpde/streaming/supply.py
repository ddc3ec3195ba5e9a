"""What brings packed bytes to where a device can copy them from."""

from __future__ import annotations

from typing import Any, Protocol

from tpde.format.source import Extent

Ticket = Any  # each supply's own; nobody else looks into it


class Supply(Protocol):
    """Bytes of files, asked for ahead of their use.

    For each extent: `request`, then `wait` and `copied`, or `cancel` at any time before `copied`. Tickets are
    waited for in the order of their requests, but for those that are cancelled.
    """

    @property
    def ahead(self) -> int:
        """How many bytes it wants to be asked for ahead."""

    def request(self, extent: Extent) -> Ticket:
        """Ask for bytes, in the order in which they will be wanted; never blocks."""

    def wait(self, ticket: Ticket) -> int:
        """The host address of the bytes, once they are there.

        Raises
        ------
        Truncated
            If the file ends before them.
        ReadError
            If they cannot be read.
        """

    def ready(self, ticket: Ticket) -> bool:
        """Whether `wait` would return an address at once."""

    def copied(self, ticket: Ticket, event: Any) -> None:
        """The copy is queued: the bytes are not needed any more once `event.synchronize()` returns."""

    def cancel(self, ticket: Ticket) -> None:
        """The bytes will not be wanted."""

    def device_address(self, extent: Extent) -> int | None:
        """Where the device can read the bytes over the bus, without a copy and without asking; or None."""

    def close(self) -> None:
        """Give memory back. No copy may be under way."""
