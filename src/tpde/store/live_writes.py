"""Writing live tensors where they lie, and refusing what cannot be written there."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tpde.codec.delta import Listed
from tpde.codec.fingerprints import fingerprint
from tpde.codec.native import Bytes
from tpde.errors import InvalidInput
from tpde.format.delta_head import TensorEntry
from tpde.frameworks import to_torch, torch_bytes

if TYPE_CHECKING:
    import torch


class Change(NamedTuple):
    """A tensor of a delta, where it lies, and the target's bytes if they must be written."""

    entry: TensorEntry
    tensor: torch.Tensor
    data: Bytes | None


class InPlace(NamedTuple):
    """A tensor in host memory, and the words of it that are written where they lie."""

    tensor: torch.Tensor
    changes: Listed


def write_change(tensor: torch.Tensor, it: Change) -> None:
    """Write a tensor's bytes where it lies; PyTorch counts it as a change in place."""
    import torch

    if it.data is None:
        return
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        own = tensor.detach()
        if own.is_contiguous():  # as bytes: whatever they are, they are not normalized
            own = own.as_strided((own.numel(),), (1,)).view(torch.uint8)
            own.copy_(torch.from_numpy(np.ascontiguousarray(it.data)))
        else:
            own.copy_(to_torch(it.data, it.entry.spec))


def write_words(it: InPlace) -> None:
    """Write words where the tensor lies; PyTorch counts it as a change in place.

    As what they become, not by how much: a word that two tensors share, or two threads write, is right.
    """
    import torch

    if not it.tensor.is_inference():
        torch.autograd.graph.increment_version(it.tensor)
    words = torch_bytes(it.tensor).view(it.changes.targets.dtype)
    words[it.changes.positions] = it.changes.targets


def require_writable(name: str, tensor: torch.Tensor) -> None:
    """Refuse a view that cannot be written where it lies."""
    if _overlaps(tensor) or tensor.is_conj() or tensor.is_neg():
        raise InvalidInput(
            f"tensor `{name}` is a view that cannot be written where it lies; nothing was changed",
            hint="`.clone()` it first",
            where=name,
        )


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether two elements of a view may lie in one place: a step leads into what smaller steps reach.

    Of views that slices, transposing and permuting make, it never does.
    """
    if tensor.is_contiguous():
        return False
    reached = 0
    for step, n in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if n > 1 and step <= reached:
            return True
        reached += (n - 1) * step
    return False


def refuse_conflicts(changes: list[Change], delta: str) -> None:
    """Refuse tensors that share memory and would miss their targets: tried in a copy of that memory."""
    import torch

    shared: dict[tuple[object, int], list[Change]] = {}
    for it in changes:
        if it.tensor.numel():
            place = it.tensor.device, it.tensor.untyped_storage().data_ptr()
            shared.setdefault(place, []).append(it)
    for group in shared.values():
        if len(group) == 1 or all(it.data is None for it in group):
            continue
        storage = group[0].tensor.untyped_storage()
        own = torch.empty(0, dtype=torch.uint8, device=storage.device)
        with torch.inference_mode(False), torch.no_grad():
            copy = own.set_(storage).to("cpu", copy=True).untyped_storage()
            views = [
                torch.empty(0, dtype=it.tensor.dtype, device="cpu").set_(
                    copy, it.tensor.storage_offset(), it.tensor.shape, it.tensor.stride()
                )
                for it in group
            ]
        for view, it in zip(views, group, strict=True):
            write_change(view, it)
        for view, it in zip(views, group, strict=True):
            if fingerprint(torch_bytes(view)) != it.entry.target:
                raise InvalidInput(
                    f"`{it.entry.name}` shares memory with other tensors, and `{delta}` makes them differ; "
                    "nothing was changed",
                    hint="untie them first",
                    where=it.entry.name,
                )
