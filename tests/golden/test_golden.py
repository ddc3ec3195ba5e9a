"""Files packed by earlier releases are read, and sources packed again give the same bytes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from support.files import blobs, unpack_bytes, verify_bytes

from golden import make
from tpde.codec import reference
from tpde.files.reader import PackedFile
from tpde.format.constants import DTYPES

HERE = Path(__file__).resolve().parent
LIST: dict[str, dict[str, str]] = json.loads((HERE / "golden.json").read_text())


def _packed(name: str) -> bytes:
    return (HERE / (name + make.SUFFIX)).read_bytes()


def test_the_list_names_every_file_and_all_are_small() -> None:
    files = sorted(HERE.glob("*" + make.SUFFIX))
    assert [p.name.removesuffix(make.SUFFIX) for p in files] == sorted(LIST) == sorted(make.FILES)
    assert sum(p.stat().st_size for p in files) < 60_000


@pytest.mark.parametrize("name", LIST)
def test_golden_files_read_bit_exactly(name: str) -> None:
    packed = _packed(name)
    assert hashlib.sha256(packed).hexdigest() == LIST[name]["packed"], "the golden file itself was changed"
    assert hashlib.sha256(unpack_bytes(packed)).hexdigest() == LIST[name]["source"]
    assert verify_bytes(packed) == []


@pytest.mark.parametrize("name", LIST)
def test_the_reference_reads_golden_files_alike(name: str) -> None:
    packed = _packed(name)
    with PackedFile(packed) as file:
        for tensor, blob in blobs(packed).items():
            assert reference.decode_blob(blob) == file.read(tensor).tobytes(), tensor


@pytest.mark.parametrize("name", [n for n in LIST if make.FILES[n][1]])
def test_sources_packed_again_give_the_same_bytes(name: str, tmp_path: Path) -> None:
    assert hashlib.sha256(make.source_of(name)).hexdigest() == LIST[name]["source"]
    found, needed = make.pack(name, tmp_path), _packed(name)
    # The source's header is a zstd frame, which another version of zstd may write differently.
    assert blobs(found) == blobs(needed)
    with PackedFile(found) as one, PackedFile(needed) as two:
        assert one.container.entries == two.container.entries
        start, at = one.container.data_start, two.container.data_start
    assert found[start:] == needed[at:]


def test_golden_files_hold_every_codec_and_dtype() -> None:
    codecs, dtypes, plain = set(), set(), 0
    for name in LIST:
        packed = _packed(name)
        for blob in blobs(packed).values():
            header = reference.parse_header(blob)
            codecs.add(header.codec)
            dtypes.add(header.dtype)
        with PackedFile(packed) as file:
            plain += len(set(file.specs) - set(file.packed_names()))
    assert codecs == {1, 2, 3}
    assert plain >= 4
    assert dtypes == {d.code for d in DTYPES.values()}
