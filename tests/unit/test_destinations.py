"""Where files can be written, and what is never replaced there."""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path

import pytest

from tpde.errors import DestinationExists, InvalidDestination
from tpde.files.replaced_folder import refuse_folder
from tpde.io.sinks import FileSink, refuse_file, require_writable, unwritable
from tpde.io.special_files import kind_of


def test_destinations_that_cannot_be_say_why(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("old")
    with pytest.raises(DestinationExists, match=r"there.*--force"):
        FileSink(tmp_path / "there")
    with pytest.raises(InvalidDestination, match="is a folder"):
        FileSink(tmp_path, force=True)
    with pytest.raises(InvalidDestination, match="create the folder first"):
        FileSink(tmp_path / "no" / "file")
    with pytest.raises(InvalidDestination):
        FileSink(tmp_path / "there" / "file")


def test_a_name_that_ends_with_a_slash_is_of_a_folder(tmp_path: Path) -> None:
    for name in ("new/", "new//", "."):
        with pytest.raises(InvalidDestination, match="folder"):
            FileSink(f"{tmp_path}/{name}", force=True)
    with pytest.raises(InvalidDestination, match="new/` names a folder"):
        refuse_file(f"{tmp_path}/new/", force=True)
    assert list(tmp_path.iterdir()) == []


# ---- what may be replaced


def test_links_are_replaced_and_what_they_name_is_not(tmp_path: Path) -> None:
    (tmp_path / "named").write_text("theirs")
    (tmp_path / "named").chmod(0o600)
    for target in ("named", "nothing"):
        link = tmp_path / "link"
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        with pytest.raises(DestinationExists):
            FileSink(link)
        made = FileSink(link, force=True)
        made.write(0, [b"mine"])
        made.commit()
        assert not link.is_symlink()
        assert link.read_text() == "mine"
        (tmp_path / "new").touch()
        assert link.stat().st_mode == (tmp_path / "new").stat().st_mode  # neither the link's nor the other's
    assert (tmp_path / "named").read_text() == "theirs"
    assert not (tmp_path / "nothing").exists()


def test_pipes_and_sockets_are_never_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # names of sockets are short
    os.mkfifo("pipe")
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind("socket")
        for name, what in (("pipe", "a pipe"), ("socket", "a socket")):
            for force in (False, True):
                with pytest.raises(InvalidDestination, match=f"{name}` is {what}, which is never replaced"):
                    refuse_file(Path(name), force)
    with pytest.raises(InvalidDestination, match="is a device, which is never replaced"):
        refuse_file(Path(os.devnull), True)


def test_links_to_what_a_process_writes_to_are_never_replaced(tmp_path: Path) -> None:
    """Such as `/dev/stdout`, which is a link."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    with open(tmp_path / "file") as opened:
        places = {
            "pipe": "a link to a pipe",
            "../" + tmp_path.name + "/to-pipe": "a link to a pipe",
            os.devnull: "a link to a device",
            f"/proc/self/fd/{opened.fileno()}": "a link in `/dev` or `/proc`",  # to a file
            "to-fd": "a link in `/dev` or `/proc`",
            "/proc/self/fd/98765": "a link in `/dev` or `/proc`",  # to nothing
        }
        (tmp_path / "to-pipe").symlink_to("pipe")
        (tmp_path / "to-fd").symlink_to(f"/proc/self/fd/{opened.fileno()}")
        link = tmp_path / "link"
        for target, what in places.items():
            link.unlink(missing_ok=True)
            link.symlink_to(target)
            says = f"link` is {what}.*, which is never replaced"
            for force in (False, True):
                with pytest.raises(InvalidDestination, match=says):
                    refuse_file(link, force)
                with pytest.raises(InvalidDestination, match=f"{says} by a folder"):
                    refuse_folder(link, set(), force)
            with pytest.raises(InvalidDestination, match=says):
                FileSink(link, force=True)
            assert link.is_symlink()


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs `/dev/shm`")
def test_links_to_files_in_shared_memory_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/dev/shm/no-such-file-of-tpde")
    assert refuse_file(tmp_path / "link", True) is not None


def test_what_is_there_is_told_and_nothing_is_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x"
    assert refuse_file(path, False) is refuse_file(path, True) is None
    path.write_text("old")
    found = refuse_file(path, True)
    assert found is not None
    assert found.st_size == 3
    with pytest.raises(DestinationExists) as caught:
        refuse_file(path, False)
    assert caught.value.where == str(path)
    with pytest.raises(InvalidDestination, match="cannot be written"):
        refuse_file(tmp_path / ("x" * 300), True)


def test_kinds_of_files_have_names() -> None:
    kinds = {
        stat.S_IFREG: "a file",
        stat.S_IFDIR: "a folder",
        stat.S_IFLNK: "a link",
        stat.S_IFIFO: "a pipe",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
    }
    assert {mode: kind_of(mode | 0o644) for mode in kinds} == kinds


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (
            PermissionError(errno.EACCES, "Permission denied"),
            "change its permissions, or choose another destination",
        ),
        (FileNotFoundError(errno.ENOENT, "No such file"), "create the folder first"),
        (FileNotFoundError(errno.ENOENT, "No such file"), "choose another destination"),
        (OSError(errno.EROFS, "Read-only file system"), "choose another destination"),
        (OSError(errno.EMFILE, "Too many open files"), "close some, or raise the limit (`ulimit -n`)"),
        (
            OSError(errno.ENFILE, "Too many open files in system"),
            "close some, or raise the limit (`ulimit -n`)",
        ),
    ],
)
def test_what_cannot_be_written_says_what_to_do(error: OSError, hint: str, tmp_path: Path) -> None:
    path = (tmp_path / "none" if "create" in hint else tmp_path) / "x"
    found, says = unwritable(path, error), f"`{path}` cannot be written: {error.strerror}"
    assert (found.message, found.hint, found.where) == (says, hint, str(path))


def test_a_place_for_a_file_is_known_before_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    for name in ("new", "file"):
        require_writable(tmp_path / name)
    for path, says in ((tmp_path, "Is a directory"), (tmp_path / "no" / "x", "create the folder first")):
        with pytest.raises(InvalidDestination, match=says):
            require_writable(path)
    asked = []
    monkeypatch.setattr(
        os, "access", lambda path, how: asked.append((path, how))
    )  # root may write everywhere
    with pytest.raises(InvalidDestination, match="change its permissions"):
        require_writable(tmp_path / "new")
    assert asked == [(tmp_path, os.W_OK | os.X_OK)]
    assert [it.name for it in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("what", ["a folder", "a pipe"])
def test_what_is_never_replaced_may_appear_meanwhile(what: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    made = FileSink(path, force=True)
    path.mkdir() if what == "a folder" else os.mkfifo(path)
    with pytest.raises(InvalidDestination, match=what):
        made.commit()
    made.abort()
    assert [it.name for it in tmp_path.iterdir()] == ["x"]
