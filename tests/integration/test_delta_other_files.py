"""Deltas of directories: files that hold no weights."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import zstandard
from support.delta_files import NEW, OLD, weight_folder
from support.states import content, folders

from tpde.errors import Corrupt, InvalidInput, MissingBase
from tpde.files.operations import pack
from tpde.io.sources import FileSource
from tpde.store.delta_file import DeltaFile
from tpde.store.diffing import diff
from tpde.store.patching import patch
from tpde.store.verify_delta import verify_delta


def test_a_link_counts_as_the_file_that_it_leads_to(tmp_path: Path) -> None:
    base, target = folders(tmp_path)
    (target / "extra.txt").write_text("text")
    (target / "link.txt").symlink_to("extra.txt")
    diff(base, target, tmp_path / "delta")
    patch(base, tmp_path / "delta", tmp_path / "out")
    assert (tmp_path / "out" / "link.txt").read_text() == "text"
    assert content(tmp_path / "out") == content(target)


def test_a_link_in_a_packed_directory_counts_as_what_the_source_had(tmp_path: Path) -> None:
    base, target = folders(tmp_path)
    for folder, text in ((base, "{}"), (target, '{"a": 1}')):
        (folder / "config.json").write_text(text)
        (folder / "settings").symlink_to("config.json")
        shutil.copy(min(folder.glob("*.safetensors")), folder / "a.safetensors")
        (folder / "weights").symlink_to("a.safetensors")
        pack(folder, tmp_path / f"{folder.name}-packed")
    for old in (base, tmp_path / "base-packed"):
        for new in (target, tmp_path / "target-packed"):
            diff(old, new, tmp_path / "delta", force=True)
            for start in (base, tmp_path / "base-packed"):
                assert not verify_delta(tmp_path / "delta", base=start)
                patch(start, tmp_path / "delta", tmp_path / "out", force=True)
                assert content(tmp_path / "out") == content(target)


@pytest.mark.parametrize("link", [".", "nowhere"])
def test_a_link_to_no_file_in_a_packed_directory_is_refused_by_name(tmp_path: Path, link: str) -> None:
    base, target = folders(tmp_path)
    (target / "link").symlink_to(link)
    pack(target, tmp_path / "packed")
    for old, new in ((base, tmp_path / "packed"), (tmp_path / "packed", base)):
        with pytest.raises(InvalidInput, match=r"cannot hold `link`.*a link to no file"):
            diff(old, new, tmp_path / "delta")


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


def _others(folder: Path) -> tuple[Path, Path]:
    """Give two directories whose other files are equal, changed, new and gone."""
    base = weight_folder(tmp := folder / "base", {"1.safetensors": {"w": OLD}})
    for name, text in (("same", "a"), ("changed", "b"), ("gone", "c"), ("emptied", "e"), ("deep/empty", "")):
        (tmp / name).parent.mkdir(exist_ok=True)
        (tmp / name).write_text(text)
    target = weight_folder(tmp := folder / "target", {"1.safetensors": {"w": NEW}})
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


@pytest.mark.parametrize(("most", "level"), [(500, 19), (499, 9)])
def test_large_files_are_compressed_at_a_quick_level(
    most: int, level: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, target = _others(tmp_path)
    (target / "changed").write_text("".join(map(str, range(1000)))[:500])  # which levels tell apart
    monkeypatch.setattr("tpde.store.delta_writer._SLOW_BYTES", most)
    sizes = dict(diff(base, target, tmp_path / "delta").others)
    data = (target / "changed").read_bytes()
    assert sizes["changed"] == len(zstandard.ZstdCompressor(level=level).compress(data))
    assert sizes["changed"] != len(zstandard.ZstdCompressor(level=28 - level).compress(data))
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


@pytest.mark.parametrize("source", ["plain", "packed", "delta"])
def test_a_file_that_no_delta_could_hold_is_refused_before_anything_is_compared(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, target = _others(tmp_path)
    if source == "packed":
        for it in (base, target):
            pack(it, tmp_path / f"packed {it.name}")
        base, target = tmp_path / "packed base", tmp_path / "packed target"
    elif source == "delta":
        diff(target, target, tmp_path / "none")
        target = tmp_path / "none"
    monkeypatch.setattr("tpde.store.delta_file.MAX_OTHER_BYTES", 499)
    monkeypatch.setattr("tpde.store.delta_writer.HostComparer.compare", pytest.fail)
    with pytest.raises(InvalidInput, match=r"cannot hold `changed`: it has 500 bytes") as caught:
        diff(base, target, tmp_path / "delta")
    assert (caught.value.where, caught.value.found, caught.value.needed) == ("changed", 500, 499)
    assert not (tmp_path / "delta").exists()


def test_a_file_of_any_size_may_stay_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, target = _others(tmp_path)
    (base / "changed").write_text("x" * 500)
    monkeypatch.setattr("tpde.store.delta_file.MAX_OTHER_BYTES", 499)
    diff(base, target, tmp_path / "delta")
    patch(base, tmp_path / "delta", tmp_path / "out")
    assert content(tmp_path / "out") == content(target)
    (base / "changed").write_text("y" * 500)
    with pytest.raises(InvalidInput, match=r"cannot hold `changed`"):
        diff(base, target, tmp_path / "other")
    assert not (tmp_path / "other").exists()


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
