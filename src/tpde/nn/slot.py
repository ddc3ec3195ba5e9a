"""One packed weight of a module."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from tpde.errors import InvalidInput, PackedWeight
from tpde.format.blob import align
from tpde.nn.tiles import RowTiles
from tpde.weights import operators as ops
from tpde.weights.rows import RowReader
from tpde.weights.source import Source, decoder
from tpde.weights.span import covering

if TYPE_CHECKING:
    from tpde.nn.experts import ExpertSource
    from tpde.nn.group import Group

ALIGN = 512  # the allocator's own: matrix libraries choose other kernels for addresses that are less round


def _no_group() -> None:
    """What a weight without a group is given for a reference to it."""


class Slot:
    """One packed weight: its parts, dtype and shape, and where it goes in its group's buffer.

    Parameters
    ----------
    name : str
        The parameter's name in its module.
    parts : iterable of (Source, int)
        Blobs with their byte offsets in the weight. They must cover it without overlaps.
    dtype, shape
        Of the weight.
    requires_grad : bool
        What the parameter said, for unpacking.

    Raises
    ------
    InvalidInput
        If the parts do not make up the weight.

    Attributes
    ----------
    group : Group or None
        The weights decoded together with it. A copy of a single module has none, until one is made for it.
        The block, or the module, holds it: were it held here, a model that nobody uses would stay.
    offset : int
        Of its bytes in the group's buffer.
    tile_bytes : int
        Room for tiles of its rows, if it is a matrix larger than any buffer; 0 if it is decoded whole.
        Whoever loads a model sets it, before `finish`.
    experts : ExpertSource or None
        What decodes those experts that are routed to, if it is a fused tensor of them: see `route_experts`.
    """

    def __init__(
        self,
        name: str,
        parts: Iterable[tuple[Source, int]],
        dtype: torch.dtype,
        shape: Iterable[int],
        *,
        requires_grad: bool = False,
    ) -> None:
        self.name, self.dtype, self.shape = name, dtype, tuple(shape)
        self.parts = sorted(parts, key=lambda part: part[1])
        self.requires_grad = requires_grad
        self.nbytes = torch.Size(self.shape).numel() * dtype.itemsize
        self._group: Callable[[], Group | None] = _no_group
        self.offset = self.tile_bytes = 0
        self.experts: ExpertSource | None = None
        self._check()
        self.changed()

    def _check(self) -> None:
        at = 0
        for packed, offset in self.parts:
            if packed.dtype != self.dtype:
                raise InvalidInput(f"`{packed.name}` holds {packed.dtype}, the weight is {self.dtype}")
            if offset != at:
                raise InvalidInput(
                    f"`{packed.name}` starts at byte {offset} of `{self.name}`, what is before ends at {at}; "
                    "parts must follow each other"
                )
            at += packed.nbytes
        if at != self.nbytes:
            raise InvalidInput(
                f"`{self.name}` of shape {list(self.shape)} has {self.nbytes} bytes, its parts have {at}"
            )
        packed = self.parts[0][0]
        if len(self.parts) == 1 and packed.header.spec.shape != self.shape:
            raise InvalidInput(
                f"`{packed.name}` has shape {list(packed.header.spec.shape)}, `{self.name}` needs "
                f"{list(self.shape)}"
            )

    @property
    def group(self) -> Group | None:
        """See `Slot`."""
        return self._group()

    @group.setter
    def group(self, group: Group) -> None:
        self._group = weakref.ref(group)

    @property
    def device(self) -> torch.device:
        """Where the first part is decoded."""
        return self.parts[0][0].device

    @property
    def together(self) -> bool:
        """Whether all parts are on one device that holds bytes."""
        return self.device.type != "meta" and all(part.device == self.device for part, _ in self.parts)

    def materialize(self, after: Tensor) -> Tensor:
        """The weight in a buffer of its own, one-dimensional, for compiled code."""
        count = self.nbytes // self.dtype.itemsize
        return cast(Tensor, torch.ops.tpde.materialize(after, self.key, count, self.dtype))

    def buffer_names(self) -> list[str]:
        """Names of the module's buffers that hold the parts."""
        if len(self.parts) == 1:
            return [f"{self.name}_tpde"]
        return [f"{self.name}_{i}_tpde" for i in range(len(self.parts))]

    def refresh(self) -> None:
        """Call `changed` if a blob is another, or elsewhere, than when it was called last."""
        if self._versions != [packed.version for packed, _ in self.parts]:
            self.changed()

    def changed(self) -> None:
        """Forget what was derived from the blobs: they are others, or elsewhere."""
        self._versions = [packed.version for packed, _ in self.parts]
        self._materializer: Callable[[Tensor], None] | None = None
        self._rows: RowReader | None = None
        self._tiles: RowTiles | None = None
        self.view: Tensor | None = None  # in the workspace whose buffer is `view_of`
        self.view_of: Tensor | None = None
        self.key = ops.register(self)
        if (group := self.group) is not None:
            group.changed()

    def prepare(self) -> None:
        """Put on the device what `decode_into` needs.

        Raises
        ------
        PackedWeight
            If the weight is larger than any buffer.
        """
        if self.tile_bytes:
            raise PackedWeight(
                f"`{self.parts[0][0].name}` has {self.nbytes} bytes, and is decoded in tiles of its rows "
                f"since no more than {self.tile_bytes} fit under the VRAM budget: the layer's forward pass "
                "works, its `weight` cannot be read; load the model with more `vram`"
            )
        if self._materializer is None:
            self._materializer = decoder(self.parts)

    def decode_into(self, out: Tensor) -> None:
        """Decode the weight to the start of a buffer of bytes."""
        self.prepare()
        assert self._materializer is not None
        self._materializer(out)

    def fresh(self) -> Tensor:
        """The weight in memory of its own."""
        self.prepare()
        flat = torch.empty(align(self.nbytes, ALIGN), dtype=torch.uint8, device=self.device)
        self.decode_into(flat)
        return flat[: self.nbytes].view(self.dtype).view(self.shape)

    def release(self) -> int:
        """Give the model's workspace up for a moment: see `Workspace.release`."""
        group = self.group
        return 0 if group is None else group.release()

    def instead(self) -> Tensor:
        """The weight in memory of its own, which takes the place of the workspace: for a moment."""
        self.prepare()
        flat = torch.empty(
            max(align(self.nbytes, ALIGN), self.release()), dtype=torch.uint8, device=self.device
        )
        self.decode_into(flat)
        return flat[: self.nbytes].view(self.dtype).view(self.shape)

    def span_instead(self, begin: int, end: int) -> Tensor:
        """Bytes `begin` to `end` of the weight as `instead` gives them, at an address as round as there."""
        ranges = covering(self.parts, begin, end)
        at = align(begin - ranges[0].offset, ALIGN) + begin % ALIGN
        size = at + ranges[-1].stop - begin
        flat = torch.empty(max(size, self.release()), dtype=torch.uint8, device=self.device)
        for it in ranges:
            it.packed.chunks(it.first, it.last, it.offset - begin + at)(flat)
        return flat[at : at + end - begin]

    def prepare_tiles(self) -> RowTiles:
        """Put on the device what `tiles` needs."""
        if self._tiles is None:
            assert len(self.shape) == 2
            self._tiles = RowTiles(self.parts, self.shape, self.dtype, self.tile_bytes)
        return self._tiles

    def tiles(self) -> Iterator[tuple[int, int, Tensor]]:
        """Tiles of a matrix, in turn in one buffer: first row, row after the last, and the rows."""
        made = self.prepare_tiles()
        group = self.group
        buffer = None if group is None else group.tile_room()
        if buffer is None:
            size = max(self.tile_bytes, self.release())
            buffer = torch.empty(size, dtype=torch.uint8, device=self.device)
        return made(buffer)

    def prepare_rows(self) -> None:
        """Put on the device what `rows` needs."""
        if self._rows is None:
            self._rows = RowReader(self.parts[0][0])

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of a matrix of one part: a tensor of shape `(*ids.shape, columns)`."""
        self.prepare_rows()
        assert self._rows is not None
        return self._rows(ids)

    def in_buffer(self, flat: Tensor) -> Tensor:
        """The weight in a buffer of its group, of bytes or of its own dtype."""
        size = flat.dtype.itemsize
        part = flat[self.offset // size : (self.offset + self.nbytes) // size]
        return (part if flat.dtype is self.dtype else part.view(self.dtype)).view(self.shape)

    def __getstate__(self) -> dict[str, Any]:
        # Without its group, which holds a whole block: a copy of the group names itself to its slots.
        keep = ("name", "parts", "dtype", "shape", "requires_grad", "nbytes", "offset")
        return {name: getattr(self, name) for name in (*keep, "tile_bytes")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._group, self.experts = _no_group, None
        self.changed()
