"""What is copied, hashed and compared beside packed files: bytes, permissions, links, folders."""

from __future__ import annotations

import hashlib
import os
import stat
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.contents import fill, rng, spec_of
from support.files import MemorySource, safetensors_bytes

from tpde.errors import InvalidInput
from tpde.files.copying import (
    Unchanged,
    copy_file,
    finish_folders,
    mode_of,
    sha256,
    sha256_of_tensors,
    stands_for_link,
    write_text,
)

PIECE = 8 << 20  # that is held at a time
SIZES = [0, 1, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, 3 * PIECE + 7]


def permissions(path: Path) -> str:
    return oct(stat.S_IMODE(path.stat().st_mode))


@pytest.mark.parametrize(
    ("mode", "made"),
    [(0o640, 0o640), (0o755, 0o755), (0o200, 0o600), (0o000, 0o400), (0o4755, 0o755), (0o1664, 0o664)],
)
def test_permissions_of_what_is_made_of_a_file(mode: int, made: int, tmp_path: Path) -> None:
    """Whoever could read the source may read it, and nobody runs it as somebody else."""
    (tmp_path / "source").touch()
    (tmp_path / "source").chmod(mode)
    assert mode_of(tmp_path / "source") == made


@pytest.mark.parametrize("size", SIZES)
def test_copies_have_every_byte_of_every_piece(size: int, tmp_path: Path) -> None:
    data, source, target = rng(size).bytes(size), tmp_path / "source", tmp_path / "target"
    source.write_bytes(data)
    source.chmod(0o751)
    assert copy_file(source, target) == sha256(source) == hashlib.sha256(data).hexdigest()
    assert target.read_bytes() == data
    assert permissions(target) == "0o751"


def test_copies_hold_one_piece(tmp_path: Path) -> None:
    (tmp_path / "source").touch()
    os.truncate(tmp_path / "source", 5 * PIECE)
    for call in (sha256, lambda source: copy_file(source, tmp_path / "target")):
        tracemalloc.start()
        call(tmp_path / "source")
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert most < 1.1 * PIECE


def test_texts_are_written_with_their_permissions(tmp_path: Path) -> None:
    text = "é\r\n" * 5
    assert write_text(tmp_path / "x", text, 0o604) == hashlib.sha256(text.encode()).hexdigest()
    assert (tmp_path / "x").read_bytes() == text.encode()
    assert permissions(tmp_path / "x") == "0o604"


@pytest.mark.parametrize("what", ["file", "link", "dangling"])
def test_nothing_is_written_over_or_through_what_is_there(what: str, tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"source")
    (tmp_path / "other").write_bytes(b"longer than that")
    target = tmp_path / "target"
    if what == "file":
        target.write_bytes(b"theirs")
    else:
        target.symlink_to("other" if what == "link" else "nothing")
    before = sorted(tmp_path.iterdir())
    for write in (lambda: copy_file(tmp_path / "source", target), lambda: write_text(target, "text", 0o600)):
        with pytest.raises(FileExistsError):
            write()
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "other").read_bytes() == b"longer than that"
    assert what != "file" or target.read_bytes() == b"theirs"


def test_what_is_being_written_is_nobody_elses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "source").write_bytes(b"source")
    (tmp_path / "source").chmod(0o666)
    modes: list[int] = []
    real = os.write

    def noting(descriptor: int, data: Any) -> int:
        modes.append(stat.S_IMODE(os.fstat(descriptor).st_mode))
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", noting)
    copy_file(tmp_path / "source", tmp_path / "one")
    write_text(tmp_path / "two", "text", 0o666)
    assert modes == [0o600, 0o600]


def test_a_write_that_fails_leaves_no_file_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "source").write_bytes(b"source")
    descriptors: list[int] = []

    def fail(descriptor: int, _: Any) -> int:
        descriptors.append(descriptor)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", fail)
    for write in (
        lambda: copy_file(tmp_path / "source", tmp_path / "one"),
        lambda: write_text(tmp_path / "two", "text", 0o600),
    ):
        with pytest.raises(OSError, match="No space"):
            write()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptors[-1])
    assert len(descriptors) == 2


@pytest.fixture
def kinds(tmp_path: Path) -> Path:
    """Give a folder with files, folders, links and a pipe; `same` has the content of `file`."""
    for name, text in {"file": "one", "same": "one", "other": "two", "sub/file": "deep"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "nowhere").symlink_to("gone")
    (tmp_path / "to folder").symlink_to("folder")
    os.mkfifo(tmp_path / "pipe")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "target", "stands"),
    [
        ("link", "file", True),
        ("link", "same", False),  # whatever it leads to, it says something else
        ("nowhere", "gone", True),
        ("nowhere", "file", False),
        ("to folder", "folder", True),
        ("to folder", "sub", False),
        ("same", "file", True),
        ("same", "link", True),
        ("other", "file", False),
        ("sub/file", "../file", False),
        ("same", "gone", False),
        ("same", "folder", False),
        ("same", "pipe", False),
        ("folder", "sub", True),
        ("folder", "to folder", True),
        ("folder", "file", False),
        ("folder", "gone", False),
        ("gone", "file", False),
        ("gone", "folder", False),
        ("gone", "gone", False),
        ("pipe", "file", False),
        ("pipe", "folder", False),
        ("pipe", "pipe", False),
    ],
)
def test_what_may_stand_where_a_link_was(name: str, target: str, stands: bool, kinds: Path) -> None:
    assert stands_for_link(kinds / name, target) is stands


@pytest.mark.parametrize("size", SIZES)
def test_the_hash_of_a_file_by_its_tensors(size: int) -> None:
    specs = {"b": spec_of("U8", size), "a": spec_of("BF16", 700), "none": spec_of("F32", 0)}
    data = safetensors_bytes({name: (spec, fill("random", spec)) for name, spec in specs.items()})
    source = MemorySource(data)
    largest = 0

    def read(name: str, begin: int, end: int, out: np.ndarray) -> None:
        nonlocal largest
        largest = max(largest, end - begin)
        assert out.size == end - begin
        source.read(name, begin, end, out)

    assert sha256_of_tensors(source.container, read) == hashlib.sha256(data).hexdigest()
    assert largest == min(max(size, 1400), PIECE)


def test_folders_get_the_permissions_of_others_and_their_owner_keeps_his(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    modes = {"": 0o2755, "open": 0o777, "closed": 0o050, "made": 0o750}
    for name in modes:
        (two / name).mkdir(mode=0o711)
        (two / name).chmod(0o711)
        if name != "made":
            (one / name).mkdir()
    for name in ("open", "closed", ""):
        (one / name).chmod(modes[name])
    finish_folders(one, two, ("open", "closed", "made"))
    assert {name: permissions(two / name) for name in modes} == {
        "": "0o755",
        "open": "0o777",
        "closed": "0o750",
        "made": "0o711",  # which the other has not
    }


def test_a_file_that_changes_is_noticed(tmp_path: Path) -> None:
    path, other = tmp_path / "x", tmp_path / "y"
    path.write_bytes(b"0123")
    os.utime(path, ns=(5, 5))
    unchanged = Unchanged(path)
    unchanged.require()
    path.write_bytes(b"4567")  # of the same size
    with pytest.raises(InvalidInput, match=r"`.*x` changed while it was read"):
        unchanged.require()
    path.write_bytes(b"01234")
    os.utime(path, ns=(5, 5))
    with pytest.raises(InvalidInput, match="changed"):
        unchanged.require()
    other.write_bytes(b"4567")
    os.utime(other, ns=(5, 5))
    other.replace(path)
    with pytest.raises(InvalidInput, match="changed"):
        unchanged.require()
