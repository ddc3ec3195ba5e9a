"""What `inspect` says of files and directories: sums, orders, and what is not known."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from support import spoilt
from support.contents import fill, rng, spec_of
from support.files import blobs, pack_bytes, safetensors_bytes

from tpde.codec.selection import PREFIX_CHUNK_WORDS, SAMPLE_CHUNKS, sample_ranges
from tpde.errors import Corrupt, InvalidInput
from tpde.files.inspection import inspect, survey
from tpde.files.inspection_report import GroupReport, Report
from tpde.files.reader import PackedFile
from tpde.files.sampling import looks_at
from tpde.format.container import TensorSpec

BF16, SMALL = spec_of("BF16", 3000), TensorSpec("U8", (7,))
TENSORS = {
    "layers.10.w": (BF16, fill("normal", BF16)),
    "layers.9.w": (BF16, fill("random", BF16)),
    "few": (SMALL, b"abcdefg"),
    "none": (TensorSpec("F32", (0, 3)), b""),
    "ones": (spec_of("I64", 500), fill("constant", spec_of("I64", 500))),
}
PLAIN = safetensors_bytes(TENSORS)
PACKED = pack_bytes(PLAIN)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Give a directory with a packed file, and a plain one behind it."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.safetensors").write_bytes(PACKED)
    (tmp_path / "sub" / "b.safetensors").write_bytes(PLAIN)
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_a_report_of_a_file(model: Path) -> None:
    path = model / "sub" / "b.safetensors"
    report = inspect(path)
    assert (report.path, report.files, report.packed) == (str(path), ("b.safetensors",), False)
    assert report.file_bytes == len(PLAIN)
    assert report.source_bytes == report.stored_bytes == sum(spec.nbytes for spec, _ in TENSORS.values())
    assert report.ratio == 1
    assert report.bits_per_weight == 8 * report.stored_bytes / (3000 + 3000 + 7 + 500)
    assert [it.name for it in report.tensors] == ["layers.9.w", "layers.10.w", "few", "none", "ones"]
    assert {it.file for it in report.tensors} == {"b.safetensors"}
    assert {it.codec for it in report.tensors} == {"plain"}
    (none,) = [it for it in report.tensors if it.name == "none"]
    assert (none.bits_per_weight, none.entropy, none.ratio, none.shape) == (None, None, 1.0, (0, 3))


def test_a_report_of_a_directory_is_that_of_its_files(model: Path) -> None:
    report = inspect(model)
    assert report.packed
    assert report.files == ("a.safetensors", "sub/b.safetensors")
    assert report.file_bytes == len(PACKED) + len(PLAIN)
    assert [it.file for it in report.tensors] == ["a.safetensors"] * 5 + ["sub/b.safetensors"] * 5
    one, two = inspect(model / "a.safetensors"), inspect(model / "sub" / "b.safetensors")
    assert [it.codec for it in one.tensors] == ["plain", "prefix", "plain", "plain", "constant"]
    assert report.source_bytes == one.source_bytes + two.source_bytes
    assert report.stored_bytes == one.stored_bytes + two.stored_bytes
    assert report.ratio == report.source_bytes / report.stored_bytes
    assert report.bits_per_weight == 8 * report.stored_bytes / (2 * (3000 + 3000 + 7 + 500))


def test_groups_add_up_and_come_by_size_and_then_by_name(model: Path) -> None:
    report = inspect(model)
    assert [it.name for it in report.by_codec] == ["plain", "prefix", "constant"]
    assert [it.name for it in report.by_dtype] == ["BF16", "I64", "U8", "F32"]
    stored = {it.name: it.stored_bytes for it in report.tensors[:5]}
    source = {name: spec.nbytes for name, (spec, _) in TENSORS.items()}
    assert report.by_dtype[0] == GroupReport(
        "BF16",
        4,
        4 * BF16.nbytes,
        3 * BF16.nbytes + stored["layers.10.w"],
        8 * (3 * BF16.nbytes + stored["layers.10.w"]) / 12_000,
        4 * BF16.nbytes / (3 * BF16.nbytes + stored["layers.10.w"]),
    )
    assert report.by_dtype[3] == GroupReport("F32", 2, 0, 0, None, 1.0)
    assert report.by_codec[2] == GroupReport(
        "constant",
        1,
        source["ones"],
        stored["ones"],
        8 * stored["ones"] / 500,
        source["ones"] / stored["ones"],
    )
    equal = {f"{dtype}": (TensorSpec(dtype, (4,)), b"abcd") for dtype in ("U8", "I8", "BOOL", "F8_E4M3")}
    (model / "c.safetensors").write_bytes(safetensors_bytes(equal))
    names = [it.name for it in inspect(model / "c.safetensors").by_dtype]
    assert names == ["BOOL", "F8_E4M3", "I8", "U8"]


def test_a_survey_looks_at_no_word_unless_it_is_to(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = inspect(model, histogram=True)
    assert full.histogram is not None
    assert [(it.dtype, sum(it.counts)) for it in full.histogram] == [
        ("BF16", 12_000), ("U8", 14), ("F32", 0), ("I64", 1000),
    ]  # fmt: skip
    assert survey(model, sample=True).histogram is None
    places = [(at, at + len(data)) for _, data in TENSORS.values() if (at := PLAIN.index(data)) and data]
    damaged = bytearray((model / "a.safetensors").read_bytes())
    damaged[damaged.index(blobs(PACKED)["layers.10.w"]) + len(blobs(PACKED)["layers.10.w"]) // 2] ^= 1
    (model / "a.safetensors").write_bytes(damaged)  # a word, which shows when it is decoded
    with pytest.raises(Corrupt, match=r"layers\.10\.w"):
        survey(model, sample=True)
    real, plain = os.preadv, (model / "sub" / "b.safetensors").stat()
    reads = 0

    def noting(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal reads
        got = real(descriptor, buffers, offset)
        if os.path.samestat(os.fstat(descriptor), plain):
            reads += 1
            assert not any(offset < end and begin < offset + got for begin, end in places)
        return got

    monkeypatch.setattr(os, "preadv", noting)
    quick = survey(model, sample=False)
    assert reads
    assert {it.entropy for it in quick.tensors} == {None}
    assert [it.stored_bytes for it in quick.tensors] == [it.stored_bytes for it in full.tensors]
    assert (quick.by_codec, quick.by_dtype, quick.ratio) == (full.by_codec, full.by_dtype, full.ratio)
    assert survey(model, sample=False, histogram=True).histogram == ()


@pytest.mark.parametrize("packed", [False, True])
def test_what_is_counted_does_not_depend_on_how_many_at_a_time(packed: bool, tmp_path: Path) -> None:
    large = spec_of("BF16", 100_000)
    tensors = {f"{i:04}": (SMALL, rng(i).bytes(SMALL.nbytes)) for i in range(2100)}
    tensors |= {f"large.{i}": (large, fill("normal", large)) for i in range(12)}
    tensors |= {f"more.{i}": TENSORS[name] for i, name in enumerate(TENSORS)}
    made = pack_bytes if packed else bytes

    def inspected(names: list[str]) -> Report:
        (tmp_path / "x").write_bytes(made(safetensors_bytes({name: tensors[name] for name in names})))
        return inspect(tmp_path / "x", histogram=True)

    names = list(tensors)
    whole, parts = inspected(names), [inspected(names[at : at + 500]) for at in range(0, len(names), 500)]
    assert {it.name: it for it in whole.tensors} == {it.name: it for part in parts for it in part.tensors}
    assert whole.histogram is not None
    for it in whole.histogram:
        counts = [other.counts for part in parts for other in part.histogram or () if other.dtype == it.dtype]
        assert it.counts == tuple(map(sum, zip(*counts, strict=True)))
    with PackedFile(made(safetensors_bytes(tensors))) as opened:
        held = [(len(batch), sum(it.words.nbytes for it in batch)) for batch in looks_at(opened, True)]
    assert sum(count for count, _ in held) == len(tensors)
    assert max(count for count, _ in held) == 1024
    assert 1 << 20 <= max(size for _, size in held) < (1 << 20) + large.nbytes


@pytest.mark.parametrize("packed", [False, True])
def test_of_a_large_tensor_its_sample_is_counted(packed: bool, tmp_path: Path) -> None:
    spec = spec_of("U8", (SAMPLE_CHUNKS + 9) * PREFIX_CHUNK_WORDS + 5)
    data = fill("ascending", spec)
    source = safetensors_bytes({"x": (spec, data)})
    (tmp_path / "x").write_bytes(pack_bytes(source) if packed else source)
    sample = b"".join(data[begin:end] for begin, end in sample_ranges(spec))
    assert len(sample) < len(data)
    report = inspect(tmp_path / "x", histogram=True)
    assert report.histogram is not None
    assert report.histogram[0].counts == tuple(np.bincount(np.frombuffer(sample, np.uint8), minlength=256))


def test_files_below_a_directory_are_those_that_packing_takes(model: Path) -> None:
    (model / ".cache").mkdir()
    (model / ".cache" / "c.safetensors").write_bytes(b"not looked at")
    (model / "link.safetensors").symlink_to("a.safetensors")
    assert inspect(model).files == ("a.safetensors", "sub/b.safetensors")
    with pytest.raises(InvalidInput, match="has no"):
        inspect(_empty(model))


def _empty(folder: Path) -> Path:
    (folder / "empty").mkdir()
    (folder / "empty" / "x.txt").write_bytes(spoilt.PLAIN)
    return folder / "empty"
