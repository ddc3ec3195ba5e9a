"""XXH3-128 of tensors on a GPU: launches of the kernels of `kernels/digest.cu`.

Blob headers have it (docs/format.md 2). Nothing here allocates on the device: callers put `Digests.items` and
scratch memory there, and pass addresses. Launches go to the caller's stream and synchronize nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tpde.codec.native import Bytes, as_bytes
from tpde.cuda.backend import current

SOURCE = "digest.cu"
ALIGNMENT = 16  # of the items' and scratch memory's address
LEAST_BYTES = 241  # of a tensor: XXH3 is another function of fewer
_BLOCK_BYTES, _STATE_BYTES = 1024, 64
_WARPS, _TOGETHER, _MOST_BLOCKS = 8, 4, 2048
_CHAIN_THREADS = 256

_ITEM = np.dtype([(name, "<u8") for name in ("at", "nbytes", "sums")])
_ALL = (1 << 64) - 1
_PRIMES = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F  # of 64 bits, the first two
_AVALANCHE = 0x165667919E3779F9
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b532ea371644897a20df94e3819ef46a9deacd8a8"
    "fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb17"
    "0ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)


class Bytestring(NamedTuple):
    """Bytes on the device: their address, and how many there are."""

    at: int
    nbytes: int


class Digests:
    """Hashes tensors. They are read once, at the speed of memory; what follows goes one tensor by itself.

    That is a step for each KiB of a tensor, of all tensors at the same time: a large one keeps a
    multiprocessor busy long after the others are done, so it is best beside other work.

    Parameters
    ----------
    tensors : sequence of Bytestring
        At any address; of at least `LEAST_BYTES`.
    device : int
        The device's number.

    Attributes
    ----------
    items : ndarray of uint8
        What the caller puts on the device.
    scratch_bytes, found_bytes : int
        How much scratch memory there must be, a sixteenth of the tensors; what of its start the host reads.
    """

    def __init__(self, tensors: Sequence[Bytestring], device: int) -> None:
        for it in tensors:
            if it.nbytes < LEAST_BYTES:
                raise ValueError(f"{it.nbytes} bytes, {LEAST_BYTES} are the least that are hashed here")
        self._tensors, self._device = tuple(tensors), device
        rows = np.zeros(len(tensors), _ITEM)
        self.found_bytes = _STATE_BYTES * len(tensors)
        sizes = [_STATE_BYTES * _blocks(it.nbytes) for it in tensors]
        ends = np.cumsum([self.found_bytes, *sizes], dtype=np.uint64)
        rows["at"], rows["nbytes"] = [it.at for it in tensors], [it.nbytes for it in tensors]
        rows["sums"] = ends[:-1]
        self.scratch_bytes = int(ends[-1])
        self._starts = [int(it) for it in ends[:-1]]
        self.items: Bytes = rows.view(np.uint8)

    def _launch(self, name: str, blocks: int, threads: int, stream: int, *given: int) -> None:
        kernel = current().kernel(SOURCE, name, {}, self._device)
        kernel.launch(blocks, threads, 0)(stream, *given)

    def sums(self, scratch: int, stream: int) -> None:
        """Read the tensors: a launch for each.

        Parameters
        ----------
        scratch : int
            Address of `scratch_bytes`.
        stream : int
            The stream's handle.
        """
        _check_address("scratch memory", scratch)
        for it, start in zip(self._tensors, self._starts, strict=True):
            blocks = _blocks(it.nbytes)
            if blocks:
                grid = min(-(-blocks // (_WARPS * _TOGETHER)), _MOST_BLOCKS)
                self._launch("sums", grid, 32 * _WARPS, stream, it.at, blocks, scratch + start)

    def chain(self, items: int, scratch: int, stream: int) -> None:
        """Go over the sums: one launch, with a block for each tensor.

        Parameters
        ----------
        items : int
            Address of the attribute.
        scratch : int
            As `sums` left it. The first `found_bytes` become what `results` takes.
        stream : int
            The stream's handle.
        """
        _check_address("items", items)
        _check_address("scratch memory", scratch)
        if self._tensors:
            self._launch("chain", len(self._tensors), _CHAIN_THREADS, stream, items, scratch)

    def results(self, data: Any) -> list[bytes]:
        """XXH3-128 of each tensor.

        Parameters
        ----------
        data : bytes-like or ndarray
            The scratch memory's first `found_bytes`, after `chain`.
        """
        states = as_bytes(data)[: self.found_bytes].view("<u8").reshape(-1, 8).tolist()
        return [_merged(state, it.nbytes) for state, it in zip(states, self._tensors, strict=True)]


def _blocks(nbytes: int) -> int:
    """Whole blocks before the last one."""
    return (nbytes - 1) // _BLOCK_BYTES


def _merged(state: Sequence[int], nbytes: int) -> bytes:
    """The hash that accumulators stand for, in canonical order."""

    def merge(start: int, secret_at: int) -> int:
        total = start
        for i in range(0, 8, 2):
            keys = (
                int.from_bytes(_SECRET[secret_at + 8 * k : secret_at + 8 * k + 8], "little")
                for k in (i, i + 1)
            )
            a, b = (x ^ key for x, key in zip(state[i : i + 2], keys, strict=True))
            total += a * b & _ALL ^ a * b >> 64
        total &= _ALL
        total = (total ^ total >> 37) * _AVALANCHE & _ALL
        return total ^ total >> 32

    low = merge(nbytes * _PRIMES[0] & _ALL, 11)
    high = merge(~(nbytes * _PRIMES[1]) & _ALL, len(_SECRET) - 64 - 11)
    return (high << 64 | low).to_bytes(16, "big")


def _check_address(what: str, at: int) -> None:
    if at % ALIGNMENT:
        raise ValueError(f"{what} at {at:#x}, which is no multiple of {ALIGNMENT}")
