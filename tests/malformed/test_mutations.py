"""One byte changed anywhere: the bits are unchanged, or the damage is reported where it lies."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from support.contents import fill, rng, spec_of
from support.files import pack_bytes, safetensors_bytes, verify_bytes

from tpde.errors import TpdeError
from tpde.files.reader import PackedFile
from tpde.io.sources import BytesSource

CHANGES = 10_000


class _Part(NamedTuple):
    """What a byte of a packed file belongs to."""

    tensor: str | None
    chunk: int | None


def _tensors() -> dict[str, bytes]:
    wanted = {
        "layers.0.weight": ("BF16", 60_000, "normal"),
        "layers.0.scale": ("F32", 4_000, "constant"),
        "layers.1.weight": ("F32", 10_000, "normal"),
        "layers.1.ids": ("I16", 140_000, "ascending"),
        "layers.1.mask": ("U8", 70_000, "nearly"),
        "layers.2.experts": ("F8_E4M3", 40_000, "normal"),
        "head.plain": ("U16", 30_000, "random"),
        "head.tiny": ("F32", 3, "normal"),
    }
    tensors = {n: (spec_of(d, words), c) for n, (d, words, c) in wanted.items()}
    return {n: (spec, fill(content, spec)) for n, (spec, content) in tensors.items()}


@pytest.fixture(scope="module")
def packed() -> tuple[bytes, dict[str, bytes], list[_Part]]:
    """Give a packed file, its tensors' bytes, and what each of its own bytes belongs to."""
    tensors = _tensors()
    data = pack_bytes(safetensors_bytes(tensors, {"format": "pt"}))
    parts = [_Part(None, None)] * len(data)
    with PackedFile(data) as file:
        start, codecs, chunks = file.container.data_start, set(), 0
        for name in file.packed_names():
            entry, blob = file.container.entries[name + "_tpde"], file.tensor(name).blob
            codecs.add(blob.header.codec)
            chunks += blob.header.chunks
            at = start + entry.begin
            parts[at : start + entry.end] = [_Part(name, None)] * (entry.end - entry.begin)
            ends = [
                *(int(r) << blob.header.unit_log2 for r in blob.records["offset"]),
                blob.header.blob_bytes,
            ]
            for i in range(blob.header.chunks):
                parts[at + ends[i] : at + ends[i + 1]] = [_Part(name, i)] * (ends[i + 1] - ends[i])
        for name in set(file.specs) - set(file.packed_names()):
            entry = file.container.entries[name]
            parts[start + entry.begin : start + entry.end] = [_Part(name, None)] * (entry.end - entry.begin)
    assert codecs == {1, 2, 3}
    assert chunks > 15
    assert len(data) > 200_000
    return data, {n: content for n, (_, content) in tensors.items()}, parts


def _unchanged(data: bytearray, contents: dict[str, bytes]) -> bool:
    with PackedFile(BytesSource(data)) as file:
        return set(file.specs) == set(contents) and all(
            file.read(name).tobytes() == content for name, content in contents.items()
        )


def _check(data: bytearray, at: int, contents: dict[str, bytes], part: _Part) -> str:
    try:
        problems = verify_bytes(data)
    except TpdeError as error:
        message = str(error)
    else:
        message = ""
    if message:
        assert part.tensor is None or part.tensor in message, f"byte {at} of {part}: {message}"
        return "refused"
    if not problems:
        assert _unchanged(data, contents), f"byte {at} of {part}: other bits, and nothing is reported"
        return "unchanged"
    if part.tensor is not None:
        assert {p.tensor for p in problems} == {part.tensor}, f"byte {at} of {part}: {problems}"
    if part.chunk is not None:
        assert {p.chunk for p in problems} == {part.chunk}, f"byte {at} of {part}: {problems}"
    return "reported"


def test_ten_thousand_changed_bytes(packed: tuple[bytes, dict[str, bytes], list[_Part]]) -> None:
    original, contents, parts = packed
    data, draw = bytearray(original), rng("mutations")
    # Half of them anywhere, half in what is small and matters: headers, tables, index maps.
    meta = np.array([i for i, part in enumerate(parts) if part.chunk is None and part.tensor != "head.plain"])
    half = CHANGES // 2
    places = np.concatenate([draw.integers(0, len(data), half), draw.choice(meta, half)])
    outcomes: dict[str, int] = {}
    for at in map(int, places):
        change = int(draw.choice([1 << int(draw.integers(8)), int(draw.integers(1, 256))]))
        data[at] ^= change
        outcome = _check(data, at, contents, parts[at])
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
        data[at] ^= change
    assert data == original
    assert outcomes["reported"] > CHANGES // 2
    assert outcomes.keys() == {"reported", "refused", "unchanged"}


def test_every_byte_of_every_blob_header(packed: tuple[bytes, dict[str, bytes], list[_Part]]) -> None:
    original, contents, parts = packed
    data = bytearray(original)
    with PackedFile(original) as file:
        starts = {n: file.container.data_start + file.container.entries[n + "_tpde"].begin
                  for n in file.packed_names()}  # fmt: skip
    for start in starts.values():
        for at in range(start, start + 128):
            data[at] ^= 0x81
            assert _check(data, at, contents, parts[at]) != "unchanged"
            data[at] ^= 0x81


@pytest.mark.parametrize("seed", range(3))
def test_runs_of_zeros_as_of_a_hole_in_a_download(
    seed: int, packed: tuple[bytes, dict[str, bytes], list[_Part]]
) -> None:
    original, contents, parts = packed
    draw = rng("holes", seed)
    for _ in range(30):
        at = int(draw.integers(len(original)))
        end = min(len(original), at + int(draw.integers(1, 5_000)))
        data = bytearray(original)
        data[at:end] = bytes(end - at)
        touched = {p.tensor for i, p in enumerate(parts[at:end], at) if original[i]}
        try:
            problems = verify_bytes(data)
        except TpdeError:
            continue
        if not problems:
            assert _unchanged(data, contents)
        if touched != {None}:
            touched.discard(None)
        assert {p.tensor for p in problems} <= touched
