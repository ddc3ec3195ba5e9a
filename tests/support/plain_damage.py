"""Damage in what packed files store plain: norms, biases, and whatever else does not shrink."""

from __future__ import annotations

from pathlib import Path

from tpde.files.reader import PackedFile


def damage_plain(path: Path, containing: str = "") -> str:
    """Flip a bit of a tensor that a file stores plain, whose name has a text in it; gives the name."""
    with PackedFile(path) as file:
        entries, start = file.container.entries, file.container.data_start
        name = next(it for it in sorted(file.specs) if file.is_plain(it) and containing in it)
        at = start + entries[name].begin
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    return name
