"""A delta of an earlier release is applied, and the same two states give the same payloads again."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

import tpde
from golden import make_delta as golden
from tpde.codec import delta_reference as reference
from tpde.files.reader import PackedFile
from tpde.format.delta_head import HEADER, SPARSE
from tpde.io.sources import FileSource
from tpde.store.delta_file import DeltaFile
from tpde.store.verify_delta import verify_delta


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Give a folder with both states, which are what they were."""
    listed = json.loads(golden.LIST.read_text())
    for name, state in zip(("base", "target"), golden.states(), strict=True):
        assert hashlib.sha256(state).hexdigest() == listed[name]
        (tmp_path / f"{name}.safetensors").write_bytes(state)
    assert hashlib.sha256(golden.DELTA.read_bytes()).hexdigest() == listed["delta"], "the delta was changed"
    return tmp_path


def test_the_golden_delta_gives_its_target(folder: Path) -> None:
    tpde.patch(folder / "base.safetensors", golden.DELTA, folder / "out")
    assert (folder / "out").read_bytes() == (folder / "target.safetensors").read_bytes()
    assert verify_delta(golden.DELTA, base=folder / "base.safetensors") == []


def test_the_slow_codec_reads_its_chunks(folder: Path) -> None:
    file, sparse = DeltaFile(FileSource(golden.DELTA)), 0
    with PackedFile(folder / "base.safetensors") as base, PackedFile(folder / "target.safetensors") as target:
        for it in file.head.tensors:
            assert reference.fingerprint(target.read(it.name).tobytes()) == it.target
            if it.codec != SPARSE:
                continue
            data, chunks, at = file.payload(it).tobytes(), [], 0
            for size, changes in zip(it.sizes.tolist(), it.changes.tolist(), strict=True):
                chunks.append((data[at : at + size], changes))
                at += size
            model = reference.Model.parse(file.head.models[it.model])
            made = reference.decode(model, base.read(it.name).tobytes(), chunks)
            assert made == target.read(it.name).tobytes()
            sparse += 1
    file.close()
    assert sparse >= 4
    assert {it.codec for it in file.head.tensors} >= {"same", "sparse", "full", "plain"}


def test_the_same_states_give_the_same_delta(folder: Path) -> None:
    found, needed = golden.make(folder), golden.DELTA.read_bytes()
    # The contents are a zstd frame, which another version of zstd may write differently.
    size = HEADER.unpack_from(needed)[6]
    assert found[HEADER.size : HEADER.size + size] == needed[HEADER.size : HEADER.size + size]
    (folder / "found").write_bytes(found)
    one, two = DeltaFile(FileSource(folder / "found")), DeltaFile(FileSource(golden.DELTA))
    assert one.head.models == two.head.models
    for a, b in zip(one.head.tensors, two.head.tensors, strict=True):
        assert (a.name, a.spec, a.codec, a.size, a.model) == (b.name, b.spec, b.codec, b.size, b.model)
        assert (a.base, a.target, a.payload_hash) == (b.base, b.target, b.payload_hash)
        assert (a.changes == b.changes).all()
        assert (a.sizes == b.sizes).all()
    one.close()
    two.close()
