"""Deltas of files and directories: targets come back byte for byte, from the right base alone."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import spoilt
from support.contents import fill, rng, spec_of
from support.files import safetensors_bytes
from support.states import content, files, folders

import tpde
from tpde.errors import (
    Corrupt,
    DestinationExists,
    InvalidDestination,
    InvalidInput,
    MissingBase,
    Truncated,
    UnsupportedVersion,
)
from tpde.files.reader import PackedFile
from tpde.format.constants import DTYPES
from tpde.format.container import TensorSpec
from tpde.io.sources import FileSource
from tpde.store.delta_file import DeltaFile, is_delta_file
from tpde.store.delta_report import inspect_delta
from tpde.store.diffing import diff
from tpde.store.open_state import base_path, open_state
from tpde.store.patching import patch
from tpde.store.verify_delta import verify_delta

makers = pytest.mark.parametrize("make", [files, folders], ids=["file", "directory"])


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


def _chain(folder: Path, length: int) -> tuple[list[bytes], list[Path]]:
    """Give the states of a model that is trained, and the first as a file with a delta for each other."""
    words, draw, states = 3000, rng("chain"), []
    now = np.frombuffer(fill("normal", spec_of("BF16", words)), np.uint16)
    plain = folder / "plain"
    plain.mkdir()
    for step in range(length):
        states.append(safetensors_bytes({"w": (spec_of("BF16", words), now.tobytes())}, {"step": str(step)}))
        (plain / f"step{step}").write_bytes(states[step])
        now = np.where(draw.random(words) < 0.01, now + 1, now).astype(np.uint16)
    places = [folder / f"step{step}" for step in range(length)]
    places[0].write_bytes(states[0])
    for step in range(1, length):  # among the plain states: it names the base that it will lie beside
        diff(plain / f"step{step - 1}", plain / f"step{step}", plain / "delta", force=True)
        (plain / "delta").rename(places[step])
    return states, places


def test_chains_are_followed(tmp_path: Path) -> None:
    states, places = _chain(tmp_path, 6)
    (tmp_path / "other").write_bytes(states[0])
    diff(places[5], tmp_path / "other", tmp_path / "back")
    patch(places[5], tmp_path / "back", tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == states[0]
    for step in (1, 5):
        patch(places[step - 1], places[step], tmp_path / "out", force=True)
        assert (tmp_path / "out").read_bytes() == states[step]
        assert verify_delta(places[step], base=places[step - 1]) == []


def test_a_chain_of_240_steps(tmp_path: Path) -> None:
    """And no more."""
    states, places = _chain(tmp_path, 242)
    (tmp_path / "other").write_bytes(states[0])
    diff(places[240], tmp_path / "other", tmp_path / "back")
    patch(places[239], places[240], tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == states[240]
    with pytest.raises(InvalidInput, match="more than 240"):
        diff(places[241], tmp_path / "other", tmp_path / "back", force=True)


def test_a_missing_link_is_named(tmp_path: Path) -> None:
    _, places = _chain(tmp_path, 4)
    places[1].unlink()
    with pytest.raises(MissingBase, match=r"step2.*step1"):
        patch(places[2], places[3], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_exchanged_links_are_refused(tmp_path: Path) -> None:
    _, places = _chain(tmp_path, 4)
    shutil.copy(places[2], tmp_path / "kept")
    shutil.copy(places[1], places[2])  # is now its own base's twin: made from step 0, it has it for a base
    with pytest.raises(MissingBase, match="tensor `w`"):
        patch(places[2], places[3], tmp_path / "out")


@pytest.fixture
def few_files() -> Iterator[None]:
    """Let few files be open at a time: whoever follows a cycle for ever ends soon."""
    import resource

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, limits[0]), limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.usefixtures("few_files")
def test_cycles_are_refused(tmp_path: Path) -> None:
    _, places = _chain(tmp_path, 3)
    (tmp_path / "kept").write_bytes(places[0].read_bytes())
    diff(places[2], tmp_path / "kept", tmp_path / "turn")
    shutil.copy(tmp_path / "turn", places[0])  # step0's base is step2, whose is step1, whose is step0
    with pytest.raises(Corrupt, match=r"step2.*step1.*step0.*step2"):
        patch(places[2], tmp_path / "turn", tmp_path / "out")


@makers
def test_another_base_is_refused_by_name(make, tmp_path: Path) -> None:
    base, target = make(tmp_path)
    diff(base, target, tmp_path / "delta")
    with pytest.raises(MissingBase, match="tensor `"):
        patch(target, tmp_path / "delta", tmp_path / "out")
    file = base if base.is_file() else base / "model-1.safetensors"
    data = bytearray(file.read_bytes())
    with PackedFile(file) as opened:
        data[opened.container.data_start + opened.container.entries["layers.1.half"].begin] ^= 1
    file.write_bytes(data)
    with pytest.raises(MissingBase, match="fingerprint") as caught:
        patch(base, tmp_path / "delta", tmp_path / "out")
    assert caught.value.where == "layers.1.half"
    assert not (tmp_path / "out").exists()
    problems = verify_delta(tmp_path / "delta", base=base)
    assert [it.tensor for it in problems] == [caught.value.where]
    assert problems[0].message == caught.value.message, "without the hint, which all would repeat"


def test_every_tensor_of_the_base_is_checked_also_those_that_stay(tmp_path: Path) -> None:
    base, target = files(tmp_path)
    report = diff(base, target, tmp_path / "delta")
    whole = base.read_bytes()
    with PackedFile(base) as opened:
        entries, start = opened.container.entries, opened.container.data_start
    seen = set()
    for it in report.tensors:
        if it.codec in ("same", "sparse", "dense") and it.bytes:
            data = bytearray(whole)
            data[start + entries[it.name].begin] ^= 1
            base.write_bytes(data)
            with pytest.raises(MissingBase, match="fingerprint") as caught:
                patch(base, tmp_path / "delta", tmp_path / "out")
            assert caught.value.where == it.name
            seen.add(it.codec)
    assert seen == {"same", "sparse", "dense"}


def test_a_base_of_another_shape_or_without_a_tensor_is_refused(tmp_path: Path) -> None:
    spec = spec_of("BF16", 800)
    states = [np.frombuffer(fill("normal", spec), np.uint16), None]
    states[1] = np.where(np.arange(800) % 50, states[0], states[0] + 1).astype(np.uint16)
    for name, words in zip(("base", "target"), states, strict=True):
        (tmp_path / name).write_bytes(safetensors_bytes({"w": (spec, words.tobytes())}, {}))
    diff(tmp_path / "base", tmp_path / "target", tmp_path / "delta")
    for other, tensor in (("x", spec), ("w", spec_of("F16", 800)), ("w", spec_of("BF16", 801))):
        data = fill("zeros", tensor)
        (tmp_path / "wrong").write_bytes(safetensors_bytes({other: (tensor, data)}, {}))
        with pytest.raises(MissingBase, match="tensor `w`"):
            patch(tmp_path / "wrong", tmp_path / "delta", tmp_path / "out")


def test_a_header_written_otherwise_is_no_base_for_a_file_that_shares_it(tmp_path: Path) -> None:
    spec = spec_of("BF16", 800)
    data = fill("normal", spec)
    one, other = (
        safetensors_bytes({"w": (spec, data)}, {"a": "1"}),
        safetensors_bytes({"w": (spec, data)}, {}),
    )
    for name, state in (("base", one), ("target", one), ("wrong", other)):
        (tmp_path / name).write_bytes(state)
    diff(tmp_path / "base", tmp_path / "target", tmp_path / "delta")
    with pytest.raises(MissingBase, match="header"):
        patch(tmp_path / "wrong", tmp_path / "delta", tmp_path / "out")


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


@makers
def test_destinations_are_guarded(make, tmp_path: Path) -> None:
    base, target = make(tmp_path)
    diff(base, target, tmp_path / "delta")
    with pytest.raises(DestinationExists):
        diff(base, target, tmp_path / "delta")
    with pytest.raises(DestinationExists):
        patch(base, tmp_path / "delta", target)
    before = content(base)
    for destination in (base, tmp_path / "delta"):
        with pytest.raises(InvalidDestination):
            patch(base, tmp_path / "delta", destination, force=True)
    if base.is_file():
        with pytest.raises(InvalidDestination):
            diff(base, target, base, force=True)
    assert content(base) == before
    assert verify_delta(tmp_path / "delta") == []


def test_what_is_no_delta_is_refused(tmp_path: Path) -> None:
    base, _ = files(tmp_path)
    for path in (base, tmp_path, tmp_path / "nothing"):
        for call in (inspect_delta, verify_delta, lambda it: patch(base, it, tmp_path / "out")):
            with pytest.raises(InvalidInput):
                call(path)


def _two(folder: Path) -> tuple[Path, Path]:
    """Give two states of one file, and the delta between them."""
    (folder / "base").write_bytes(spoilt.PLAIN)
    words = np.frombuffer(fill("normal", spoilt.SPEC), np.uint16).copy()
    words[::50] ^= 1
    tensors = {"w": (spoilt.SPEC, words.tobytes()), "few": (spoilt.SMALL, bytes(range(9)))}
    (folder / "target").write_bytes(safetensors_bytes(tensors))
    diff(folder / "base", folder / "target", folder / "delta")
    return folder / "base", folder / "target"


@pytest.mark.parametrize("way", spoilt.PACKED_WAYS)
def test_states_that_cannot_be_read_are_refused_and_nothing_is_left(way: str, tmp_path: Path) -> None:
    base, target = _two(tmp_path)
    wrong = tmp_path / "wrong"
    error = spoilt.write(wrong, way)
    before = sorted(tmp_path.iterdir())
    for call in (
        lambda: diff(wrong, target, tmp_path / "out"),
        lambda: diff(base, wrong, tmp_path / "out"),
        lambda: patch(wrong, tmp_path / "delta", tmp_path / "out"),
    ):
        with pytest.raises(error):
            call()
    assert sorted(tmp_path.iterdir()) == before
    if way == "damaged":
        (problem,) = verify_delta(tmp_path / "delta", base=wrong)
        assert (problem.tensor, problem.chunk) == ("w", 1)
        return
    with pytest.raises(error):
        verify_delta(tmp_path / "delta", base=wrong)


def _in_the_head(data: bytes) -> bytes:
    return data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]


def _in_a_payload(data: bytes) -> bytes:
    return data[:90] + bytes([data[90] ^ 4]) + data[91:]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda data: data[:5], InvalidInput),
        (lambda data: data[:40], Truncated),
        (lambda data: data[:-9], Truncated),
        (lambda data: data[:8] + b"\x09" + data[9:], UnsupportedVersion),
        (lambda data: data + b"\0", Corrupt),
        (_in_the_head, Corrupt),
        (_in_a_payload, Corrupt),
    ],
    ids=["no magic", "cut in the front", "cut", "newer", "longer", "head", "payload"],
)
def test_deltas_that_cannot_be_read_are_refused_and_nothing_is_left(
    change: Any, error: type[Exception], tmp_path: Path
) -> None:
    base, target = _two(tmp_path)
    delta = tmp_path / "delta"
    delta.write_bytes(change(delta.read_bytes()))
    before = sorted(tmp_path.iterdir())
    with pytest.raises(error):
        patch(base, delta, tmp_path / "out")
    if change is not _in_a_payload:  # which is not read
        with pytest.raises(error):
            inspect_delta(delta)
    for it in (None, base):
        if error is Corrupt:
            assert verify_delta(delta, base=it)
        else:
            with pytest.raises(error):
                verify_delta(delta, base=it)
    if error is not InvalidInput:  # it says that it is a delta
        with pytest.raises(error):
            diff(delta, target, tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == before


def test_what_is_a_delta_is_told_by_its_first_bytes(tmp_path: Path) -> None:
    base, _ = _two(tmp_path)
    (tmp_path / "few").write_bytes((tmp_path / "delta").read_bytes()[:7])
    assert is_delta_file(tmp_path / "delta")
    assert not any(map(is_delta_file, (base, tmp_path, tmp_path / "nothing", tmp_path / "few")))


def test_a_report_says_what_changed_and_progress_counts_the_target(tmp_path: Path) -> None:
    base, target = _two(tmp_path)
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


def test_places_where_no_file_can_be_are_refused(tmp_path: Path) -> None:
    base, target = _two(tmp_path)
    (tmp_path / "folder").mkdir()
    before = sorted(tmp_path.rglob("*"))
    for name in ("folder", "none/out", "base/out"):
        with pytest.raises(InvalidDestination):
            diff(base, target, tmp_path / name, force=True)
        with pytest.raises(InvalidDestination):
            patch(base, tmp_path / "delta", tmp_path / name, force=True)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_link_counts_as_the_file_that_it_leads_to(tmp_path: Path) -> None:
    base, target = folders(tmp_path)
    (target / "extra.txt").write_text("text")
    (target / "link.txt").symlink_to("extra.txt")
    diff(base, target, tmp_path / "delta")
    patch(base, tmp_path / "delta", tmp_path / "out")
    assert (tmp_path / "out" / "link.txt").read_text() == "text"
    assert content(tmp_path / "out") == content(target)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_what_is_no_file_is_refused_by_name(tmp_path: Path) -> None:
    base, target = folders(tmp_path)
    os.mkfifo(target / "pipe")
    with pytest.raises(InvalidInput, match="cannot hold `pipe`"):
        diff(base, target, tmp_path / "delta")
    assert not (tmp_path / "delta").exists()
    (target / "pipe").unlink()
    (target / "loop").symlink_to(".")
    with pytest.raises(InvalidInput, match=r"cannot hold `loop`.*a link to no file"):
        diff(base, target, tmp_path / "delta")


# ---- where a tensor's base is


SMALL = TensorSpec("BF16", (600,))
OLD = np.frombuffer(fill("normal", SMALL), np.uint16)
NEW = np.where(np.arange(600) % 60, OLD, OLD + 1).astype(np.uint16)


def _folder(path: Path, files: Mapping[str, Mapping[str, Any]]) -> Path:
    """Write a directory of files of BF16 tensors, or of texts."""
    for name, holds in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        tensors = {tensor: (SMALL, words.tobytes()) for tensor, words in holds.items()}
        (path / name).write_bytes(safetensors_bytes(tensors))
    return path


def test_a_tensor_that_moved_has_its_base_in_the_other_file(tmp_path: Path) -> None:
    base = _folder(tmp_path / "base", {"1.safetensors": {"w": OLD, "a": OLD}, "2.safetensors": {"b": OLD}})
    target = _folder(
        tmp_path / "target", {"1.safetensors": {"a": OLD}, "2.safetensors": {"b": OLD, "w": NEW}}
    )
    report = diff(base, target, tmp_path / "delta")
    assert [(it.name, it.codec) for it in report.tensors] == [("a", "same"), ("b", "same"), ("w", "sparse")]
    patch(base, tmp_path / "delta", tmp_path / "out")
    assert content(tmp_path / "out") == content(target)


def test_a_tensor_of_a_name_that_two_other_files_have_has_no_base(tmp_path: Path) -> None:
    base = _folder(tmp_path / "base", {"1.safetensors": {"w": OLD}, "2.safetensors": {"w": OLD}})
    target = _folder(tmp_path / "target", {"2.safetensors": {"w": NEW}, "3.safetensors": {"w": OLD}})
    report = diff(base, target, tmp_path / "delta")
    assert [(it.file, it.codec) for it in report.tensors] == [
        ("2.safetensors", "sparse"),
        ("3.safetensors", "plain"),
    ]
    patch(base, tmp_path / "delta", tmp_path / "out")
    assert content(tmp_path / "out") == content(target)


def test_a_base_that_has_a_moved_tensor_twice_is_refused(tmp_path: Path) -> None:
    """It need not be the one that was meant."""
    base = _folder(tmp_path / "base", {"1.safetensors": {"w": OLD}})
    target = _folder(tmp_path / "target", {"3.safetensors": {"w": NEW}})
    assert diff(base, target, tmp_path / "delta").tensors[0].codec == "sparse"
    _folder(base, {"2.safetensors": {"w": OLD}})
    with pytest.raises(MissingBase, match="tensor `w` is not in the base"):
        patch(base, tmp_path / "delta", tmp_path / "out")


def test_a_base_of_another_dtype_says_both(tmp_path: Path) -> None:
    base = _folder(tmp_path / "base", {"1.safetensors": {"w": OLD}})
    target = _folder(tmp_path / "target", {"1.safetensors": {"w": NEW}})
    diff(base, target, tmp_path / "delta")
    other = TensorSpec("F16", (600,))
    (base / "1.safetensors").write_bytes(safetensors_bytes({"w": (other, OLD.tobytes())}))
    with pytest.raises(MissingBase, match=r"`w` is F16 \[600\].*needs BF16 \[600\]") as caught:
        patch(base, tmp_path / "delta", tmp_path / "out")
    assert (caught.value.where, caught.value.found, caught.value.needed) == ("w", other, SMALL)


def test_a_base_without_a_file_whose_header_it_shares_is_refused_by_name(tmp_path: Path) -> None:
    base = _folder(tmp_path / "base", {"1.safetensors": {"w": OLD}, "2.safetensors": {}})
    target = _folder(tmp_path / "target", {"1.safetensors": {"w": NEW}, "2.safetensors": {}})
    diff(base, target, tmp_path / "delta")
    (base / "2.safetensors").unlink()
    with pytest.raises(MissingBase, match=r"`2\.safetensors` is not in the base") as caught:
        patch(base, tmp_path / "delta", tmp_path / "out")
    assert caught.value.where == "2.safetensors"


def test_a_tensor_of_a_packed_state_that_lies_there_plain_is_checked(tmp_path: Path) -> None:
    """Its chunks have no checksums; its hash is in the metadata."""
    base, target = _two(tmp_path)
    packed = bytearray(spoilt.PACKED)
    with PackedFile(spoilt.PACKED) as file:
        entry = file.container.entries["few"]
        packed[file.container.data_start + entry.begin] ^= 1
    (tmp_path / "packed").write_bytes(packed)
    for call in (
        lambda: diff(tmp_path / "packed", target, tmp_path / "out"),
        lambda: diff(base, tmp_path / "packed", tmp_path / "out"),
        lambda: patch(tmp_path / "packed", tmp_path / "delta", tmp_path / "out"),
    ):
        with pytest.raises(Corrupt, match="`few`"):
            call()


# ---- files that hold no weights


def _others(folder: Path) -> tuple[Path, Path]:
    """Give two directories whose other files are equal, changed, new and gone."""
    base = _folder(tmp := folder / "base", {"1.safetensors": {"w": OLD}})
    for name, text in (("same", "a"), ("changed", "b"), ("gone", "c"), ("emptied", "e"), ("deep/empty", "")):
        (tmp / name).parent.mkdir(exist_ok=True)
        (tmp / name).write_text(text)
    target = _folder(tmp := folder / "target", {"1.safetensors": {"w": NEW}})
    for name, text in (
        ("same", "a"),
        ("changed", "x" * 500),
        ("new", "d"),
        ("emptied", ""),
        ("deep/empty", ""),
    ):
        (tmp / name).parent.mkdir(exist_ok=True)
        (tmp / name).write_text(text)
    return base, target


def test_other_files_are_in_a_delta_if_they_changed(tmp_path: Path) -> None:
    base, target = _others(tmp_path)
    sizes = dict(diff(base, target, tmp_path / "delta").others)
    assert {name for name, size in sizes.items() if size} == {"changed", "emptied", "new"}
    assert {name for name, size in sizes.items() if not size} == {"same", "deep/empty"}
    patch(base, tmp_path / "delta", tmp_path / "out")
    assert content(tmp_path / "out") == content(target)


def test_other_files_are_bounded_by_what_their_frame_claims(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, target = _others(tmp_path)
    diff(base, target, tmp_path / "delta")
    monkeypatch.setattr("tpde.store.delta_file.MAX_OTHER_BYTES", 500)
    patch(base, tmp_path / "delta", tmp_path / "out")
    monkeypatch.setattr("tpde.store.delta_file.MAX_OTHER_BYTES", 499)
    with pytest.raises(Corrupt, match=r"file `changed` is damaged .it claims 500 bytes"):
        patch(base, tmp_path / "delta", tmp_path / "other")


@pytest.mark.parametrize("what", ["changed", "gone"])
def test_another_base_is_told_by_a_file_that_is_not_in_the_delta(what: str, tmp_path: Path) -> None:
    base, target = _others(tmp_path)
    diff(base, target, tmp_path / "delta")
    if what == "gone":
        (base / "same").unlink()
    else:
        (base / "same").write_text("b")
    with pytest.raises(MissingBase, match=r"file `same` of .*base` hashes to") as caught:
        patch(base, tmp_path / "delta", tmp_path / "out")
    assert caught.value.where == "same"
    assert not (tmp_path / "out").exists()
    (problem,) = verify_delta(tmp_path / "delta", base=base)
    assert problem.tensor is None
    assert "`same`" in problem.message


def _repeated(path: Path, old: bytes, frame: bytes) -> None:
    """Put another frame of the same size in a delta, with hashes that fit."""
    import xxhash

    from tpde.format.delta_head import HASH_AT, HEADER

    data = path.read_bytes()
    assert data.count(old) == 1
    assert len(frame) == len(old)
    data = data.replace(old, frame)
    data = data.replace(*(xxhash.xxh3_64_digest(it)[::-1] for it in (old, frame)))
    size = HEADER.unpack_from(data)[6]
    front = data[:HASH_AT] + bytes(8)
    found = xxhash.xxh3_64_intdigest(front + data[HEADER.size + size :])
    path.write_bytes(data[:HASH_AT] + found.to_bytes(8, "little") + data[HEADER.size :])


@pytest.mark.parametrize("way", ["bytes", "content", "no frame", "a bomb"])
def test_damage_to_a_file_of_a_delta_is_told_by_its_name(way: str, tmp_path: Path) -> None:
    base, target = _others(tmp_path)
    diff(base, target, tmp_path / "delta")
    with_frame = DeltaFile(FileSource(tmp_path / "delta"))
    (entry,) = [it for it in with_frame.head.others if it.name == "changed"]
    frame = with_frame.payload(entry).tobytes()
    with_frame.close()
    if way == "bytes":
        data = (tmp_path / "delta").read_bytes()
        (tmp_path / "delta").write_bytes(data.replace(frame, frame[:-1] + bytes([frame[-1] ^ 1])))
    elif way == "content":
        _repeated(tmp_path / "delta", frame, frame.replace(b"x", b"y"))
    elif way == "no frame":
        _repeated(tmp_path / "delta", frame, bytes(len(frame)))
    else:
        bomb = b"\x28\xb5\x2f\xfd\xe0" + ((1 << 32) + 1).to_bytes(8, "little")
        _repeated(tmp_path / "delta", frame, bomb.ljust(len(frame), b"\0")[: len(frame)])
    with pytest.raises(Corrupt, match="file `changed`") as caught:
        patch(base, tmp_path / "delta", tmp_path / "out")
    assert caught.value.tensor is None
    assert not (tmp_path / "out").exists()
    if way == "a bomb":
        assert "it claims 4294967297 bytes" in str(caught.value)
    for it in (base, None) if way != "content" else (base,):
        (problem,) = verify_delta(tmp_path / "delta", base=it)
        assert "file `changed`" in problem.message


# ---- places


def test_a_delta_beside_a_link_finds_its_base(tmp_path: Path) -> None:
    """Its hint goes from where it lies to where the base lies, whatever links led there."""
    (tmp_path / "real" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real" / "deep")
    base, target = _two(tmp_path)
    report = diff(base, target, tmp_path / "link" / "delta")
    assert report.base == "../../base"
    open_state(tmp_path / "real" / "deep" / "delta").close()


@pytest.mark.parametrize("hint", [None, "", "gone", "/", "ba\0se"])
def test_a_base_that_is_nowhere_is_missing(hint: str | None, tmp_path: Path) -> None:
    _two(tmp_path)
    file = DeltaFile(FileSource(tmp_path / "delta"))
    assert base_path(file) == tmp_path / "base"
    file.head.base = hint
    with pytest.raises(MissingBase, match=r"has its base at .*, where nothing is") as caught:
        base_path(file)
    assert ("an unknown place" in str(caught.value)) is not bool(hint)
    file.close()


def test_a_delta_goes_to_no_place_inside_what_it_is_made_from(tmp_path: Path) -> None:
    base, target = folders(tmp_path)
    diff(base, target, tmp_path / "delta")
    (tmp_path / "box").mkdir()
    (tmp_path / "delta").rename(tmp_path / "box" / "delta")
    before = content(tmp_path)
    for out in (base / "out", tmp_path / "box"):
        with pytest.raises((InvalidDestination, DestinationExists)):
            patch(base, tmp_path / "box" / "delta", out, force=True)
    assert content(tmp_path) == before


def test_a_delta_is_not_replaced_by_a_file_of_its_own_name(tmp_path: Path) -> None:
    base, target = folders(tmp_path)
    (tmp_path / "box").mkdir()
    diff(base, target, tmp_path / "box" / "notes.txt")  # as a file of the target is called
    before = content(tmp_path)
    with pytest.raises(InvalidDestination):
        patch(base, tmp_path / "box" / "notes.txt", tmp_path / "box", force=True)
    assert content(tmp_path) == before


def test_force_replaces_what_was_patched_before_and_nothing_else(tmp_path: Path) -> None:
    base, target = folders(tmp_path)
    diff(base, target, tmp_path / "delta")
    for _ in range(2):
        patch(base, tmp_path / "delta", tmp_path / "out", force=True)
    assert content(tmp_path / "out") == content(target)
    (tmp_path / "out" / "deep" / "mine.txt").write_text("mine")
    before = content(tmp_path)
    with pytest.raises(InvalidDestination, match=r"mine\.txt"):
        patch(base, tmp_path / "delta", tmp_path / "out", force=True)
    assert content(tmp_path) == before


# ---- files are closed


@pytest.fixture
def unclosed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Give the names of files that nobody closed."""
    found: list[str] = []

    def check(self: FileSource) -> None:
        if getattr(self, "_fd", -1) >= 0:
            found.append(self.name)
        self.close()

    monkeypatch.setattr(FileSource, "__del__", check)
    return found


@makers
def test_every_file_is_closed(make, tmp_path: Path, unclosed: list[str]) -> None:
    base, target = make(tmp_path)
    diff(base, target, tmp_path / "delta")
    patch(base, tmp_path / "delta", tmp_path / "out")
    verify_delta(tmp_path / "delta")
    verify_delta(tmp_path / "delta", base=base)
    inspect_delta(tmp_path / "delta")
    assert is_delta_file(tmp_path / "delta")
    diff(tmp_path / "delta", target, tmp_path / "next")
    gc.collect()
    assert unclosed == []


def test_every_file_is_closed_where_something_fails(tmp_path: Path, unclosed: list[str]) -> None:
    base, _ = _two(tmp_path)
    delta, out = tmp_path / "delta", tmp_path / "out"
    (tmp_path / "wrong").write_bytes(_in_the_head(delta.read_bytes()))
    (tmp_path / "text").write_bytes(b"no weights at all, and no delta")
    (tmp_path / "other").write_bytes(safetensors_bytes({"x": (spoilt.SMALL, bytes(9))}))
    folder = _folder(tmp_path / "folder", {"1.safetensors": {"w": OLD}})
    (folder / "2.safetensors").write_bytes(b"no weights at all")
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "delta").write_bytes(delta.read_bytes())  # its base is not there
    calls = [
        lambda: diff(base, tmp_path / "wrong", out),
        lambda: diff(base, tmp_path / "text", out),
        lambda: diff(base, folder, out),
        lambda: diff(folder, base, out),
        lambda: diff(base, tmp_path / "far" / "delta", out),
        lambda: patch(tmp_path / "text", delta, out),
        lambda: patch(tmp_path / "nothing", delta, out),
        lambda: patch(tmp_path / "other", delta, out),
        lambda: patch(base, tmp_path / "wrong", out),
        lambda: patch(base, delta, base / "x"),
        lambda: inspect_delta(tmp_path / "wrong"),
        lambda: verify_delta(delta, base=tmp_path / "text"),
        lambda: verify_delta(delta, base=tmp_path / "other"),
    ]
    for call in calls:
        with pytest.raises((InvalidInput, Corrupt, InvalidDestination)):
            call()
        gc.collect()
        assert unclosed == []
    with pytest.raises(InvalidInput, match="deltas are taken between safetensors files"):
        diff(base, tmp_path / "text", out)
    assert verify_delta(tmp_path / "wrong")
    gc.collect()
    assert unclosed == []
