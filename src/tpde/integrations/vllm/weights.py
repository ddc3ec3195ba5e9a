"""A layer's weight at rest, and what is computed from it."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn

from tpde.errors import InvalidInput
from tpde.integrations.vllm import internals, refusals
from tpde.integrations.vllm.blob_parameter import BlobParameter
from tpde.integrations.vllm.report import LoadReport
from tpde.nn.kernels import MOST_SHARE
from tpde.nn.pack_model import MIN_BYTES
from tpde.weights.pack_tensor import pack_tensor
from tpde.weights.packed_tensor import PackedTensor
from tpde.weights.windowed import Windowed
from tpde.weights.windowed_experts import WindowedExperts
from tpde.weights.windows_source import WindowSource

HANDLE = "tpde_handle"  # a buffer of each module with such a weight
# What blobs that vLLM copies are padded to, shares of the plain weight: those of a name and a size share
# buffers. Windows take 0.70 to 0.71, prefix codes of bf16 0.67, of fp16 0.85 to 0.87.
_PADDED_TO = 0.72, 0.8, 0.88, 0.96, 1.0
_HANDLE_BYTES = 16

_just_packed: weakref.WeakSet[OffloadedWeight] = weakref.WeakSet()  # the last one
_held: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # by addresses of handles


def hold(report: LoadReport, plain: Tensor, name: str, *, spare: bool = False) -> PackedTensor | None:
    """A contiguous tensor, packed on its device; None if it stays plain, which is told.

    With fused kernels, bf16 matrices, and those of experts in three dimensions, go to the window layout where
    that pays, and others to prefix codes. With `spare`, matrices there can be renewed.
    """
    if not plain.is_floating_point():
        report.plain(plain.nbytes, f"{str(plain.dtype).removeprefix('torch.')} is no floating point")
        return None
    if plain.nbytes < MIN_BYTES:
        report.plain(plain.nbytes, f"smaller than {MIN_BYTES} bytes")
        return None
    packed, kind = None, "in windows"
    if report.kernels == "fused" and plain.dtype is torch.bfloat16:
        packed = _in_windows(plain, name, spare)
    if packed is None:
        packed, kind = pack_tensor(plain, name), "in prefix codes"
    if packed is None:
        report.plain(plain.nbytes, "packing makes them no smaller")
        return None
    report.packed(plain.nbytes, packed.packed_bytes, kind)
    return packed


def _in_windows(plain: Tensor, name: str, spare: bool) -> PackedTensor | None:
    made: WindowSource | None = None
    if plain.dim() == 2:
        made = Windowed.of_plain(plain, name, MOST_SHARE, prepared=False, spare=spare)
    elif plain.dim() == 3:
        made = WindowedExperts.of_plain(plain, name, MOST_SHARE, turned=False, prepared=False, spare=spare)
    return None if made is None else PackedTensor(made)


class Weight:
    """The weight of a linear layer or an embedding, as its module holds it.

    Parameters
    ----------
    layer : nn.Module
        Whose `weight` it is. It gets the blob in its place, and a handle for compiled code.
    packed : PackedTensor or None
        The weight, packed; None if it stays plain.
    method : object
        vLLM's own for plain weights of such a layer.
    """

    def __init__(self, layer: Any, packed: PackedTensor | None, method: Any) -> None:
        self._layer, self._method, self.packed = weakref.ref(layer), method, packed
        self._in_parts, self._prepared = internals.is_batch_invariant(), False
        self._recorded = internals.records_graphs()
        self._handle = give_handle(self, layer, HANDLE, layer.weight.device)
        if packed is None:
            method.process_weights_after_loading(layer)
        else:
            self._place(layer, packed)

    def _place(self, layer: Any, packed: PackedTensor) -> None:
        layer.weight = self._parameter = BlobParameter.of(packed)
        packed.prepare()

    def reload(self, layer: Any) -> None:
        """Take what `layer.weight` is now, a plain tensor again, and put the layer's own tensors back.

        Where CUDA graphs were recorded, which go on reading the same memory, that is written to.

        Raises
        ------
        PackedWeight
            If it cannot take it.
        """
        if self.packed is None:
            layer.register_buffer(HANDLE, self._handle, persistent=False)
            self._method.process_weights_after_loading(layer)
            return
        replace(self.packed, layer.weight.detach().contiguous(), self._parameter, self._recorded)
        self._prepared = False
        self.put_back(layer)

    def put_back(self, layer: Any) -> None:
        """Give a layer that vLLM took apart its own tensors again."""
        layer.register_buffer(HANDLE, self._handle, persistent=False)
        layer.weight = self._parameter

    @property
    def is_awaited(self) -> bool:
        """Whether vLLM took the layer apart to load it anew, and no values have come for it yet."""
        return HANDLE not in self._layer()._buffers  # type: ignore[union-attr]

    def follow(self, other: Weight) -> None:
        """Be told that one with the same packed tensor gave it other values."""
        self._parameter.data, self._prepared = other._parameter.data, False

    def part(self) -> None:
        """Have a packed tensor of its own, which another has, too: `reload` gives it other values.

        Raises
        ------
        PackedWeight
            If CUDA graphs read the one that there is.
        """
        assert self.packed is not None
        if self._recorded:
            raise refusals.no_parting(self.packed.name)
        self.packed = PackedTensor(self.packed.sources[0])

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`x @ W.T + bias`."""
        if self.packed is None:
            return self._method.apply(self._layer(), x, bias)  # type: ignore[no-any-return]
        if self.packed.multiplies and x.is_cuda:
            if not self._prepared:  # vLLM's first step; kernels were compiled while it compiled the model
                self._prepared = True
                cast(Windowed, self.packed.sources[0]).prepare()
            if self._in_parts:
                return product_in_parts(self.packed, x, bias)
            return self.packed.product(x, bias, False)
        # As the plain layer computes it, which on the CPU prepares its weight for the matrix library.
        plain = SimpleNamespace(weight=_parameter(self.packed.decoded()))
        plain.bias = None if bias is None else _parameter(bias)
        self._method.process_weights_after_loading(plain)
        return self._method.apply(plain, x, plain.bias)  # type: ignore[no-any-return]

    def decoded(self) -> Tensor:
        """The matrix in memory of its own, as compiled code needs it; of one that stays plain a copy."""
        if self.packed is not None:
            return self.packed.decoded()
        plain: Tensor = self._layer().weight  # type: ignore[union-attr]
        return plain.detach().clone()

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of the matrix: a tensor of shape `(*ids.shape, columns)`."""
        if self.packed is not None:
            return self.packed.rows(ids)
        return self._method.embedding(self._layer(), ids)  # type: ignore[no-any-return]


class OffloadedWeight(Weight):
    """One that vLLM keeps in host memory, and copies to a buffer on the device before its layer runs.

    Its blob is there whenever `product` is called. The layer's parameter is the buffer from when vLLM has
    made it, after all weights are loaded. Before, vLLM 0.32 copies the parameter to memory of its own: what
    was made here is let go when the next weight is packed, so that the host never holds two copies of all.
    0.26 copies all of them when the last is packed, and each is let go when its layer first runs.
    """

    def _place(self, layer: Any, packed: PackedTensor) -> None:
        before = list(_just_packed)
        _just_packed.clear()
        for it in before:
            it._follow()
        shares = (int(share * packed.nbytes) for share in _PADDED_TO)
        size = next(it for it in shares if it >= packed.packed_bytes)  # nothing is packed that grows
        memory = torch.zeros(size, dtype=torch.uint8, device="cpu")

        def to_host(blob: Tensor) -> Tensor:
            memory[: blob.numel()].copy_(blob)
            return memory[: blob.numel()]

        packed.apply(to_host)
        layer.weight = BlobParameter.of(packed, memory)
        self._at = memory.data_ptr()
        _just_packed.add(self)  # last: one that had no room has nothing to follow

    def _follow(self) -> None:
        layer: Any = self._layer()
        assert self.packed is not None
        if layer.weight.data_ptr() != self._at:
            buffer = layer.weight.detach().as_subclass(Tensor)
            self.packed.apply(lambda blob: buffer[: blob.numel()])
            self.packed.prepare()
            self._at = buffer.data_ptr()

    def reload(self, layer: Any) -> None:
        """Refuse it: layers may be on their way while it is written."""
        assert self.packed is not None
        raise refusals.no_reload(self.packed.name)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`x @ W.T + bias`."""
        self._follow()
        return super().product(x, bias)

    def decoded(self) -> Tensor:
        """The matrix."""
        self._follow()
        return super().decoded()

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of the matrix: a tensor of shape `(*ids.shape, columns)`."""
        self._follow()
        return super().rows(ids)


def has_bits(packed: PackedTensor, plain: Tensor) -> bool:
    """Whether a contiguous tensor of the same shape and dtype has the same bits; little memory is needed."""
    flat = plain.view(-1).view(torch.uint8)
    pieces = packed.span(0, packed.nbytes).pieces()
    return all(torch.equal(it.decoded(), flat[it.begin : it.end]) for it in pieces)


def replace(packed: PackedTensor, plain: Tensor, parameter: BlobParameter, recorded: bool) -> None:
    """Have a packed weight, and a layer's parameter with its bytes, hold other values.

    Raises
    ------
    PackedWeight
        If they cannot be packed so, or `recorded` and not in the same memory.
    """
    source, report = packed.sources[0], LoadReport("fused" if packed.multiplies else "exact")
    if recorded:
        if not isinstance(source, WindowSource) or not source.renew(plain):
            raise refusals.no_room(packed.name)
        packed.refresh()
        return
    made = hold(report, plain, packed.name)
    if made is None:
        raise refusals.no_reload(packed.name)
    packed.replace({source: made.sources[0]})
    packed.prepare()
    parameter.data = made.sources[0].memory


def product_in_parts(packed: PackedTensor, x: Tensor, bias: Tensor | None) -> Tensor:
    """`x @ W.T + bias` straight from windows, however many rows x has: no row's bits depend on the others."""
    rows = x.reshape(-1, x.shape[-1])
    most = packed.most_rows
    if len(rows) <= most:
        return packed.product(x, bias, False)
    made = torch.cat([packed.product(part, bias, False) for part in torch.split(rows, most)])
    return made.view(*x.shape[:-1], -1)


def give_handle(held: Any, layer: nn.Module, name: str, device: torch.device) -> Tensor:
    """Give a layer a buffer that stands for something held, as long as both live."""
    handle = torch.zeros(_HANDLE_BYTES, dtype=torch.uint8, device=device)
    layer.register_buffer(name, handle, persistent=False)
    _held[handle.data_ptr()] = held
    return handle


def held_by(handle: Tensor) -> Any:
    """What a handle stands for.

    Raises
    ------
    InvalidInput
        If its layer was moved or copied since.
    """
    found = _held.get(handle.data_ptr())
    if found is None:
        raise InvalidInput(
            "a layer's packed weight is not where it was when the model was loaded",
            hint="do not move or offload layers of a model with packed weights",
        )
    return found


def _parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
