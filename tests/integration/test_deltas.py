"""Deltas of files and directories: targets come back byte for byte, and reports say what changed."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
from support import spoilt
from support.contents import spec_of
from support.delta_files import file_delta, makers
from support.files import safetensors_bytes
from support.states import content, files, folders

import tpde
from tpde.errors import InvalidInput
from tpde.format.constants import DTYPES
from tpde.io.sources import FileSource
from tpde.memory.garbage import collecting_later
from tpde.store.delta_file import DeltaFile, is_delta_file
from tpde.store.delta_report import inspect_delta
from tpde.store.diffing import diff
from tpde.store.patching import patch
from tpde.store.verify_delta import verify_delta


@makers
@pytest.mark.parametrize("fast", [False, True], ids=["classes", "fast"])
def test_targets_come_back_byte_for_byte(make, fast: bool, tmp_path: Path) -> None:
    base, target = make(tmp_path)
    report = diff(base, target, tmp_path / "delta", fast=fast)
    assert {it.codec for it in report.tensors} == {"same", "sparse", "dense", "full", "plain"}
    assert report.base == base.name
    assert report == inspect_delta(tmp_path / "delta")
    patch(base, tmp_path / "delta", tmp_path / "out")
    assert content(tmp_path / "out") == content(target)
    assert verify_delta(tmp_path / "delta") == verify_delta(tmp_path / "delta", base=base) == []


@makers
def test_no_garbage_is_made(make, tmp_path: Path) -> None:
    """None is collected meanwhile: what a tensor takes is gone when the next one comes."""
    base, target = make(tmp_path)
    diff(base, target, tmp_path / "delta")  # what is imported, or made once
    assert any(gc.collect() == 0 for _ in range(10))  # others' garbage, as a compiler's, goes in steps
    with collecting_later():
        diff(base, target, tmp_path / "delta", force=True)
        assert gc.collect() == 0


def test_a_fast_delta_has_models_of_one_class(tmp_path: Path) -> None:
    base, target = files(tmp_path)
    counts = {}
    for fast in (False, True):
        diff(base, target, tmp_path / f"{fast}", fast=fast)
        file = DeltaFile(FileSource(tmp_path / f"{fast}"))
        counts[fast] = [model[2] for model in file.head.models]  # docs/delta.md 2
        file.close()
    assert max(counts[False]) > 1
    assert set(counts[True]) == {1}


@makers
def test_states_may_be_packed(make, tmp_path: Path) -> None:
    base, target = make(tmp_path)
    for path in (base, target):
        tpde.pack(path, tmp_path / f"packed_{path.name}")
    packed = tmp_path / f"packed_{base.name}", tmp_path / f"packed_{target.name}"
    diff(*packed, tmp_path / "one")
    diff(base, target, tmp_path / "two")
    assert inspect_delta(tmp_path / "one").tensors == inspect_delta(tmp_path / "two").tensors
    for delta in ("one", "two"):  # from the plain base as from the packed one
        for number, it in enumerate((base, packed[0])):
            patch(it, tmp_path / delta, tmp_path / f"{delta}{number}")
            assert content(tmp_path / f"{delta}{number}") == content(target)


@makers
def test_neither_threads_nor_places_change_a_byte(make, tmp_path: Path) -> None:
    base, target = make(tmp_path)
    for threads in (1, 3):
        diff(base, target, tmp_path / f"delta{threads}", threads=threads)
    assert (tmp_path / "delta1").read_bytes() == (tmp_path / "delta3").read_bytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(dtype: str, tmp_path: Path) -> None:
    from support.deltas import pair

    spec = spec_of(dtype, 2000)
    for name, words in zip(("base", "target"), pair(dtype, "specials", "some", 2000), strict=True):
        (tmp_path / name).write_bytes(safetensors_bytes({"w": (spec, words.tobytes())}, {}))
    diff(tmp_path / "base", tmp_path / "target", tmp_path / "delta")
    patch(tmp_path / "base", tmp_path / "delta", tmp_path / "out")
    assert content(tmp_path / "out") == content(tmp_path / "target")


def test_a_file_and_a_directory_are_not_compared(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    file, folder = files(tmp_path)[0], folders(tmp_path)[1]
    for pair in ((file, folder), (folder, file)):
        with pytest.raises(InvalidInput, match="compare like with like"):
            diff(*pair, tmp_path / "delta")


def test_what_is_a_delta_is_told_by_its_first_bytes(tmp_path: Path) -> None:
    base, _ = file_delta(tmp_path)
    (tmp_path / "few").write_bytes((tmp_path / "delta").read_bytes()[:7])
    assert is_delta_file(tmp_path / "delta")
    assert not any(map(is_delta_file, (base, tmp_path, tmp_path / "nothing", tmp_path / "few")))


def test_a_report_says_what_changed_and_progress_counts_the_target(tmp_path: Path) -> None:
    base, target = file_delta(tmp_path)
    delta, size = tmp_path / "delta", spoilt.SPEC.nbytes + spoilt.SMALL.nbytes
    report = inspect_delta(delta)
    assert (report.path, report.base, report.others) == (str(delta), "base", ())
    assert (report.file_bytes, report.target_bytes) == (delta.stat().st_size, size)
    assert report.ratio == size / report.file_bytes
    found = {it.name: it for it in report.tensors}
    assert [(it.codec, it.changed) for it in report.tensors] == [("sparse", 400 / 20_000), ("same", 0.0)]
    assert (found["w"].dtype, found["w"].shape, found["w"].bytes) == ("BF16", (20_000,), 40_000)
    assert 0 < found["w"].stored_bytes < report.file_bytes
    assert found["few"].stored_bytes == 0
    for call in (
        lambda told: diff(base, target, delta, force=True, progress=told),
        lambda told: patch(base, delta, tmp_path / "out", progress=told),
        lambda told: verify_delta(delta, progress=told),
        lambda told: verify_delta(delta, base=base, progress=told),
    ):
        done: list[int] = []
        call(done.append)
        assert sum(done) == size


@pytest.mark.parametrize("which", ["base", "target"])
@pytest.mark.parametrize("folder", [False, True])
def test_files_that_change_while_they_are_compared(which: str, folder: bool, tmp_path: Path) -> None:
    """Else the delta would be from or to a state that never was."""
    paths = {name: tmp_path / name for name in ("base", "target")}
    for name, path in paths.items():
        if folder:
            path.mkdir()
            paths[name] = path / "model.safetensors"
        paths[name].write_bytes(spoilt.PLAIN)

    def change(_: int) -> None:
        paths[which].write_bytes(spoilt.PLAIN)
        os.utime(paths[which], ns=(5, 5))

    with pytest.raises(InvalidInput, match=f"{which}.*` changed while it was read"):
        diff(tmp_path / "base", tmp_path / "target", tmp_path / "delta", progress=change)
    assert sorted(it.name for it in tmp_path.iterdir()) == ["base", "target"]
