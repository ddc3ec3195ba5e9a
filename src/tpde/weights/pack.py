"""Packing one tensor in memory."""

from __future__ import annotations

import torch
from torch import Tensor

from tpde.errors import PackedWeight
from tpde.format.blob import align
from tpde.format.constants import ALIGN_BLOB
from tpde.format.sink import BytesSink
from tpde.frameworks import torch_bytes, torch_spec
from tpde.packing.tensor import TensorWriter
from tpde.packing.writer import check_threads
from tpde.weights.resident import Resident
from tpde.weights.source import Source
from tpde.weights.tensor import PackedTensor


def pack_tensor(tensor: Tensor, name: str, threads: int | None = None) -> PackedTensor | None:
    """Pack a tensor; the blob is on its device.

    Parameters
    ----------
    tensor : torch.Tensor
        Contiguous, of a floating-point dtype.
    name : str
        What errors call it.
    threads : int, optional
        By default one for each processor; the blob does not depend on it.

    Returns
    -------
    PackedTensor or None
        None if it would not shrink.
    """
    spec = torch_spec(name, tensor)
    sink = BytesSink(spec.nbytes + (1 << 16))
    writer = TensorWriter(
        spec,
        sink,
        0,
        threads=check_threads(threads),
        codec="prefix",  # GPUs decode it
        may_pack=True,
        background=None,
    )
    writer.write(torch_bytes(tensor))
    stored = writer.finish()
    if not stored.packed:
        return None
    blob = torch.zeros(align(stored.size, ALIGN_BLOB), dtype=torch.uint8)
    blob[: stored.size] = torch.frombuffer(sink.data, dtype=torch.uint8)[: stored.size]
    return PackedTensor(Resident(blob.to(tensor.device), name))


def packed_again(source: Source) -> Tensor:
    """A blob of prefix codes of what a source decodes to now, as `pack_tensor` makes it on the CPU.

    Raises
    ------
    PackedWeight
        If it would not shrink.
    """
    made = pack_tensor(PackedTensor(source).decoded().cpu(), source.name)
    if made is None:
        raise PackedWeight(
            f"`{source.name}` does not shrink with the values that it has now, and has no packed form",
            hint="call `tpde.unpack_module(model)` first, which gives it plain",
        )
    return made.sources[0].blob
