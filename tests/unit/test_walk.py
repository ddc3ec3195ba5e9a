"""What is taken of a directory, what is not and why; where links lead."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tpde.files.walk import LeftOut, follow, stays_inside, walk


def make(root: Path, *names: str, **links: str) -> Path:
    """Make files, folders where a name ends in a slash, and links."""
    for name in names:
        path = root / name
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            path.touch()
    for name, target in links.items():
        (root / name).symlink_to(target)
    return root


def left(root: Path, *exclude: str, outside: bool = True) -> dict[str, str]:
    return {it.name: it.reason for it in walk(root, exclude, outside=outside).left_out}


def test_names_are_in_the_order_of_their_parts(tmp_path: Path) -> None:
    names = ("a.b", "a-b", "a/b", "a/c/", "a0", "b/x/y", "b.x")
    tree = walk(make(tmp_path, *names, z="a.b", y="b.x"), ())
    assert tree.files == ("a/b", "a-b", "a.b", "a0", "b/x/y", "b.x")
    assert tree.folders == ("a", "a/c", "b", "b/x")
    assert list(tree.links.items()) == [("y", "b.x"), ("z", "a.b")]
    assert tree.empty_folders() == ["a/c"]
    assert tree.left_out == ()


def test_a_folder_of_links_or_folders_is_not_empty(tmp_path: Path) -> None:
    make(tmp_path, "a/", "b/c/", "d/", "file")
    (tmp_path / "a" / "link").symlink_to("../file")
    assert walk(tmp_path).empty_folders() == ["b/c", "d"]


def test_only_the_cache_at_the_top_is_the_hubs(tmp_path: Path) -> None:
    make(tmp_path, ".cache/notes", "sub/.cache/notes", ".cached/notes")
    tree = walk(tmp_path)
    assert tree.files == (".cached/notes", "sub/.cache/notes")
    assert tree.left_out == (LeftOut(".cache", "the hub's own notes", expected=True),)


def test_patterns_that_match_nothing_are_told(tmp_path: Path) -> None:
    make(tmp_path, "a", "sub/b", ".cache/notes")
    assert walk(tmp_path, ("a", "*", "sub/b", ".cache", "c", "x/*", "c")).unmatched == ("sub/b", "c", "x/*")
    assert walk(tmp_path, ("sub/b", "./a")).unmatched == walk(tmp_path).unmatched == ()


def test_what_was_asked_to_be_left_out_is_expected_and_nothing_else(tmp_path: Path) -> None:
    make(tmp_path, "a", "b", dangling="/nowhere")
    os.mkfifo(tmp_path / "pipe")
    found = {it.name: it.expected for it in walk(tmp_path, ["b"]).left_out}
    assert found == {"b": True, "pipe": False, "dangling": False}


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("x", {"x", "sub/x"}),
        ("x/", {"x", "sub/x"}),
        ("sub/x", {"sub/x"}),
        ("./sub/x", {"sub/x"}),
        ("./x", {"x"}),
        ("sub/*", {"sub/x", "sub/X", "sub/deep"}),
        ("*/x", {"sub/x"}),
        ("X", {"sub/X"}),
        ("*p", {"sub/deep"}),
        ("", set()),
    ],
)
def test_patterns_are_of_names_or_of_paths(pattern: str, found: set[str], tmp_path: Path) -> None:
    make(tmp_path, "x", "sub/x", "sub/X", "sub/deep/y")
    assert set(left(tmp_path, pattern)) == found


# ---- links


@pytest.mark.parametrize(
    ("links", "name", "end"),
    [
        ({}, "a/b", "a/b"),
        ({"a": "b"}, "a", "b"),
        ({"a": "b"}, "a/c", "b/c"),
        ({"a": "b"}, "ab", "ab"),
        ({"a": "b", "b": "c/d"}, "a/e", "c/d/e"),
        ({"x/a": "../b"}, "x/a/c", "b/c"),
        ({"x/a": ".."}, "x/a", "."),
        ({"x/a": ".", "x/b": "c"}, "x/a/b", "x/c"),
        ({"a": "b", "b": "a"}, "a", None),
        ({"a": "a"}, "a", None),
        ({"a": "a/b"}, "a", None),
        ({f"{i}": f"{i + 1}" for i in range(39)}, "0", "39"),
        ({f"{i}": f"{i + 1}" for i in range(41)}, "0", None),
    ],
)
def test_where_links_lead(links: dict[str, str], name: str, end: str | None) -> None:
    assert follow(name, links) == end


@pytest.mark.parametrize(
    ("name", "target", "inside"),
    [
        ("a", "b", True),
        ("a", "./b/", True),
        ("a", ".", True),
        ("a", "..b", True),
        ("a/b", "..", True),
        ("a/b/c", "../..", True),
        ("a/b/c", "../../..", False),
        ("a/b", "../../a", False),
        ("a", "..", False),
        ("a", "", False),
        ("a", "/", False),
        ("a/b", "c/../d", False),
        ("a/b", "../c/..", False),
    ],
)
def test_links_that_cannot_lead_out(name: str, target: str, inside: bool) -> None:
    assert stays_inside(name, target) is inside


def test_links_are_kept_or_taken_as_what_they_lead_to(tmp_path: Path) -> None:
    outside = make(tmp_path / "outside", "file", "folder/")
    root = make(
        tmp_path / "root",
        *("file", "model.safetensors", "blob", "config.json", "gone/x", "sub/deep/y"),
        kept="file",
        chain="kept",
        loop="loop",
        nowhere="nothing",
        folder="sub",
        here=".",
        through="folder/deep/y",
        plain="model.safetensors",
        excluded="gone/x",
        absolute=str(tmp_path / "root" / "file"),
        out="../outside/file",
        **{"weights.safetensors": "blob", "more.safetensors": "model.safetensors"},
        **{"away": "../outside/folder", "detour": "sub/../file", "nothing at all": "/nowhere"},
    )
    assert outside.exists()
    tree = walk(root, ["gone"])
    names = ("chain", "folder", "here", "kept", "loop", "more.safetensors", "nowhere", "plain", "through")
    assert tuple(tree.links) == names
    taken = {"absolute", "detour", "excluded", "out", "weights.safetensors"}
    assert taken == set(tree.files) - {
        "blob", "config.json", "file", "model.safetensors", "sub/deep/y",
    }  # fmt: skip
    found = {it.name: it.reason for it in tree.left_out}
    assert found.pop("gone") == "excluded"
    assert found.pop("away") == "a link to a folder that is not taken"
    assert found.pop("nothing at all").startswith("a link that leads nowhere: No such file")
    assert found == {}
    found = left(root, "gone", outside=False)
    assert set(found) == {"gone", "away", "nothing at all", "absolute", "detour", "excluded", "out"}
    assert found["out"] == found["excluded"] == "a link that leads out of the directory"


@pytest.mark.parametrize(
    ("place", "blob", "taken"),
    [
        ("models/snapshots/abc", "models/blobs/1", True),
        ("models/snapshots/abc", "models/blobs/deep/1", False),
        ("models/snapshots/abc", "models/other/1", False),
        ("models/snapshot/abc", "models/blobs/1", False),
        ("models/snapshots/abc", "blobs/1", False),
    ],
)
def test_only_the_hubs_own_links_lead_out_of_a_directory_that_is_not_trusted(
    place: str, blob: str, taken: bool, tmp_path: Path
) -> None:
    make(tmp_path, f"{place}/", blob)
    (tmp_path / place / "x").symlink_to(os.path.relpath(tmp_path / blob, tmp_path / place))
    tree = walk(tmp_path / place, outside=False)
    assert tree.files == (("x",) if taken else ())
    assert [it.reason for it in tree.left_out] == (
        [] if taken else ["a link that leads out of the directory"]
    )


# ---- errors of the system


def _failing(monkeypatch: pytest.MonkeyPatch, call: str, name: str, code: int) -> None:
    real: Callable[..., Any] = getattr(os, call)

    def fail(path: Any, *args: Any, **options: Any) -> Any:
        if not isinstance(path, int) and os.path.basename(path) == name:
            raise OSError(code, os.strerror(code), path)
        return real(path, *args, **options)

    monkeypatch.setattr(os, call, fail)


CALLS = {"scandir": "folder", "lstat": "file", "stat": "out"}
REASONS = {
    "scandir": "the folder cannot be read: ",
    "lstat": "it cannot be looked at: ",
    "stat": "a link that leads nowhere: ",
}


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM, errno.ENOENT, errno.ELOOP, errno.ENAMETOOLONG])
@pytest.mark.parametrize("call", CALLS)
def test_what_may_not_be_looked_at_is_left_out(
    call: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, "folder/x", "file", "other", out="/dev/null")
    _failing(monkeypatch, call, CALLS[call], code)
    tree = walk(tmp_path)
    assert {it.name: it.reason for it in tree.left_out}[CALLS[call]] == REASONS[call] + os.strerror(code)
    assert "other" in tree.files
    assert CALLS[call] not in (*tree.files, *tree.folders, *tree.links)


@pytest.mark.parametrize("call", CALLS)
def test_a_disk_that_fails_is_no_reason_to_leave_anything_out(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, "folder/x", "file", out="/dev/null")
    for code in (errno.EIO, errno.EMFILE, errno.ENOMEM):
        with pytest.MonkeyPatch.context() as patch:
            _failing(patch, call, CALLS[call], code)
            with pytest.raises(OSError, match=os.strerror(code)):
                walk(tmp_path)


def test_a_directory_that_cannot_be_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, "model/x")
    with pytest.MonkeyPatch.context() as patch:
        _failing(patch, "scandir", "model", errno.EACCES)
        with pytest.raises(PermissionError):
            walk(tmp_path / "model")
