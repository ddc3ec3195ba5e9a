"""The experts of a layer at rest: packed, and decoded where kernels take plain ones."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tpde.format.blob_header import align
from tpde.integrations.vllm import internals
from tpde.integrations.vllm.blob_parameter import BlobParameter
from tpde.integrations.vllm.weights import give_handle, replace
from tpde.weights.launch import capturing
from tpde.weights.source import ALIGN

if TYPE_CHECKING:
    from tpde.weights.packed_tensor import PackedTensor


class Room:
    """Memory for the decoded experts of one layer, which all layers share, as they run one after the other.

    It is there from the first decoding on: in vLLM's profiling run, which counts it, and before any CUDA
    graph is recorded, so that graphs need no memory of their own for it.

    Attributes
    ----------
    nbytes : int
        Of the largest layer so far.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._memory: Tensor | None = None

    def __reduce__(self) -> tuple[type[Room], tuple[()]]:
        return Room, ()  # a copy, in another process or of a draft's configuration, has memory of its own

    def reserve(self, nbytes: int) -> None:
        """Have place for a layer of so many bytes."""
        self.nbytes = max(self.nbytes, nbytes)

    def part(self, begin: int, end: int, device: torch.device) -> Tensor:
        """Bytes `begin` to `end`."""
        if self._memory is None or self._memory.numel() < self.nbytes:
            with torch.inference_mode(False):
                self._memory = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
        return self._memory[begin:end]


class ExpertStack:
    """The matrices of all experts for one of the two products.

    Parameters
    ----------
    layer : nn.Module
        Whose they are. It gets the blob in their place.
    name : str
        Of its parameter.
    packed : PackedTensor
        Of three dimensions: the experts, and rows and columns of what they are.
    room : Room
        Where they are decoded.
    begin : int
        Bytes of it that the layer's other matrices take.

    Attributes
    ----------
    handle : str
        The name of its handle in the layer.
    shape : list of int
        Of the parameter, plain.
    end : int
        Bytes of the room that are taken with it.
    """

    def __init__(self, layer: Any, name: str, packed: PackedTensor, room: Room, begin: int) -> None:
        self.packed, self.handle = packed, f"tpde_{name}"
        self.shape = list(layer.get_parameter(name).shape)
        self.end = begin + align(packed.nbytes, ALIGN)
        self._layer, self._room, self._begin = weakref.ref(layer), room, begin
        room.reserve(self.end)
        packed.prepare()
        self._name, self._parameter = name, BlobParameter.of(packed)
        self._parameter.plain_shape = tuple(self.shape)  # of which what is packed merges some
        setattr(layer, name, self._parameter)
        self._buffer = give_handle(self, layer, self.handle, packed.device)
        self._recorded = internals.records_graphs()

    def reload(self, layer: Any, matrices: Tensor) -> None:
        """Take other values, and put the layer's own tensors back: as `Weight.reload`."""
        replace(self.packed, matrices, self._parameter, self._recorded)
        setattr(layer, self._name, self._parameter)
        layer.register_buffer(self.handle, self._buffer, persistent=False)

    def chosen(self, ids: Tensor | None) -> list[int] | None:
        """Which of the experts a router chose, ascending; None is all.

        The host has to know which these are, so that it waits for the device. While a CUDA graph is recorded
        it cannot, and all are decoded; so they are where there may be as many.
        """
        if ids is None or ids.numel() >= self.packed.shape[0] or capturing(ids.device):
            return None
        numbers = torch.unique(ids)
        layer: Any = self._layer()
        if layer.expert_map is not None:
            numbers = torch.unique(layer.expert_map[numbers.long()])
        return [it for it in numbers.tolist() if it >= 0]

    def decoded(self, experts: Sequence[int] | None) -> Tensor:
        """The matrices of some experts as plain vLLM takes them; of others, anything. None is all."""
        with torch.inference_mode(False), torch.no_grad():
            size, device = self.end - self._begin, self.packed.device
            return self._decode(experts, torch.empty(size, dtype=torch.uint8, device=device))

    def in_room(self, experts: Sequence[int] | None) -> Tensor:
        """The same in the room, until another layer's are there."""
        with torch.inference_mode(False), torch.no_grad():
            return self._decode(experts, self._room.part(self._begin, self.end, self.packed.device))

    def _decode(self, experts: Sequence[int] | None, out: Tensor) -> Tensor:
        packed, plain = self.packed, out[: self.packed.nbytes]
        if experts is None:
            packed.decode_into(out)
        elif packed.of_experts:
            packed.experts.decode_some(experts, out)
        else:
            step = packed.nbytes // packed.shape[0]
            for first, last in _runs(experts):
                begin, end = first * step, (last + 1) * step
                packed.span(begin, end).decode_to(plain[begin:end].view(packed.dtype))
        return plain.view(packed.dtype).view(self.shape)


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending numbers as runs: first and last of each."""
    found: list[tuple[int, int]] = []
    for it in numbers:
        if found and found[-1][1] + 1 == it:
            found[-1] = found[-1][0], it
        else:
            found.append((it, it))
    return found
