"""Saving and loading NumPy arrays packed, in the manner of `safetensors.numpy`.

`from tpde.numpy import save_file, load_file` in the place of `from safetensors.numpy import ...` is
enough to try it. Loading takes plain safetensors files too. BF16 and the 8-bit floats need `ml_dtypes`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tpde.access import Backend, safe_open
from tpde.errors import InvalidInput
from tpde.files.file_writer import FileWriter
from tpde.files.forward_order import forward_order
from tpde.files.given_tensors import require_mapping
from tpde.files.packed_header import given_metadata
from tpde.format.container import TensorSpec
from tpde.frameworks import numpy_dtype_name, refuse_expanded, refuse_masked, spec_of
from tpde.io.sinks import BytesSink

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[np.generic]


def _prepare(tensors: Mapping[str, Array]) -> tuple[dict[str, TensorSpec], dict[str, Any]]:
    import numpy as np

    require_mapping(tensors)
    specs, arrays = {}, {}
    for name, array in tensors.items():
        if not isinstance(array, np.ndarray):
            raise InvalidInput(
                f"`{name}` is a {type(array).__name__}", hint="arrays can be saved", where=name
            )
        refuse_masked(name, array)
        reach = sum((n - 1) * abs(step) for n, step in zip(array.shape, array.strides, strict=True))
        refuse_expanded(name, array.nbytes, (reach + array.itemsize) if array.size else 0)
        specs[name] = spec_of(name, numpy_dtype_name(array.dtype), tuple(array.shape))
        native = array.dtype.newbyteorder("=")
        arrays[name] = array if array.dtype.isnative else array.astype(native)
    return specs, arrays


def _write(arrays: Mapping[str, Any], writer: FileWriter) -> None:
    import numpy as np

    with writer:
        for name in forward_order(arrays):
            writer.write(name, np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8))


def save_file(
    tensor_dict: Mapping[str, Array],
    filename: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
    *,
    threads: int | None = None,
) -> None:
    """Pack arrays into a file, replacing what is there.

    Parameters
    ----------
    tensor_dict : mapping of str to ndarray
        The arrays, without masks; those that are not contiguous are copied.
    filename : path-like
        The file. It appears when it is complete.
    metadata : mapping of str to str, optional
        Kept, and restored when the file is unpacked. Its keys are not `tpde`, nor begin with `tpde.`.
    threads : int, optional
        By default one for each processor; the file does not depend on it.

    Raises
    ------
    InvalidInput, UnsupportedDtype, InvalidDestination
        If an array cannot be saved, or the file not written.

    Examples
    --------
    >>> import numpy as np
    >>> from tpde.numpy import save_file
    >>> save_file({"weight": np.zeros((3, 4), np.float32)}, "model.safetensors")  # doctest: +SKIP
    """
    specs, arrays = _prepare(tensor_dict)
    given = given_metadata(metadata)
    _write(arrays, FileWriter(filename, specs, metadata=given, threads=threads, force=True))


def save(
    tensor_dict: Mapping[str, Array],
    metadata: Mapping[str, str] | None = None,
    *,
    threads: int | None = None,
) -> bytes:
    """Pack arrays into bytes; see `save_file`."""
    specs, arrays = _prepare(tensor_dict)
    sink = BytesSink(sum(spec.nbytes for spec in specs.values()) + (1 << 20))
    _write(arrays, FileWriter(sink, specs, metadata=given_metadata(metadata), threads=threads))
    return bytes(sink.data)


def load_file(
    filename: str | os.PathLike[str], *, threads: int | None = None, backend: Backend = "mmap"
) -> dict[str, Array]:
    """Load all tensors of a packed (or plain) file.

    Parameters
    ----------
    filename : path-like
        The file.
    threads : int, optional
        By default one for each processor.
    backend : {"mmap", "pread"}
        As of `tpde.safe_open`.

    Returns
    -------
    dict of str to ndarray
        Bit for bit what was saved.

    Raises
    ------
    Truncated, Corrupt, UnsupportedVersion, UnsupportedDtype, MissingDependency, InvalidInput
        If the file cannot be read, or NumPy lacks a dtype.
    """
    with safe_open(filename, framework="np", threads=threads, backend=backend) as file:
        return file.get_tensors()


def load(data: bytes, *, threads: int | None = None) -> dict[str, Array]:
    """Load all tensors from the bytes of a packed (or plain) file; see `load_file`."""
    with safe_open(data, framework="np", threads=threads) as file:
        return file.get_tensors()
