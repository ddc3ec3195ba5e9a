"""Command lines on small files: what they printed, and files that they read, whole and damaged."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

Run = Callable[..., "Outcome"]


class Outcome:
    """What a command printed, and its exit code."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    def failed(self, code: int, error: str, hint: str) -> None:
        """Check that it ended with one `error:` line and one `hint:` line, and printed no data."""
        assert self.code == code, self.err
        lines = self.err.splitlines()
        assert len(lines) == 2, self.err
        assert re.fullmatch(f"error: .*{error}.*", lines[0]), lines[0]
        assert re.fullmatch(f"hint: .*{hint}.*", lines[1]), lines[1]
        assert self.out == ""


@contextlib.contextmanager
def signals_kept() -> Iterator[None]:
    """Let signals do to this process afterwards what they did before a command line ran in it."""
    before = {it: signal.getsignal(it) for it in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """Give a small model: BF16 and F16 that shrink, and what stays plain."""
    random = torch.Generator().manual_seed(seed)
    return {
        "layers.0.weight": (0.02 * torch.randn(300, 128, generator=random)).bfloat16(),
        "layers.1.weight": (0.02 * torch.randn(200, 128, generator=random)).half(),
        "layers.1.bias": torch.arange(5, dtype=torch.int64),
        "empty": torch.empty(0, 4),
    }


def damage(packed: Path, name: str = "layers.0.weight") -> None:
    """Flip a bit in the last chunk that holds weights, of three in one tensor."""
    data = bytearray(packed.read_bytes())
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    start = 8 + int.from_bytes(data[:8], "little") + header[f"{name}_tpde"]["data_offsets"][0]
    shape_end = start + 128 + 16 + 8 + 8  # format.md 2: header, shape, planes, padding
    (tables,) = struct.unpack_from("<I", data, start + 104)
    (offset,) = struct.unpack_from("<I", data, shape_end + tables + 12 * 2)
    data[start + offset * 16 + 40] ^= 1
    packed.write_bytes(data)
