"""Files in the page cache, so that times of loading are no disk's."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_THREADS = 8
_BUFFER_BYTES = 16 << 20  # of each


def warm(path: Path) -> None:
    """Read a file, or all files of a folder, so that the page cache has them."""
    files = sorted(it for it in path.iterdir() if it.is_file()) if path.is_dir() else [path]
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(_read, files))


def _read(path: Path) -> None:
    room = bytearray(_BUFFER_BYTES)
    with path.open("rb", buffering=0) as file:
        while file.readinto(room):
            pass
