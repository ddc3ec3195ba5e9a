"""A tensor of every dtype, in a plain file and a packed one, and by NumPy alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from support.contents import fill
from support.files import pack_bytes, safetensors_bytes
from tpde.format.constants import DTYPES
from tpde.format.container import TensorSpec
from tpde.frameworks import _ML_DTYPES, _NUMPY

SHAPE = (6, 5, 400)  # of bf16: 12,000 words, so two chunks
SPECS = {dtype: TensorSpec(dtype, SHAPE) for dtype in DTYPES}
FILE = pack_bytes(
    safetensors_bytes({d: (s, fill("normal", s)) for d, s in SPECS.items()}, {"k": "v", "a": "b"})
)
PLAIN = safetensors_bytes({d: (s, fill("normal", s)) for d, s in SPECS.items()})
KNOWN = [*_NUMPY, *_ML_DTYPES]


def bits_of(array: Any) -> tuple[Any, ...]:
    """Shape and bytes: values compare equal where bits differ."""
    array = np.asarray(array)
    return array.shape, array.dtype.name, np.ascontiguousarray(array).tobytes()


def by_numpy(dtype: str) -> Any:
    """The tensor by NumPy alone."""
    if dtype in _NUMPY:
        kind: Any = np.dtype(_NUMPY[dtype])
    else:
        import ml_dtypes

        kind = np.dtype(getattr(ml_dtypes, _ML_DTYPES[dtype]))
    return np.frombuffer(fill("normal", SPECS[dtype]), kind).reshape(SHAPE)


def part_by_numpy(dtype: str, index: Any) -> Any:
    """Its part by NumPy's own indexing: of words, since scalars of bool are 0 or 1 whatever their byte."""
    whole = by_numpy(dtype)
    return np.asarray(whole.view(f"V{whole.itemsize}")[index]).view(whole.dtype)
