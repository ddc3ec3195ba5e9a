"""Dtypes of safetensors as PyTorch and NumPy know them, arrays from bytes, and PyTorch's devices.

Imports neither at the top.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

from tpde.errors import InvalidInput, MissingDependency, UnsupportedDtype

if TYPE_CHECKING:
    import torch

    from tpde.codec.native import Bytes
    from tpde.format.container import TensorSpec

# Names, not objects: older releases lack some. F4 holds two numbers in a byte, and its last dimension halves.
_TORCH = {
    "BOOL": "bool",
    "F4": "float4_e2m1fn_x2",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}
_NUMPY = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}
_ML_DTYPES = {
    "BF16": "bfloat16",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}


MAX_EXPANDED = 64 << 20  # bytes: masks and positions are expanded, weights are not


def require_torch(what: str, instead: str = "", extra: str = "torch") -> None:
    """Import PyTorch.

    Parameters
    ----------
    what : str
        What needs it.
    instead : str
        What else to do than to install it.
    extra : str
        The extra of this package that brings it, and what else `what` needs.

    Raises
    ------
    MissingDependency
        If it cannot be imported.
    """
    try:
        import torch  # noqa: F401 - so that its absence is named
    except ImportError as error:
        raise MissingDependency(
            f"{what} needs torch, which cannot be imported ({error})",
            hint=f'run `pip install "tpde[{extra}]"`{instead}',
        ) from None


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """A device as the current one, which launches go to."""
    import torch

    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def stream_of(device: torch.device) -> int:
    """The handle of a device's current stream; 0 of one that has no streams."""
    import torch

    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0


@functools.cache
def torch_dtype_name(dtype: torch.dtype) -> str:
    """The name in safetensors of a PyTorch dtype.

    Raises
    ------
    UnsupportedDtype
        If safetensors has none.
    """
    name = str(dtype).removeprefix("torch.")
    for ours, theirs in _TORCH.items():
        if theirs == name:
            return ours
    raise UnsupportedDtype(
        f"safetensors has no dtype for {dtype}", hint="cast the tensor first", found=str(dtype)
    )


def torch_dtype(name: str) -> torch.dtype:
    """The PyTorch dtype of a name in safetensors.

    Raises
    ------
    UnsupportedDtype
        If this PyTorch lacks it.
    """
    import torch

    dtype = getattr(torch, _TORCH.get(name, ""), None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedDtype(
            f"PyTorch {torch.__version__} has no dtype for {name}",
            hint="upgrade PyTorch",
            found=name,
        )
    return dtype


def torch_spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    """What safetensors calls a PyTorch tensor.

    Raises
    ------
    InvalidInput
        If it is no tensor, or none that a file can hold.
    UnsupportedDtype
        If safetensors has no name for its dtype.
    """
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise InvalidInput(
            f"`{name}` is a {type(tensor).__name__}", hint="only tensors can be stored", where=name
        )
    if torch.nn.parameter.is_lazy(tensor):
        raise InvalidInput(
            f"tensor `{name}` is not initialized and has no data", hint="run the model once", where=name
        )
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        raise not_dense(f"tensor `{name}` is", name)
    if tensor.device.type == "meta":
        raise InvalidInput(
            f"tensor `{name}` is on the `meta` device and has no data", hint="load it first", where=name
        )
    dtype, shape = torch_dtype_name(tensor.dtype), tuple(tensor.shape)
    if dtype == "F4" and shape:
        shape = (*shape[:-1], shape[-1] * 2)
    return spec_of(name, dtype, shape)


def not_dense(what: str, where: str) -> InvalidInput:
    """The error for a sparse, quantized or nested tensor."""
    return InvalidInput(
        f"{what} not dense, and safetensors holds dense tensors only",
        hint="make it dense first (`to_dense`, `dequantize`, `to_padded_tensor`), or leave it out",
        where=where,
    )


def spec_of(name: str, dtype: str, shape: tuple[int, ...]) -> TensorSpec:
    """What a tensor is, for files.

    Raises
    ------
    InvalidInput
        If no file can hold so many elements.
    """
    from tpde.format.container import tensor_spec

    try:
        return tensor_spec(dtype, shape)
    except ValueError as error:
        raise InvalidInput(f"tensor `{name}`: {error}", hint="save a part of it", where=name) from None


def refuse_expanded(name: str, nbytes: int, reach: int) -> None:
    """Refuse a tensor that is far larger written out than in memory: a few bytes may stand for a petabyte.

    Parameters
    ----------
    name : str
        The tensor.
    nbytes, reach : int
        Bytes of all its elements, and from its first one in memory to its last.

    Raises
    ------
    InvalidInput
        If it repeats its bytes, and has more than `MAX_EXPANDED`.
    """
    if nbytes > max(reach, MAX_EXPANDED):
        raise InvalidInput(
            f"tensor `{name}` repeats {reach} bytes of memory to {nbytes} bytes; {MAX_EXPANDED} at most are "
            "written out",
            hint="save what it repeats, and expand it after loading",
            where=name,
            found=nbytes,
            needed=MAX_EXPANDED,
        )


def refuse_masked(name: str, array: Any) -> None:
    """Refuse an array of NumPy with a mask, of which a file holds nothing.

    Raises
    ------
    InvalidInput
        If it is one.
    """
    import numpy as np

    if isinstance(array, np.ma.MaskedArray):
        raise InvalidInput(
            f"`{name}` is a masked array, and its mask would be lost",
            hint="store `.filled()`, or its data and its mask as two arrays",
            where=name,
        )


def has_words(tensor: torch.Tensor) -> bool:
    """Whether a contiguous tensor has words: its storage may have been freed, or begin at an odd place."""
    size = tensor.element_size()
    held = tensor.untyped_storage().nbytes() >= (tensor.storage_offset() + tensor.numel()) * size
    return held and tensor.numel() > 0 and tensor.data_ptr() % size == 0


def torch_bytes(tensor: torch.Tensor) -> Bytes:
    """The bytes of a tensor; those of a contiguous one on the CPU are not copied."""
    import torch

    tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # Of one element or none, any stride is contiguous, and only that of 1 can be viewed as bytes.
    data: Bytes = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()
    return data


def numpy_dtype_name(dtype: Any) -> str:
    """The name in safetensors of a NumPy dtype, those of `ml_dtypes` included.

    Raises
    ------
    UnsupportedDtype
        If safetensors has none.
    """
    for ours, theirs in (_NUMPY | _ML_DTYPES).items():
        if theirs == dtype.name:
            return ours
    raise UnsupportedDtype(
        f"safetensors has no dtype for {dtype}", hint="cast the array first", found=str(dtype)
    )


def torch_shape(spec: TensorSpec) -> tuple[int, ...]:
    """The shape that PyTorch has for a tensor of a file.

    Raises
    ------
    UnsupportedDtype
        If numbers are stored in pairs, and the last dimension is odd.
    """
    shape = spec.shape
    if spec.dtype != "F4":
        return shape
    if not shape or shape[-1] % 2:
        raise UnsupportedDtype(
            f"PyTorch holds F4 in pairs, the last dimension of {list(shape)} is odd",
            hint="read the file with `tpde unpack`",
            found=spec.dtype,
        )
    return (*shape[:-1], shape[-1] // 2)


def to_torch(data: Bytes, spec: TensorSpec, instead: str = "") -> torch.Tensor:
    """Make a tensor of bytes, without a copy; `instead` is as of `require_torch`.

    Raises
    ------
    MissingDependency
        If there is no PyTorch.
    UnsupportedDtype
        If this PyTorch lacks the dtype.
    """
    require_torch("a PyTorch tensor", instead)
    import torch

    dtype, shape = torch_dtype(spec.dtype), torch_shape(spec)
    if not data.size:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.from_numpy(data).view(dtype).reshape(shape)


def to_numpy(data: Bytes, spec: TensorSpec) -> Any:
    """Make an array of bytes, without a copy.

    Raises
    ------
    UnsupportedDtype
        If NumPy has no such dtype.
    MissingDependency
        If it is one of `ml_dtypes`, which is not installed.
    """
    import numpy as np

    if spec.dtype in _NUMPY:
        dtype = np.dtype(_NUMPY[spec.dtype])
    elif spec.dtype in _ML_DTYPES:
        try:
            import ml_dtypes
        except ImportError:
            raise MissingDependency(
                f"NumPy knows {spec.dtype} only with `ml_dtypes`", hint='run `pip install "tpde[numpy]"`'
            ) from None
        dtype = np.dtype(getattr(ml_dtypes, _ML_DTYPES[spec.dtype]))
    else:
        raise UnsupportedDtype(
            f"NumPy has no dtype for {spec.dtype}", hint="read it with `tpde.torch`", found=spec.dtype
        )
    return data.view(dtype).reshape(spec.shape)
