"""What the planner takes: the parts of a model, what else needs memory, and how fast a machine is."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Placement(enum.Enum):
    """Where a unit's weights are kept."""

    PLAIN = "plain"  # on the device, decoded once
    PACKED = "packed"  # on the device, decoded each time
    WINDOWS = "windows"  # on the device in the window layout, multiplied without being decoded
    HOST = "host"  # in page-locked host memory
    DISK = "disk"  # in their file


@dataclass(frozen=True)
class Windows:
    """What a unit comes to whose matrices are put in the window layout, as far as they can be.

    Attributes
    ----------
    size : int
        Bytes on the device: those matrices at most, and what else is packed.
    read : int
        Those of the matrices, which a product reads.
    matrices : int
        Bytes of the matrices, plain.
    beside : int
        Plain bytes of the other weights, which are decoded together.
    strip : int
        Room that some rows of a matrix are decoded to, for many rows of inputs; or where it needs more in the
        window layout than it may have, and stays packed.
    rows : int
        Of the most that are decoded at a time, where a matrix is larger than that; 0 if none is.
    """

    size: int
    read: int
    matrices: int
    beside: int
    strip: int
    rows: int = 0


@dataclass(frozen=True)
class Unit:
    """Packed weights that are decoded together: those of a block, or of a module outside of blocks.

    Attributes
    ----------
    name : str
        The module's.
    packed : int
        Bytes of its blobs.
    plain : int
        Bytes of its weights.
    index : int
        Bytes of index maps and tables, which stay on the device when the chunks are elsewhere.
    rows : bool
        An embedding: rows are decoded where they are asked for, and nothing else.
    tile : int
        The least room that its weights can be used in row by row, if they do not fit whole; 0 if they cannot.
    resident : bool
        It must be on the device, since nothing can decode it in pieces.
    row : int
        Bytes of a row of its weight, if it can be used row by row.
    windows : Windows or None
        What it comes to in the window layout, if it may be there.
    """

    name: str
    packed: int
    plain: int
    index: int
    rows: bool = False
    tile: int = 0
    resident: bool = False
    row: int = 0
    windows: Windows | None = None


@dataclass(frozen=True)
class Footprint:
    """Bytes of device memory beside the units.

    Attributes
    ----------
    plain : int
        Plain parameters and buffers.
    cache : int
        Keys and values of all tokens.
    activations : int
        Of one forward pass, at its peak.
    fixed : int
        Kernels, and what libraries keep.
    experts : int
        Of the least cache of packed experts that is of use; needed only if units are streamed.
    elsewhere : int
        Not of this device: packed weights of others. What of them is in page-locked host memory is mapped
        for all devices, and each has page tables for it.
    column : int
        Of one output of a layer, for all tokens: what a tile of a weight gives is there beside all outputs.
    argument : str
        What the user may pass less of, so that cache and activations are smaller; for messages.
    """

    plain: int
    cache: int
    activations: int
    fixed: int
    experts: int = 0
    elsewhere: int = 0
    column: int = 0
    argument: str = "`max_tokens`"

    @property
    def total(self) -> int:
        """All of it that is needed always: not `experts`."""
        return self.plain + self.cache + self.activations + self.fixed


@dataclass(frozen=True)
class Rates:
    """How fast a machine is.

    Attributes
    ----------
    copy : float
        Bytes a second from page-locked host memory to the device.
    disk : float
        Bytes a second from the packed files.
    memory : float
        Bytes a second that the device reads and writes in its memory.
    decode : float
        Bytes a second of decoded weights.
    launch : float
        Seconds of the host for each call of a module.
    windows : float
        Bytes a second of weights in the window layout that are multiplied.
    """

    copy: float
    disk: float
    memory: float
    decode: float
    launch: float
    windows: float
