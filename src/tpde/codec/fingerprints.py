"""Fingerprints of tensors (docs/delta.md 4), by the C core."""

from __future__ import annotations

import ctypes

from tpde.codec.native import address, as_bytes, core
from tpde.io.buffers import Buffer

_Sums = ctypes.c_uint64 * 2


def fingerprint(data: Buffer, offset: int = 0) -> bytes:
    """The fingerprint of a tensor's bytes, or the share that some of them have in it (delta.md 4).

    Parameters
    ----------
    data : bytes-like or ndarray
        Contiguous. A multiple of 8 bytes, unless the tensor's last ones are among them.
    offset : int
        Where they lie in the tensor: a multiple of 8.

    Returns
    -------
    bytes
        Two sums of 64 bits. Those of parts, added up, are the tensor's.
    """
    part, sums = as_bytes(data), _Sums()
    core().tpde_fingerprint(address(part), part.size, offset, sums)
    return bytes(sums)
