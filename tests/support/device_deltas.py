"""Deltas that a device makes and applies, whether that is a GPU or stands for one: what their tests share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import tpde
from support.backends import MadeBackend
from support.contents import rng
from tpde.cuda.backend import launching_on
from tpde.format.constants import DTYPES
from tpde.format.delta_head import SAME
from tpde.frameworks import torch_bytes, torch_dtype
from tpde.io.sources import BytesSource
from tpde.store.delta_file import DeltaFile

torch = pytest.importorskip("torch", reason="needs torch")

Tensors = dict[str, Any]

KINDS = ("BF16", "F16", "F32", "F64", "F8_E4M3", "U8", "I16", "I32", "I64", "BOOL")


def words_of(dtype: str, words: int, *seed: Any) -> np.ndarray:
    """Words whose symbols spread as weights' do."""
    draw, b = rng("delta", dtype, words, *seed), DTYPES[dtype].word_bytes
    if dtype in ("F32", "F64", "F16"):
        return (draw.standard_normal(words) * 0.02).astype(f"f{b}").view(np.uint8)
    if dtype == "BF16":
        floats = draw.standard_normal(words).astype(np.float32)
        return (floats.view(np.uint32) >> 16).astype("<u2").view(np.uint8)
    return draw.integers(0, 2 if dtype == "BOOL" else 256, words * b).astype(np.uint8)


def moved(base: np.ndarray, dtype: str, share: float, far: bool, *seed: Any) -> np.ndarray:
    """Some words moved: by a little, or to anything."""
    draw, b = rng("change", dtype, base.size, share, far, *seed), DTYPES[dtype].word_bytes
    target = base.copy().view(f"<u{b}")
    at = np.flatnonzero(draw.random(target.size) < share)
    if dtype == "BOOL":
        target[at] ^= 1
    elif far:
        target[at] = draw.integers(0, 256, at.size * b).astype(np.uint8).view(target.dtype)
    else:
        target[at] += draw.integers(-3, 4, at.size).astype(f"<i{b}").view(target.dtype)
    return target.view(np.uint8)


def cpu(tensors: Tensors) -> Tensors:
    return {name: it.to("cpu", copy=True) for name, it in tensors.items()}


def same(one: Tensors, other: Tensors) -> bool:
    return all(np.array_equal(torch_bytes(one[name]), torch_bytes(other[name])) for name in other)


def codecs(data: bytes) -> dict[str, str]:
    return {it.name: it.codec for it in DeltaFile(BytesSource(data, "<delta>")).head.tensors}


@contextmanager
def on_host() -> Iterator[None]:
    """Nothing is resident: no kernel runs."""
    with launching_on(MadeBackend(kind="none")):
        yield


class DeviceDeltas:
    """Makes and applies deltas of tensors that lie at `place`."""

    place: str
    sizes: tuple[int, ...]

    def tensor(self, data: np.ndarray, dtype: str, offset: int = 0) -> Any:
        """A tensor on the device, so many elements from where its memory begins."""
        kind = torch_dtype(dtype)
        room = torch.zeros(data.size + offset * kind.itemsize, dtype=torch.uint8, device=self.place)
        room[offset * kind.itemsize :] = torch.from_numpy(data.copy()).to(self.place)
        return room.view(kind)[offset:]

    def state(
        self, share: float, far: bool, sizes: tuple[int, ...] = (), offset: int = 0
    ) -> tuple[Tensors, Tensors]:
        """Tensors of all kinds and sizes, and what became of them."""
        old, new = {}, {}
        for dtype in KINDS:
            for size in sizes or self.sizes:
                base = words_of(dtype, size)
                old[f"{dtype}.{size}"] = self.tensor(base, dtype, offset)
                new[f"{dtype}.{size}"] = self.tensor(moved(base, dtype, share, far), dtype, offset)
        return old, new

    def make(self, old: Tensors, new: Tensors, **options: Any) -> bytes:
        """Make a delta on the device; on the host it is the same."""
        made = tpde.make_delta(old, new, **options)
        with on_host():
            assert made == tpde.make_delta(cpu(old), cpu(new), **options)
        return made

    def apply(self, old: Tensors, new: Tensors, made: bytes) -> None:
        """Apply a delta on the device, and again."""
        assert tpde.apply_delta(old, made) == sum(codec != SAME for codec in codecs(made).values())
        assert same(old, new)
        assert tpde.apply_delta(old, made) == 0
