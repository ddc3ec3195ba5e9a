"""ZipNN: tensors compressed by themselves, with its defaults but for the number of threads."""

from __future__ import annotations

from typing import Any

import numpy as np

DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


class ZipNN:
    """Bytes of one dtype to bytes and back. It changes its input in place: give it a copy of its own."""

    def __init__(self, dtype: str, threads: int = 1) -> None:
        import zipnn

        self._coder = zipnn.ZipNN(bytearray_dtype=DTYPES[dtype], threads=threads)

    def compress(self, data: bytearray) -> Any:
        """Bytes to bytes."""
        return self._coder.compress(data)

    def decompress(self, coded: Any) -> Any:
        """Bytes to bytes."""
        return self._coder.decompress(coded)


def stored_bytes(dtype: str, data: np.ndarray[Any, np.dtype[np.uint8]], tensor: Any) -> int | None:
    """Size of a tensor as ZipNN stores it, its own bytes at most; None for a dtype that it does not take.

    Raises
    ------
    ValueError
        If it does not come back.
    """
    import torch

    if dtype in DTYPES:
        coded = ZipNN(dtype).compress(bytearray(data))
        back = np.frombuffer(ZipNN(dtype).decompress(coded), np.uint8)
    elif dtype == "F8_E4M3":
        import zipnn

        coded = zipnn.ZipNN(input_format="torch", threads=1).compress(tensor.clone())
        made = zipnn.ZipNN(input_format="torch", threads=1).decompress(coded)
        back = made.contiguous().reshape(-1).view(torch.uint8).numpy()
    else:
        return None
    if not np.array_equal(back, data):
        raise ValueError(f"ZipNN did not restore {tuple(tensor.shape)} {dtype}")
    return min(len(coded), data.size)


def delta_bytes(dtype: str, old: np.ndarray[Any, Any], new: np.ndarray[Any, Any]) -> int:
    """Size of a tensor beside its base, by ZipNN's delta compression, its own bytes at most."""
    import zipnn

    coder = zipnn.ZipNN(delta_compressed_type="byte", bytearray_dtype=DTYPES[dtype], threads=1)
    coded = coder.compress(bytearray(new.tobytes()), delta_second_data=bytearray(old.tobytes()))
    return min(len(coded), new.nbytes)
