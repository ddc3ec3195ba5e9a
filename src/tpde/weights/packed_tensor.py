"""A packed weight at rest: what it is made of, and rebuilding all or some of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import cast

import torch
from torch import Tensor

from tpde.errors import InvalidInput, PackedWeight
from tpde.format.blob_header import align
from tpde.weights.active_delta import ActiveDelta
from tpde.weights.expert_products import Experts, can_be_experts
from tpde.weights.pickled import Digests, pickled_sources, what_is_pickled
from tpde.weights.source import ALIGN, Decoder, RowsDecoder, Source, decoder
from tpde.weights.span import Span
from tpde.weights.user import User
from tpde.weights.windowed import Windowed


class PackedTensor:
    """A packed weight at rest: sources whose tensors follow each other in its memory.

    Parameters
    ----------
    sources : Source or iterable of Source
        What it is made of, in the order of its memory: one, or several, as the experts of a fused weight.
    shape : iterable of int, optional
        Of the weight; by default that of its only source.
    name : str, optional
        What errors call it; by default the first source's name.

    Raises
    ------
    InvalidInput
        If the sources do not make up such a weight.

    Attributes
    ----------
    parts : list of (Source, int)
        The sources with their byte offsets in the weight.
    dtype, shape, nbytes : torch.dtype, torch.Size, int
        Of the weight, plain.
    tile_bytes : int
        Room for tiles of its rows, if it is a matrix larger than any buffer; 0 if it is decoded whole.
        Whoever loads a model sets it.
    active_delta : ActiveDelta or None
        By which name it is decoded, if it has several.
    multiplies : bool
        Whether products are computed from it, without its being decoded before: a linear layer's, or of
        three dimensions those of experts.
    updates : int
        Counts those that gave it other values.

    Examples
    --------
    >>> blob = torch.frombuffer(data, dtype=torch.uint8)  # doctest: +SKIP
    >>> weight = PackedTensor(Resident(blob, "layers.0.up.weight"))  # doctest: +SKIP
    """

    def __init__(
        self, sources: Source | Iterable[Source], shape: Iterable[int] | None = None, name: str | None = None
    ) -> None:
        found = [sources] if isinstance(sources, Source) else list(sources)
        if not found:
            raise InvalidInput("a packed weight is made of one source at least, none was given")
        first = found[0]
        self.name = first.name if name is None else name
        self.dtype = first.dtype
        self.shape = torch.Size(first.shape if shape is None else tuple(shape))
        self.parts: list[tuple[Source, int]] = []
        self.active_delta: ActiveDelta | None = None
        self.nbytes = self.tile_bytes = self.updates = 0
        for source in found:
            if source.dtype != self.dtype:
                raise InvalidInput(
                    f"`{source.name}` holds {source.dtype}, `{first.name}` {self.dtype}",
                    hint="give sources of one dtype",
                )
            self.parts.append((source, self.nbytes))
            self.nbytes += source.nbytes
        if self.nbytes != self.shape.numel() * self.dtype.itemsize:
            raise InvalidInput(
                f"`{self.name}` of shape {list(self.shape)} has {self.shape.numel() * self.dtype.itemsize} "
                f"bytes, its parts have {self.nbytes}"
            )
        if len(found) == 1 and first.shape != tuple(self.shape):
            raise InvalidInput(f"`{first.name}` has shape {list(first.shape)}, {list(self.shape)} is needed")
        self._users: weakref.WeakSet[User] = weakref.WeakSet()
        self._forget()

    # ---- what it is ----

    @property
    def sources(self) -> list[Source]:
        """What it is made of."""
        return [source for source, _ in self.parts]

    @property
    def device(self) -> torch.device:
        """Where the first source is decoded."""
        return self.parts[0][0].device

    @property
    def together(self) -> bool:
        """Whether all sources are decoded on one device."""
        return all(source.device == self.device for source, _ in self.parts)

    @property
    def settled(self) -> bool:
        """Whether all bytes are on the device by now, and stay as they are there."""
        return all(source.settled for source, _ in self.parts)

    @property
    def of_experts(self) -> bool:
        """Whether it is one of experts that are multiplied as they are."""
        return self.multiplies and len(self.shape) == 3

    @property
    def packed_bytes(self) -> int:
        """Bytes of all blobs."""
        return sum(source.packed_bytes for source, _ in self.parts)

    def span(self, begin: int, end: int) -> Span[PackedTensor]:
        """Bytes `begin` to `end` of the weight."""
        return Span(self, begin, end)

    def expert(self, number: int) -> Span[PackedTensor]:
        """One of the first dimension: an expert of a fused weight, or a row."""
        step = self.nbytes // self.shape[0]
        return Span(self, number * step, (number + 1) * step)

    def __repr__(self) -> str:
        return f"PackedTensor({self.name!r}, {list(self.shape)}, {self.dtype}, {self.packed_bytes} bytes)"

    # ---- changing ----

    def watch(self, user: User) -> None:
        """Tell a user, which is not held, when the weight is another, elsewhere, or frozen."""
        self._users.add(user)

    def check(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Raise what `apply` would, for any of the blobs."""
        for source in self.sources:
            source.check(fn)

    def users(self) -> list[User]:
        """Who watches."""
        return list(self._users)

    def apply(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Take the same blobs where a function moves them.

        Raises
        ------
        PackedWeight
            If they cannot be moved, or would be changed.
        """
        self.check(fn)
        try:
            for source in self.sources:
                source.apply(fn)
        finally:  # some may be elsewhere by now
            self.refresh()

    def check_load(self, other: PackedTensor) -> None:
        """Raise what `load` would.

        Raises
        ------
        InvalidInput, PackedWeight
            If the other is made of other tensors, or of what stays in a file.
        """
        specs = [source.header.spec for source in self.sources]
        if specs != [source.header.spec for source in other.sources]:
            raise InvalidInput(
                f"`{self.name}` is {self.dtype} of shape {list(self.shape)} in {len(self.parts)} blobs, "
                f"`{other.name}` is {other.dtype} of shape {list(other.shape)} in {len(other.parts)}",
                hint="load a weight that is packed alike",
            )
        for mine, theirs in zip(self.sources, other.sources, strict=True):
            mine.check_load(theirs)

    def load(self, other: PackedTensor, *, assign: bool = False) -> None:
        """Take the blobs of another weight of the same dtype and shape: see `Source.load`.

        Raises
        ------
        InvalidInput, PackedWeight
            See `check_load`; then all is as before.
        """
        self.check_load(other)
        try:
            for mine, theirs in zip(self.sources, other.sources, strict=True):
                mine.load(theirs, assign=assign)
        finally:  # some may be others by now
            self.refresh(loaded=True)

    def replace(self, sources: Mapping[Source, Source]) -> None:
        """Take other sources in the place of some, of the same dtypes and shapes, on the same devices."""
        self.parts = [(sources.get(source, source), at) for source, at in self.parts]
        self._updated()
        self._changed()

    def _updated(self) -> None:
        """Refuse what was begun with other values: before `_changed`, which leaves old keys valid."""
        self.updates += 1
        for user in self.users():
            user.updated()

    def refresh(self, *, loaded: bool = False) -> None:
        """Tell users if a blob is another, or elsewhere, than when they were told last; or was loaded."""
        if self._versions != [source.version for source, _ in self.parts]:
            if loaded:
                self._updated()
            self._changed()

    def _changed(self) -> None:
        self._forget()
        for user in list(self._users):
            user.changed()

    def tell_frozen(self) -> None:
        """Tell users that the weight was frozen."""
        for user in list(self._users):
            user.frozen()

    def _forget(self) -> None:
        whole = len(self.parts) == 1 or can_be_experts(self.shape, [it.shape for it, _ in self.parts], False)
        self.multiplies = whole and all(source.multiplies for source, _ in self.parts)
        self._experts: Experts | None = None
        self._versions = [source.version for source, _ in self.parts]
        self.active_delta = next(
            (source.active_delta for source, _ in self.parts if source.active_delta is not None), None
        )
        self._decoder: Decoder | None = None
        self._rows: RowsDecoder | None = None

    def clone(self, copy: Callable[[Tensor], Tensor] = torch.clone) -> PackedTensor:
        """The same in memory of its own: see `Source.clone`."""
        made = PackedTensor([source.clone(copy) for source in self.sources], self.shape, self.name)
        made.tile_bytes = self.tile_bytes
        return made

    def __deepcopy__(self, memo: dict[int, object]) -> PackedTensor:
        made = memo[id(self)] = self.clone()
        return made

    def __reduce__(self) -> tuple[object, ...]:
        blobs, names, digests = what_is_pickled(self.sources)
        return rebuild_tensor, (blobs, names, tuple(self.shape), self.name, self.tile_bytes, digests)

    # ---- decoding ----

    def prepare(self) -> None:
        """Put on the device what `decode_into` needs.

        Raises
        ------
        PackedWeight
            If the weight is larger than any buffer.
        """
        if self.tile_bytes:
            raise PackedWeight(
                f"`{self.name}` has {self.nbytes} bytes, and is decoded in tiles of its rows since no more "
                f"than {self.tile_bytes} fit under the VRAM budget: the layer's forward pass works, its "
                "`weight` cannot be read",
                hint="load the model with more `vram`",
            )
        if self._decoder is None:
            self._decoder = self.experts.decode_into if self.of_experts else decoder(self.parts)

    def decode_into(self, out: Tensor) -> None:
        """Decode the weight to the start of a buffer of bytes, on the current stream.

        Raises
        ------
        Corrupt
            Naming tensor and chunk.
        """
        self.prepare()
        assert self._decoder is not None
        self._decoder(out)

    def decoded(self, room: int = 0) -> Tensor:
        """The weight in memory of its own, of at least `room` bytes."""
        self.prepare()
        with torch.inference_mode(False), torch.no_grad():
            flat = torch.empty(max(align(self.nbytes, ALIGN), room, 1), dtype=torch.uint8, device=self.device)
            self.decode_into(flat)
            return flat[: self.nbytes].view(self.dtype).view(self.shape)

    def prepare_rows(self) -> None:
        """Put on the device what `rows` needs."""
        if self._rows is None:
            self._rows = self.parts[0][0].row_reader()

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of a matrix of one source: a tensor of shape `(*ids.shape, columns)`. See `RowReader`."""
        self.prepare_rows()
        assert self._rows is not None
        return self._rows(ids)

    @property
    def key(self) -> int:
        """What operators call it by, where `multiplies` says that they can."""
        return cast(Windowed, self.parts[0][0]).key

    @property
    def most_rows(self) -> int:
        """With how many rows of x, at most, a row has the same bits in any `product`; 0 on the CPU."""
        return cast(Windowed, self.parts[0][0]).most_rows

    def product(self, x: Tensor, bias: Tensor | None, trained: bool) -> Tensor:
        """`x @ W.T + bias`, where `multiplies` says that it can be: see `Windowed.product`."""
        return cast(Windowed, self.parts[0][0]).product(x, bias, trained)

    @property
    def experts(self) -> Experts:
        """Its experts, where `of_experts` says that they are multiplied."""
        if self._experts is None:
            self._experts = Experts(self.parts, self.shape, self.name)
        return self._experts

    def opened(self) -> AbstractContextManager[None]:
        """Let the bytes be read where they lie: see `Source.opened`. One brings all of a weight."""
        return self.parts[0][0].opened()


def rebuild_tensor(
    blobs: list[Tensor],
    names: list[str],
    shape: tuple[int, ...],
    name: str,
    tile_bytes: int,
    digests: Digests = None,
) -> PackedTensor:
    """A packed weight from what `pickle` kept of it; the blobs are checked as those of a file are.

    Raises
    ------
    InvalidInput, Truncated, UnsupportedVersion, Corrupt
        If they are not valid.
    """
    made = PackedTensor(pickled_sources(blobs, names, shape, name, tile_bytes, digests), shape, name)
    made.tile_bytes = tile_bytes
    return made
