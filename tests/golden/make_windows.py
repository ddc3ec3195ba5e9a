"""Make the golden windows: `PYTHONPATH=tests python -m golden.make_windows`.

Not rerun once version 1 is frozen. The matrices come from the numbers of `make.py`, in plain integers.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np

from golden.make import words_of

HERE = Path(__file__).resolve().parent
LIST = HERE / "windows.json"
# name: (rows, columns, content)
MATRICES = {
    "bell": (21, 330, "bell"),
    "pruned": (33, 130, "pruned"),
    "noise": (3, 65, "noise"),
    "one": (1, 1, "noise"),
}


def path_of(name: str) -> Path:
    """Give a golden blob's file."""
    return HERE / f"windows_{name}.bin"


def matrix(name: str) -> np.ndarray:
    """Give a matrix."""
    rows, columns, content = MATRICES[name]
    seed = 2000 + list(MATRICES).index(name)
    made = list(words_of("noise" if content == "noise" else "bell", 16, rows * columns, seed))
    if content == "pruned":
        made = [0 if i * 7 % 11 < 5 else word for i, word in enumerate(made)]
    return np.array(made, np.uint16).reshape(rows, columns)


def main() -> None:
    """Write the blobs and their list."""
    from tpde.codec import window_plan

    listed = {}
    for name in MATRICES:
        blob = window_plan.encode(matrix(name)).tobytes()
        path_of(name).write_bytes(blob)
        hashes = (hashlib.sha256(it).hexdigest() for it in (matrix(name).tobytes(), blob))
        listed[name] = dict(zip(("words", "blob"), hashes, strict=True))
    LIST.write_text(json.dumps(listed, indent=2) + "\n")


if __name__ == "__main__":
    main()
