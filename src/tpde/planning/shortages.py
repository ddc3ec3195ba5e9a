"""What is said where no plan works: which budget is too small, and what would do."""

from __future__ import annotations

from tpde.errors import OutOfMemory
from tpde.planning.layout import MIB, Layout, parts_of
from tpde.planning.sizes import mib
from tpde.planning.units import Footprint

_WHAT = {
    "plain": "of plain weights and buffers",
    "cache": "of KV cache",
    "activations": "of activations",
    "fixed": "of kernels and libraries",
    "workspace": "to decode to",
    "strips": "to decode rows of weights in the window layout to",
    "tiles": "of what a tile of a weight gives",
    "ring": "to copy to",
    "kept": "of packed weights that are copied once",
    "experts": "of packed experts",
    "pages": "of page tables for host memory",
    "index": "of index maps",
    "packed": "of packed weights",
    "windows": "of weights in the window layout",
    "decoded": "of weights decoded once",
}


def _given(size: int) -> str:
    """Write a size as it was given, rounded down (the least: up); one below 1 MiB in bytes."""
    return f"{size // MIB} MiB" if size >= MIB else f"{size} bytes"


def too_little_vram(layout: Layout, footprint: Footprint, vram: int, pinned: int) -> OutOfMemory:
    """What says that no plan works with so much device memory; the layout is that which takes least.

    `pinned` is how much of it is packed so that it cannot be streamed.
    """
    parts = {key: size for key, size in parts_of(layout, footprint).items() if size}
    least = layout.used(footprint)
    made = ", ".join(f"{mib(size)} {_WHAT[key]}" for key, size in parts.items())
    fewer = f", or a smaller {footprint.argument}" if footprint.cache or footprint.activations else ""
    other = "only what `--codec prefix` packs can be streamed"
    packed = f"; {mib(pinned)} are packed otherwise, and {other}: pack the model again" if pinned else ""
    return OutOfMemory(
        f"`vram` is {_given(vram)}, the least that works is {mib(least)}: {made}",
        hint=f"use `{mib(least).replace(' ', '')}` or more{fewer}{packed}",
        where="vram",
        found=vram,
        needed=least,
        least=least,
    )


def too_little_ram(least: int, ram: int) -> OutOfMemory:
    """What says that no plan works with so much host memory, in bytes."""
    return OutOfMemory(
        f"`ram` is {_given(ram)}, the least that works is {mib(least)}: the embeddings, and the buffers "
        "through which files are read",
        hint=f"use `{mib(least).replace(' ', '')}` or more, or more `vram`",
        where="ram",
        found=ram,
        needed=least,
        least=least,
        budget="ram",
    )
