"""Make the golden delta: `PYTHONPATH=tests python -m golden.make_delta`.

Not rerun once version 1 is frozen. Both states come from the numbers of `make.py`, in plain integers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from golden.make import split_mix, words_of

HERE = Path(__file__).resolve().parent
DELTA, LIST = HERE / "delta.tpde", HERE / "delta.json"
# name: (dtype, words, content, one word in so many changes)
TENSORS = {
    "h.0.bf16": ("BF16", 70_000, "bell", 200),
    "h.0.f16": ("F16", 3000, "bell", 9),
    "h.1.f32": ("F32", 2500, "bell", 3),
    "h.1.f64": ("F64", 300, "bell", 2),
    "h.1.f8": ("F8_E4M3", 4000, "bell", 20),
    "h.2.i64": ("I64", 2000, "count", 50),
    "h.2.same": ("BF16", 500, "bell", 0),
    "h.2.full": ("BF16", 3000, "constant", 1),
    "h.2.plain": ("U16", 300, "noise", 1),
}


def _states() -> Iterator[tuple[str, str, bytes, bytes]]:
    from tpde.format.constants import DTYPES

    for seed, (name, (dtype, words, content, every)) in enumerate(TENSORS.items()):
        bits, draw = 8 * DTYPES[dtype].word_bytes, split_mix(1000 + seed)
        old, new = [], []
        for word in words_of("noise" if content == "constant" else content, bits, words, seed):
            z = next(draw)
            step = (1 + (z >> 20 & -(z >> 20)).bit_length() // 2) * (1 if z >> 60 & 1 else -1)
            changes = every and (z >> 32) % every == 0
            old.append(word)
            if content in ("constant", "noise"):
                new.append(7 if content == "constant" else z % (1 << bits))
            else:
                new.append((word + step) % (1 << bits) if changes else word)
        yield name, dtype, *(b"".join(w.to_bytes(bits // 8, "little") for w in it) for it in (old, new))


def states() -> tuple[bytes, bytes]:
    """Give the files of the base and the target."""
    from tpde.format.container import TensorSpec
    from tpde.format.container_writer import canonical_header

    made = list(_states())
    from tpde.format.constants import DTYPES

    specs = {n: TensorSpec(d, (len(old) // DTYPES[d].word_bytes,)) for n, d, old, _ in made}
    header = canonical_header(specs, {"format": "pt"})
    places = {n: v["data_offsets"] for n, v in json.loads(header).items() if n != "__metadata__"}
    out = []
    for which in (2, 3):
        data = bytearray(sum(spec.nbytes for spec in specs.values()))
        for it in made:
            begin, end = places[it[0]]
            data[begin:end] = it[which]
        out.append(len(header).to_bytes(8, "little") + header + bytes(data))
    return out[0], out[1]


def make(folder: Path) -> bytes:
    """Make the delta of both states."""
    import tpde

    for name, state in zip(("base.safetensors", "target.safetensors"), states(), strict=True):
        (folder / name).write_bytes(state)
    tpde.diff(folder / "base.safetensors", folder / "target.safetensors", folder / "delta", force=True)
    return (folder / "delta").read_bytes()


def main() -> None:
    """Write the delta and its list."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        delta = make(Path(folder))
    DELTA.write_bytes(delta)
    hashes = [hashlib.sha256(it).hexdigest() for it in (*states(), delta)]
    LIST.write_text(json.dumps(dict(zip(("base", "target", "delta"), hashes, strict=True)), indent=2) + "\n")


if __name__ == "__main__":
    main()
