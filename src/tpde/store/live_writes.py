"""Writing live tensors where they lie, and refusing what cannot be written there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def memories(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Which memory each tensor lies in, as a number: the same where storages overlap.

    PyTorch knows one storage by another only where it made a view; arrays of NumPy, and what has the buffer
    protocol, may give it several of one memory.
    """
    places = sorted(
        (str(it.device), (storage := it.untyped_storage()).data_ptr(), storage.nbytes(), name)
        for name, it in tensors.items()
        if it.numel()
    )
    found, last, end, number = dict[str, int](), "", 0, 0
    for device, begin, size, name in places:
        if device != last or begin >= end:
            last, end, number = device, 0, number + 1
        found[name], end = number, max(end, begin + size)
    return found


def refuse_conflicts(changes: list[Change], delta: str) -> None:
    """Refuse tensors that share memory and would miss their targets: tried in a copy of that memory."""
    found = memories({it.entry.name: it.tensor for it in changes})
    shared: dict[int, list[Change]] = {}
    for it in changes:
        if it.entry.name in found:
            shared.setdefault(found[it.entry.name], []).append(it)
    for group in shared.values():
        if len(group) == 1 or all(it.data is None for it in group):
            continue
        views = _copied([it.tensor for it in group])
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


def _copied(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The same views of a copy, in the processor's memory, of the memory that they share."""
    import torch

    storages = {(it := tensor.untyped_storage()).data_ptr(): it for tensor in tensors}
    for tensor in tensors:  # of several that begin in one place, the longest
        it = tensor.untyped_storage()
        if it.nbytes() > storages[it.data_ptr()].nbytes():
            storages[it.data_ptr()] = it
    start = min(storages)
    copy = np.empty(max(at + it.nbytes() for at, it in storages.items()) - start, np.uint8)
    with torch.inference_mode(False), torch.no_grad():
        for at, it in storages.items():
            own = torch.empty(0, dtype=torch.uint8, device=it.device).set_(it)
            copy[at - start : at - start + it.nbytes()] = own.cpu().numpy()
        views = []
        for tensor in tensors:
            it = tensor.untyped_storage()
            at = it.data_ptr() - start
            place = torch.from_numpy(copy[at : at + it.nbytes()]).untyped_storage()
            view = torch.empty(0, dtype=tensor.dtype, device="cpu")
            views.append(view.set_(place, tensor.storage_offset(), tensor.shape, tensor.stride()))
        return views
