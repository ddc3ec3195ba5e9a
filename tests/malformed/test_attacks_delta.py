"""Attacks on deltas (docs/reference/attacks.md, A65 to A70)."""

from __future__ import annotations

from pathlib import Path

import pytest
import xxhash
from support.contents import rng
from support.states import content, files, folders

from tpde.errors import Corrupt, MissingBase, TpdeError, Truncated, UnsupportedVersion
from tpde.format.constants import DELTA_MAGIC
from tpde.format.delta_head import HASH_AT, HEADER
from tpde.format.delta_reader import is_delta
from tpde.io.sources import BytesSource, FileSource
from tpde.store.delta_file import DeltaFile
from tpde.store.delta_report import inspect_delta
from tpde.store.diffing import diff
from tpde.store.patching import patch
from tpde.store.verify_delta import verify_delta


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, bytes]:
    """Give a base and a target, and the delta between them."""
    folder = tmp_path_factory.mktemp("made")
    base, target = folders(folder)
    diff(base, target, folder / "delta")
    return base, target, (folder / "delta").read_bytes()


def test_a65_deltas_cut_anywhere(made: tuple[Path, Path, bytes], tmp_path: Path) -> None:
    data, path = made[2], tmp_path / "delta"
    for end in [*range(0, 200), *range(200, len(data), 211), len(data) - 1]:
        path.write_bytes(data[:end])
        with pytest.raises(TpdeError) as caught:
            inspect_delta(path)
        if end >= 8:
            assert type(caught.value) is Truncated, end
    path.write_bytes(data + b"\0")
    with pytest.raises(Corrupt):
        inspect_delta(path)


def test_a66_flipped_bytes_of_deltas(made: tuple[Path, Path, bytes], tmp_path: Path) -> None:
    data, path, draw = bytearray(made[2]), tmp_path / "delta", rng("flips")
    places = [*range(8, 64), *draw.integers(8, len(data), 400), *range(len(data) - 400, len(data), 7)]
    named = 0
    for at in map(int, places):
        before = data[at]
        data[at] ^= int(draw.integers(1, 256))
        path.write_bytes(data)
        try:
            problems = verify_delta(path)
        except (Truncated, UnsupportedVersion):
            pass
        else:
            assert problems, at
            named += problems[0].tensor is not None
        data[at] = before
    assert named > 200


def test_a67_damage_that_hashes_hide(made: tuple[Path, Path, bytes], tmp_path: Path) -> None:
    """Contents and hashes changed by one who makes them right again: the target's fingerprint tells."""
    base, target, whole = made
    path, draw = tmp_path / "delta", rng("hidden")
    (tmp_path / "good").write_bytes(whole)
    places = list(DeltaFile(FileSource(tmp_path / "good"))._places.values())
    start = HEADER.size + sum(it.size for it in places)
    outcomes = set()
    for _ in range(150):
        data = bytearray(whole)
        if draw.random() < 0.5:  # a payload
            it = places[int(draw.integers(len(places)))]
            if not it.size:
                continue
            at = it.offset + int(draw.integers(it.size))
            data[at] ^= int(draw.integers(1, 256))
            old = it.hash.to_bytes(8, "little")
            new = xxhash.xxh3_64_digest(data[it.offset : it.offset + it.size])[::-1]
            data[start:] = data[start:].replace(old, new)
        else:  # hashes or contents
            data[int(draw.integers(start, len(data)))] ^= int(draw.integers(1, 256))
        data[HASH_AT : HEADER.size] = bytes(8)
        hashed = xxhash.xxh3_64_intdigest(bytes(data[: HEADER.size]) + bytes(data[start:]))
        data[HASH_AT : HEADER.size] = hashed.to_bytes(8, "little")
        path.write_bytes(data)
        try:
            patch(base, path, tmp_path / "out", force=True)
        except TpdeError as error:
            outcomes.add(type(error))
        else:
            assert content(tmp_path / "out") == content(target)
    assert outcomes >= {Corrupt, MissingBase}


def _sealed(data: bytearray) -> bytes:
    """Make the hash of the head right again."""
    size = HEADER.unpack_from(data)[6]
    data[HASH_AT : HEADER.size] = bytes(8)
    found = xxhash.xxh3_64_intdigest(bytes(data[: HEADER.size]) + bytes(data[HEADER.size + size :]))
    data[HASH_AT : HEADER.size] = found.to_bytes(8, "little")
    return bytes(data)


@pytest.mark.parametrize(
    ("at", "value", "error"),
    [(8, 2, UnsupportedVersion), (10, 1, Corrupt), (20, 255, Corrupt), (23, 255, Corrupt), (32, 1, Corrupt)],
    ids=["version", "reserved", "another size", "a bomb", "reserved bytes"],
)
def test_a68_headers_of_deltas_that_cannot_be(
    at: int, value: int, error: type[TpdeError], made: tuple[Path, Path, bytes], tmp_path: Path
) -> None:
    data = bytearray(made[2])
    data[at] = value
    (tmp_path / "delta").write_bytes(_sealed(data))
    with pytest.raises(error):
        inspect_delta(tmp_path / "delta")


def _with_contents(folder: Path, old: bytes, new: bytes) -> Path:
    """Give a delta of files whose JSON has been changed."""
    import zstandard

    base, target = files(folder)
    diff(base, target, folder / "delta")
    data = (folder / "delta").read_bytes()
    fields = list(HEADER.unpack_from(data))
    hashes, frame = fields[3], fields[4]
    plain = zstandard.ZstdDecompressor().decompress(data[len(data) - frame :])
    assert plain.count(old) >= 1, plain
    size = int.from_bytes(plain[:4], "little") + len(new) - len(old)
    plain = size.to_bytes(4, "little") + plain[4:].replace(old, new, 1)
    packed = zstandard.ZstdCompressor(write_content_size=True).compress(plain)
    fields[3:6] = hashes, len(packed), len(plain)
    changed = bytearray(HEADER.pack(*fields) + data[HEADER.size : len(data) - frame] + packed)
    (folder / "delta").write_bytes(_sealed(changed))
    return folder / "delta"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"name":""', b'"name":"../x"'),
        (b'"name":""', b'"name":"/x"'),
        (b'"sparse"', b'"sparze"'),
        (b'"BF16",[70000]', b'"BF16",[70001]'),
        (b'"BF16",[70000]', b'"F16",[70000]'),
        (b'"BF16",[70000]', b'"BF16",[-70000]'),
        (b'"layers.0.norm"', b'"layers.0.weight"'),
        (b'"same",0', b'"same",1'),
        (b'"models":[', b'"models":[0,'),
        (b'"base":"base.safetensors"', b'"base":7'),
        (b'"base":"base.safetensors"', b'"base":"base.safetensors","more":1'),
        (b'"base":"base.safetensors"', b'"base":"\\ud800"'),
        (b'"header_hash":"', b'"header_hash":"0'),
        (b'"files":[', b'"files":[[],'),
        (b'"files":[', b'"files":[' + b"[" * 100_000),
    ],
)
def test_a69_contents_of_deltas_that_cannot_be(old: bytes, new: bytes, tmp_path: Path) -> None:
    path = _with_contents(tmp_path, old, new)
    with pytest.raises(TpdeError):
        inspect_delta(path)
    assert verify_delta(path)


def test_a70_bases_out_of_reach(tmp_path: Path) -> None:
    path = _with_contents(tmp_path, b'"base":"base.safetensors"', b'"base":"/etc/hostname"')
    with pytest.raises(MissingBase):
        patch(path, path, tmp_path / "out")


def test_reading_stops_at_the_magic() -> None:
    assert not is_delta(BytesSource(b""))
    assert is_delta(BytesSource(DELTA_MAGIC))
    assert not is_delta(BytesSource(b"\x89TPDE\r\n\x1a" + bytes(100)))
