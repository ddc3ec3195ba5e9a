"""What a `PackedWriter` is given: tensors of PyTorch, which is not imported for them, arrays and bytes."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

import numpy as np

from tpde.codec.native import Bytes, as_bytes
from tpde.errors import InvalidArgument, InvalidInput
from tpde.format.constants import DTYPES
from tpde.format.container import TensorSpec
from tpde.frameworks import numpy_dtype_name, refuse_masked, spec_of, torch_bytes, torch_spec

if TYPE_CHECKING:
    import torch
    from typing_extensions import TypeIs


def spec_like(name: str, tensor: object) -> TensorSpec:
    """What a tensor of PyTorch, or an array, is for files; a `TensorSpec` is taken as it is.

    Raises
    ------
    InvalidInput
        If it is none of these, or none that a file can hold.
    UnsupportedDtype
        If safetensors has no name for its dtype.
    """
    if isinstance(tensor, TensorSpec):
        return tensor
    if _is_torch(tensor):
        return torch_spec(name, tensor)
    if hasattr(tensor, "__array_interface__"):
        array = np.asarray(tensor)
        return spec_of(name, numpy_dtype_name(array.dtype), tuple(array.shape))
    raise InvalidInput(
        f"`{name}` is a {type(tensor).__name__}",
        hint="announce a `TensorSpec`, a tensor or an array",
        where=name,
    )


def _is_torch(value: object) -> TypeIs[torch.Tensor]:
    """Whether a value is a tensor of PyTorch, which is not imported for that."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def require_mapping(tensors: object) -> None:
    """Refuse what maps no names to tensors.

    Raises
    ------
    InvalidArgument
        If it is no mapping.
    """
    if not isinstance(tensors, Mapping):
        raise InvalidArgument(
            f"`tensors` is a {type(tensors).__name__}",
            hint="pass a mapping of names to tensors",
            where="tensors",
            found=type(tensors).__name__,
        )


def require_module(model: object, call: str, hint: str = "pass the model") -> None:
    """Refuse what is no module of PyTorch.

    Parameters
    ----------
    model : object
        What is given.
    call : str
        What takes a module.
    hint : str
        What to pass.

    Raises
    ------
    InvalidArgument
        If it is none.
    """
    import torch

    if not isinstance(model, torch.nn.Module):
        raise InvalidArgument(
            f"`{call}` takes a `torch.nn.Module`, not a `{type(model).__name__}`", hint=hint, where="model"
        )


def refuse_without_bytes(name: str, tensor: torch.Tensor) -> None:
    """Refuse a dense tensor whose bytes are not in memory: a stand-in for others, or one that was freed.

    Raises
    ------
    InvalidInput
        If it is one.
    """
    import torch

    try:
        storage = tensor.untyped_storage()
        there = storage.device.type != "meta" and storage.data_ptr() >= 0
    except RuntimeError:  # what holds other tensors has a storage without an address
        there = False
    if not there:
        raise InvalidInput(
            f"`{name}` is a {type(tensor).__name__}, which has no plain bytes in memory",
            hint="take the tensors that it is made of, or `.full_tensor()` if it is sharded",
            where=name,
        )
    if type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) and tensor.numel():
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        needed = (tensor.storage_offset() + last + 1) * tensor.element_size()
        if storage.nbytes() < needed:
            raise InvalidInput(
                f"the memory of tensor `{name}` was freed: {storage.nbytes()} of {needed} bytes are there",
                hint="take it while its memory is there, such as within FSDP's `summon_full_params`",
                where=name,
                found=storage.nbytes(),
                needed=needed,
            )


def piece_bytes(name: str, data: object, spec: TensorSpec) -> Bytes:
    """The bytes of a part of a tensor.

    Parameters
    ----------
    name : str
        What errors call the tensor.
    data : torch.Tensor, ndarray or bytes-like
        See `tpde.PackedWriter.write`.
    spec : TensorSpec
        What the whole is.

    Raises
    ------
    InvalidArgument
        If it has another dtype, or is not contiguous bytes.
    InvalidInput
        If it has a mask, or its memory is not there.
    """
    if _is_torch(data):
        if torch_spec(name, data).dtype not in (spec.dtype, "U8"):
            raise _other_dtype(name, str(data.dtype), spec)
        refuse_without_bytes(name, data)
        return torch_bytes(data.contiguous())
    if isinstance(data, np.ndarray):
        refuse_masked(name, data)
        if not data.dtype.isnative:
            data = data.astype(data.dtype.newbyteorder("="))
        bits = data.dtype.kind == "u" and 8 * data.dtype.itemsize in (8, DTYPES[spec.dtype].bits)
        if not bits and numpy_dtype_name(data.dtype) != spec.dtype:
            raise _other_dtype(name, str(data.dtype), spec)
        return np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    try:
        view = memoryview(cast(memoryview, data))  # or whatever has its protocol
    except TypeError:
        raise InvalidArgument(
            f"tensor `{name}` is given a {type(data).__name__}",
            hint="give a tensor, an array or bytes",
            where=name,
            found=type(data).__name__,
        ) from None
    if not view.c_contiguous:
        raise InvalidArgument(
            f"tensor `{name}` is given a view with gaps",
            hint="give contiguous bytes, or an array",
            where=name,
        )
    if view.format.lstrip("@=<>!") not in ("B", "b", "c"):  # numbers, as an array has them
        try:
            array = np.asarray(view)
        except ValueError:  # NumPy has none of their kind
            raise _other_dtype(name, f"numbers of the format {view.format!r:.50}", spec) from None
        return piece_bytes(name, array, spec)
    return as_bytes(view)


def _other_dtype(name: str, found: str, spec: TensorSpec) -> InvalidArgument:
    return InvalidArgument(
        f"tensor `{name}` was announced as {spec.dtype}, and is given {found}",
        hint="announce the dtype that it has, or cast it",
        where=name,
        found=found,
        needed=spec.dtype,
    )
