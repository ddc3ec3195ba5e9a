"""The contestants of `delta` that are not ours: bytes that a target takes beside its base.

Those that need a package of their own are optional; one that is missing or fails says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from benchmarks.harness.report import note
from benchmarks.peers.zipnn import delta_bytes

Pairs = list[tuple[str, "np.ndarray[Any, Any]", "np.ndarray[Any, Any]"]]
"""Dtypes, and words of the base and of the target, of each tensor."""

INDEX_BYTES = 4


def xor_zstd(pairs: Pairs) -> int:
    """XOR of whole tensors and zstd 1, as slime and SkyRL ship it."""
    import zstandard

    compressor = zstandard.ZstdCompressor(level=1)
    return sum(len(compressor.compress((old ^ new).tobytes())) for _, old, new in pairs)


def index_value(pairs: Pairs) -> int:
    """A 32-bit index and the new word for each change, as verl and vLLM ship it."""
    return sum((INDEX_BYTES + new.itemsize) * int((old != new).sum()) for _, old, new in pairs)


def elias_delta(pairs: Pairs) -> int:
    """Elias-delta codes of gaps and new words under zstd 3, as the origin had it."""
    import zstandard

    total, compressor = 0, zstandard.ZstdCompressor(level=3)
    for _, old, new in pairs:
        at = np.flatnonzero(old != new)
        if not at.size:
            continue
        gaps = np.diff(at, prepend=-1)
        n = np.floor(np.log2(gaps)).astype(np.int64)
        bits = n + 2 * np.floor(np.log2(n + 1)).astype(np.int64) + 1
        total += -(-int(bits.sum()) // 8) + len(compressor.compress(new[at].tobytes()))
    return total


def patch_from(pairs: Pairs) -> int:
    """`zstd --patch-from`, level 19 and long-distance matching, of all tensors one after the other."""
    import zstandard

    old = b"".join(it.tobytes() for _, it, _ in pairs)
    new = b"".join(it.tobytes() for _, _, it in pairs)
    log = max(10, min(27, (len(old) + len(new) - 1).bit_length()))
    parameters = zstandard.ZstdCompressionParameters.from_level(19, window_log=log, enable_ldm=True)
    base = zstandard.ZstdCompressionDict(old, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
    return len(zstandard.ZstdCompressor(compression_params=parameters, dict_data=base).compress(new))


def zipnn_delta(pairs: Pairs) -> int:
    """ZipNN's delta compression."""
    return sum(delta_bytes(*pair) for pair in pairs)


def _cheaper_way(pairs: Pairs, size: Callable[[str, Any, Any], int]) -> int:
    """Each tensor by itself, or all of a dtype as one: whichever takes less."""
    whole = 0
    for dtype in dict.fromkeys(dtype for dtype, _, _ in pairs):
        states = (np.concatenate([pair[i] for pair in pairs if pair[0] == dtype]) for i in (1, 2))
        whole += size(dtype, *states)
    return min(whole, sum(size(*pair) for pair in pairs))


def z4ai(pairs: Pairs) -> int:
    """z4ai's delta frames."""
    import z4ai as package

    names = {"BF16": "bf16", "F32": "fp32", "F16": "fp16"}

    def size(dtype: str, old: Any, new: Any) -> int:
        return len(package.compress_delta(new.tobytes(), old.tobytes(), dtype=names[dtype], threads=1))

    return _cheaper_way(pairs, size)


def arc_v3(pairs: Pairs) -> int:
    """Fireworks' `arc_v3`, for bf16."""
    import torch
    from fireworks_delta_compression import compression

    def size(dtype: str, old: Any, new: Any) -> int:
        if dtype != "BF16":
            raise ValueError("bf16 only")
        src, dst = (torch.from_numpy(it.view(np.int16).copy()).view(torch.bfloat16) for it in (old, new))
        coded, _ = compression.delta_compress(src=src, dst=dst, compression_format="arc_v3")
        return int(coded.numel() * coded.element_size())

    return _cheaper_way(pairs, size)


PEERS: Mapping[str, Callable[[Pairs], int]] = {
    "Elias-delta + zstd": elias_delta,
    "XOR + zstd 1": xor_zstd,
    "index + value": index_value,
    "zstd patch-from": patch_from,
    "ZipNN delta": zipnn_delta,
    "arc_v3": arc_v3,
    "z4ai": z4ai,
}


def sizes(pairs: Pairs) -> dict[str, int | None]:
    """Give each peer's bytes; None for one that is missing or fails."""
    found: dict[str, int | None] = {}
    for name, peer in PEERS.items():
        try:
            found[name] = peer(pairs)
        except Exception as error:  # a peer's failure is its row's
            note(f"{name}: {type(error).__name__}: {str(error)[:100]}")
            found[name] = None
    return found
