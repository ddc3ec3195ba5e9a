"""Saving and loading PyTorch tensors packed, in the manner of `safetensors.torch`.

`from tpde.torch import save_file, load_file` in the place of `from safetensors.torch import ...` is
enough to try it. Loading takes plain safetensors files too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

from tpde.access import safe_open
from tpde.errors import InvalidInput
from tpde.files.forward_order import forward_order
from tpde.files.writer import PackedWriter
from tpde.format.container import TensorSpec
from tpde.frameworks import torch_bytes, torch_spec
from tpde.io.sinks import BytesSink

if TYPE_CHECKING:
    import torch


def _specs(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorSpec]:
    specs = {name: torch_spec(name, tensor) for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise InvalidInput(
                f"tensor `{name}` is not contiguous, and saving it would change its layout",
                hint="call `.contiguous()` first",
                where=name,
            )
    _refuse_shared(tensors)
    return specs


def _refuse_shared(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse tensors that overlap in memory; disjoint parts of one storage are fine."""
    places = sorted((str(it.device), *_place(it), name) for name, it in tensors.items() if it.numel())
    for (device, at, size, name), (other_device, other_at, _, other) in pairwise(places):
        if device == other_device and other_at < at + size:
            raise InvalidInput(
                f"tensors `{name}` and `{other}` share memory, which a file cannot keep",
                hint="save only one of them, or `.clone()` one",
                where=name,
            )


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a tensor's bytes are, and how many: of a packed weight, which has none, its blob's."""
    storage, size = tensor.untyped_storage(), tensor.element_size()
    begin = int(tensor.storage_offset()) * size
    return storage.data_ptr() + begin, min(tensor.numel() * size, storage.nbytes() - begin)


def _write(tensors: Mapping[str, torch.Tensor], writer: PackedWriter) -> None:
    from tpde.files.gpu_packing import packed_there

    names = forward_order(tensors)
    with writer:
        for made in packed_there(((name, tensors[name]) for name in names), writer.codec, writer.may_pack):
            if made.blob is not None:
                writer.write_blob(made.name, made.blob.cpu().numpy())
            else:
                writer.write(made.name, torch_bytes(made.tensor))


def save_file(
    tensors: Mapping[str, torch.Tensor],
    filename: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
    *,
    threads: int | None = None,
) -> None:
    """Pack tensors into a file, replacing what is there.

    Parameters
    ----------
    tensors : mapping of str to torch.Tensor
        Dense and contiguous, none sharing memory with another; on any device.
    filename : path-like
        The file. It appears when it is complete.
    metadata : mapping of str to str, optional
        Kept, and restored when the file is unpacked.
    threads : int, optional
        By default one for each processor; the file does not depend on it.

    Raises
    ------
    InvalidInput, UnsupportedDtype, InvalidDestination
        If a tensor cannot be saved, or the file not written.

    Examples
    --------
    >>> import torch
    >>> from tpde.torch import save_file
    >>> save_file({"weight": torch.zeros(3, 4)}, "model.safetensors")  # doctest: +SKIP
    """
    _write(tensors, PackedWriter(filename, _specs(tensors), metadata=metadata, threads=threads, force=True))


def save(
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str] | None = None,
    *,
    threads: int | None = None,
) -> bytes:
    """Pack tensors into bytes; see `save_file`."""
    specs = _specs(tensors)
    sink = BytesSink(sum(spec.nbytes for spec in specs.values()) + (1 << 20))
    _write(tensors, PackedWriter(sink, specs, metadata=metadata, threads=threads))
    return bytes(sink.data)


def load_file(
    filename: str | os.PathLike[str], device: str | torch.device = "cpu", *, threads: int | None = None
) -> dict[str, torch.Tensor]:
    """Load all tensors of a packed (or plain) file.

    Parameters
    ----------
    filename : path-like
        The file.
    device : str or torch.device
        Where the tensors go.
    threads : int, optional
        By default one for each processor.

    Returns
    -------
    dict of str to torch.Tensor
        Bit for bit what was saved.

    Raises
    ------
    Truncated, Corrupt, UnsupportedVersion, UnsupportedDtype, InvalidInput
        If the file cannot be read.
    """
    with safe_open(filename, framework="pt", device=str(device), threads=threads) as file:
        return {name: file.get_tensor(name) for name in file}


def load(data: bytes, *, threads: int | None = None) -> dict[str, torch.Tensor]:
    """Load all tensors from the bytes of a packed (or plain) file; see `load_file`."""
    with safe_open(data, framework="pt", threads=threads) as file:
        return {name: file.get_tensor(name) for name in file}
