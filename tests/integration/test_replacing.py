"""Folders and files are replaced at once, or not at all, and with them nothing that is not theirs."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import renames
from support.contents import fill, spec_of
from support.files import safetensors_bytes

from tpde.errors import DestinationExists, InvalidDestination
from tpde.files import folder_swap
from tpde.files.file_writer import FileWriter
from tpde.files.operations import pack, unpack
from tpde.io import temporary
from tpde.io.sinks import FileSink
from tpde.store.diffing import diff
from tpde.store.patching import patch

SPEC = spec_of("BF16", 2_000)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Give a model of one file."""
    folder = tmp_path / "model"
    folder.mkdir()
    tensors = {"w": (SPEC, fill("normal", SPEC))}
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    (folder / "config.json").write_text('{"a": "new"}')
    return folder


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """Give an older model where the new one goes, with things in it that are not the model's."""
    folder = tmp_path / "there"
    (folder / ".cache" / "deep").mkdir(parents=True)
    (folder / "config.json").write_text('{"a": "old"}')
    (folder / ".cache" / "deep" / "notes").write_text("notes")
    (folder / "link").symlink_to("/nowhere")
    os.mkfifo(folder / "pipe")
    (folder / "logs").mkdir()
    return folder


STRAYS = {".cache", ".cache/deep", ".cache/deep/notes", "link", "pipe", "logs"}
OLD = STRAYS | {"config.json"}
NEW = STRAYS | {"config.json", "model.safetensors", "tpde_manifest.json"}


def names(folder: Path) -> set[str]:
    return {it.relative_to(folder).as_posix() for it in folder.rglob("*")}


def visible(folder: Path) -> list[str]:
    """What is in a folder; all of it, hidden names too."""
    return sorted(it.name for it in folder.iterdir())


@pytest.fixture(params=["exchange", "two renames"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Replace as this system can, and as others do."""
    if request.param == "two renames":
        renames.missing(monkeypatch)
    return str(request.param)


def test_force_carries_over_what_was_never_looked_at(model: Path, old: Path, way: str) -> None:
    pack(model, old, force=True)
    assert names(old) == NEW
    assert (old / ".cache/deep/notes").read_text() == "notes"
    assert os.readlink(old / "link") == "/nowhere"
    assert stat.S_ISFIFO((old / "pipe").lstat().st_mode)
    unpack(old, model.with_name("back"))
    pack(model, old, force=True)  # of its own kind
    assert names(old) == NEW
    assert visible(old.parent) == ["back", "model", "there"]


def test_force_keeps_what_appeared_while_packing(model: Path, old: Path, way: str) -> None:
    def appear(_: int) -> None:
        (old / "thesis.txt").write_text("a year of work")
        (old / "sub").mkdir(exist_ok=True)
        (old / "sub" / "more").write_text("more")

    pack(model, old, force=True, progress=appear)
    assert names(old) == NEW | {"thesis.txt", "sub", "sub/more"}
    assert (old / "thesis.txt").read_text() == "a year of work"


def test_force_keeps_a_file_that_changed_while_packing(
    model: Path, old: Path, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    pack(model, old, force=True, progress=lambda _: (old / "config.json").write_text("edited") and None)
    (kept,) = old.parent.glob("there.replaced-*")
    assert (kept / "config.json").read_text() == "edited"
    assert names(kept) == {"config.json"}
    assert names(old) == NEW
    assert kept.name in caplog.text


def _same_size(path: Path) -> None:
    path.write_text('{"a": "OLD"}')


def _same_time(path: Path) -> None:
    before = path.stat()
    path.write_text("edited")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def _another_file(path: Path) -> None:
    before, other = path.stat(), path.with_name("other")
    other.write_text('{"a": "OLD"}')
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(path)


def _a_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/nowhere")


@pytest.mark.parametrize("change", [_same_size, _same_time, _another_file, _a_link])
def test_force_tells_a_file_that_changed_by_each_of_its_marks(
    change: Callable[[Path], None], model: Path, old: Path
) -> None:
    done: list[int] = []

    def once(_: int) -> None:
        if not done:
            change(old / "config.json")
        done.append(1)

    pack(model, old, force=True, progress=once)
    (kept,) = old.parent.glob("there.replaced-*")
    assert names(kept) == {"config.json"}
    assert names(old) == NEW


def test_a_link_of_the_model_is_removed_and_what_it_leads_to_is_not(model: Path, old: Path, way: str) -> None:
    (old.parent / "elsewhere").write_text("theirs")
    (old / "config.json").unlink()
    (old / "config.json").symlink_to("../elsewhere")
    pack(model, old, force=True)
    assert names(old) == NEW
    assert not (old / "config.json").is_symlink()
    assert (old.parent / "elsewhere").read_text() == "theirs"
    assert visible(old.parent) == ["elsewhere", "model", "there"]


@pytest.mark.parametrize("kind", ["pipe", "file of others", "file beside the cache"])
def test_what_would_be_lost_is_named_and_nothing_is_done(kind: str, model: Path, old: Path) -> None:
    if kind == "pipe":
        (old / "config.json").unlink()
        os.mkfifo(old / "config.json")
        says = "holds `config.json`, which is a pipe and would be lost"
    elif kind == "file of others":
        (old / "logs" / "notes").touch()
        says = "holds `logs/notes`, which is no file of this model and would be lost"
    else:
        (old / ".cached").mkdir()
        (old / ".cached" / "notes").touch()
        says = r"holds `\.cached/notes`, which is no file of this model"
    before = names(old)
    for force in (True, False):
        with pytest.raises(InvalidDestination, match=says):
            pack(model, old, force=force)
    assert names(old) == before
    assert visible(old.parent) == ["model", "there"]


def test_what_is_carried_over_keeps_its_permissions(model: Path, old: Path, way: str) -> None:
    modes = {".cache": 0o751, ".cache/deep": 0o700, ".cache/deep/notes": 0o640, "logs": 0o705}
    for name, mode in modes.items():
        (old / name).chmod(mode)
    inode = (old / ".cache/deep/notes").stat().st_ino
    pack(model, old, force=True)
    assert {name: stat.S_IMODE((old / name).stat().st_mode) for name in modes} == modes
    assert (old / ".cache/deep/notes").stat().st_ino == inode


def test_a_folder_takes_no_links_place_and_a_link_no_folders(
    model: Path, old: Path, tmp_path: Path, way: str
) -> None:
    """What is carried over goes through no link, neither out of the old folder nor into the new one."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "file").write_text("theirs")
    (old / "to sub").mkdir()
    os.mkfifo(old / "to sub" / "pipe")
    for name in ("folder", "sub"):
        (model / name).mkdir()
        (model / name / "of the model").touch()
    (model / "to sub").symlink_to("sub")

    def appear(_: int) -> None:
        if not (old / "folder").is_symlink():
            (old / "folder").symlink_to("../theirs")

    pack(model, old, force=True, progress=appear)
    assert (tmp_path / "theirs" / "file").read_text() == "theirs"
    assert names(old / "folder") == names(old / "sub") == {"of the model"}
    assert (old / "to sub").is_symlink()
    (kept,) = tmp_path.glob("there.replaced-*")
    assert names(kept) == {"folder", "to sub", "to sub/pipe"}
    assert (kept / "folder").is_symlink()


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nobody change a folder that its owner may not write to, not even root."""
    for call in ("unlink", "rmdir"):
        real = getattr(os, call)

        def checked(path: Any, *args: Any, real: Any = real, **options: Any) -> None:
            if options.get("dir_fd") is None and not os.stat(os.path.dirname(path)).st_mode & stat.S_IWUSR:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
            real(path, *args, **options)

        monkeypatch.setattr(os, call, checked)


def test_folders_that_may_not_be_written_to_are_replaced_all_the_same(
    model: Path, old: Path, strict: None, way: str
) -> None:
    (model / "sub" / "deep").mkdir(parents=True)
    (model / "sub" / "deep" / "notes").touch()
    pack(model, old, force=True)
    before = names(old)
    for name in ("sub/deep", "sub", ""):
        (old / name).chmod(0o555)
    pack(model, old, force=True)
    assert names(old) == before
    assert stat.S_IMODE((old / "sub").stat().st_mode) & 0o700 == 0o700
    assert visible(old.parent) == ["model", "there"]


@pytest.mark.parametrize("name", ["none/x", "file/x", "link/x"])
def test_places_where_no_folder_can_be_are_refused(name: str, model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    for force in (False, True):
        with pytest.raises(InvalidDestination):
            pack(model, tmp_path / name, force=force)
    assert visible(tmp_path) == ["file", "link", "model"]


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("place", [".", "..", "../deep/.."])
def test_places_without_a_name_are_refused(
    place: str, force: bool, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here" / "deep").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here" / "deep")
    name = "deep" if place == "." else "here"
    with pytest.raises(InvalidDestination, match=f"has no name, .* from the folder above: `{name}`"):
        pack(model, place, force=force)
    assert visible(tmp_path) == ["here", "model"]


@pytest.mark.parametrize("force", [False, True])
def test_nothing_is_put_inside_a_packed_model(force: bool, model: Path, tmp_path: Path) -> None:
    packed, file, delta = tmp_path / "packed", tmp_path / "alone.safetensors", tmp_path / "delta"
    pack(model, packed)
    pack(model, tmp_path / "other")
    pack(model / "model.safetensors", file)
    (packed / "sub").mkdir()
    (tmp_path / "link").symlink_to(packed / "sub")
    diff(model, model, delta)
    diff(model / "model.safetensors", model / "model.safetensors", tmp_path / "of_file")
    before = names(packed)
    for call in (
        lambda place: pack(model, place, force=force),
        lambda place: pack(model / "model.safetensors", place, force=force),
        lambda place: unpack(tmp_path / "other", place, force=force),
        lambda place: unpack(file, place, force=force),
        lambda place: patch(model, delta, place, force=force),
        lambda place: patch(model / "model.safetensors", tmp_path / "of_file", place, force=force),
    ):
        for place in (
            packed / "new",
            packed / "sub" / "deep",
            packed / "config.json",
            tmp_path / "link" / "x",
        ):
            with pytest.raises(InvalidDestination, match=f"inside the packed model `{packed}`.* outside it"):
                call(place)
    assert names(packed) == before
    (packed / "sub").rmdir()
    pack(model, packed, force=True)  # the model itself is replaced
    (tmp_path / "link2").symlink_to(packed)
    pack(model, tmp_path / "link2", force=True)  # and a link that leads there, by a folder of its own
    assert names(packed) == before - {"sub"}
    assert not (tmp_path / "link2").is_symlink()


@pytest.mark.parametrize("what", ["success", "failure"])
def test_a_folder_that_was_locked_is_let_go(what: str, model: Path, old: Path) -> None:
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("no list of open files here")

    def fail(_: int) -> None:
        raise KeyboardInterrupt

    before = len(os.listdir("/proc/self/fd"))
    if what == "success":
        pack(model, old, force=True, threads=1)
    else:
        with pytest.raises(KeyboardInterrupt):
            pack(model, old, force=True, threads=1, progress=fail)
    assert len(os.listdir("/proc/self/fd")) == before


def test_force_replaces_files_and_links_but_no_devices(model: Path, tmp_path: Path, way: str) -> None:
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "file").touch()
    (tmp_path / "link").symlink_to("victim")
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "file"):
        pack(model, tmp_path / name, force=True)
        assert (tmp_path / name / "config.json").is_file()
        assert not (tmp_path / name).is_symlink()
    assert names(tmp_path / "victim") == {"file"}
    for source in (model, model / "model.safetensors"):
        for force in (False, True):
            with pytest.raises(InvalidDestination, match=r"pipe` is a pipe, which is never replaced"):
                pack(source, tmp_path / "pipe", force=force)
    assert visible(tmp_path) == ["file", "link", "model", "pipe", "victim"]


# ---- what interrupts

CALLS = {
    "sync": (os, "fsync"),
    "rename": (os, "rename"),
    "rename with flags": None,
    "link": (os, "link"),
    "unlink": (os, "unlink"),
    "remove a folder": (os, "rmdir"),
    "list": (os, "listdir"),
    "remove a tree": (shutil, "rmtree"),
}


def _interrupt(patch: pytest.MonkeyPatch, call: str, number: int, after: bool) -> Callable[[], bool]:
    """Raise Ctrl-C before or after one call of the system; tells whether it came to that."""
    place, calls = CALLS[call], 0
    real: Any = getattr(*place) if place else renames.present()

    def interrupted(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number and not after:
            raise KeyboardInterrupt
        result = real(*args, **options)
        if calls == number:
            raise KeyboardInterrupt
        return result

    if place:
        patch.setattr(*place, interrupted)
    else:
        patch.setattr(ctypes, "CDLL", renames.libraries(interrupted))
    return lambda: calls >= number


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_interrupts_leave_the_old_folder_or_the_new(
    call: str, after: bool, model: Path, old: Path, way: str
) -> None:
    for number in range(1, 40):
        with pytest.MonkeyPatch.context() as patch:
            happened = _interrupt(patch, call, number, after)
            with contextlib.suppress(KeyboardInterrupt):
                pack(model, old, force=True)
        text = (old / "config.json").read_text()
        assert names(old) == (OLD if text == '{"a": "old"}' else NEW)
        folder_swap.clear(old.parent)  # as the next run would
        assert visible(old.parent) == ["model", "there"]
        assert names(old) == (OLD if text == '{"a": "old"}' else NEW)
        if not happened():
            return
    pytest.fail("there are more calls than were tried")


@pytest.mark.parametrize("call", ["remove a tree", "unlink"])
def test_an_interrupt_while_the_old_folder_goes_lets_it_go_all_the_same(
    call: str, model: Path, old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has to wait for the next run."""
    happened = _interrupt(monkeypatch, call, 1, after=False)
    with pytest.raises(KeyboardInterrupt):
        pack(model, old, force=True)
    assert happened()
    assert names(old) == NEW
    assert visible(old.parent) == ["model", "there"]


KILLED = """
import ctypes, os, signal, sys
from support import renames
from tpde.files.operations import pack

number, flags = int(sys.argv[1]), sys.argv[2] == "exchange"
calls = 0

def killing(real):
    def call(*args, **options):
        global calls
        for _ in range(2):  # before it, and after
            calls += 1
            if calls == number:
                os.kill(os.getpid(), signal.SIGKILL)
            if _ == 0:
                result = real(*args, **options)
        return result
    return call

for name in ("rename", "fsync", "link", "unlink", "rmdir"):
    setattr(os, name, killing(getattr(os, name)))
if not flags:
    ctypes.CDLL = renames.libraries(None)
ctypes.CDLL = renames.libraries(killing(renames.present()))
pack(sys.argv[3], sys.argv[4], force=True)
print(calls)
"""


def _killed(number: int, way: str, model: Path, old: Path) -> int | None:
    """Pack in a process that is killed at one of the calls; how many there were if it came to its end."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(number), way, str(model), str(old)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
    )
    if done.returncode == 0:
        return int(done.stdout)
    assert done.returncode == -signal.SIGKILL, done.stderr
    return None


@pytest.mark.parametrize("number", [1, 5, 9, 13, 17, 21, 25, 29, 33, 37])
@pytest.mark.parametrize("kind", ["exchange", "renames"])
def test_kills_leave_the_old_folder_or_the_new(number: int, kind: str, model: Path, old: Path) -> None:
    ended = _killed(number, kind, model, old)
    if kind == "exchange" or ended is not None:
        assert names(old) in (OLD, NEW)  # complete before anything sets it right
    pack(model, model.with_name("other"))  # the next run sets it right
    text = (old / "config.json").read_text()
    assert names(old) == (OLD if text == '{"a": "old"}' else NEW)
    assert visible(old.parent) == ["model", "other", "there"]


# ---- temporary files


def test_what_killed_processes_left_is_removed(model: Path, tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\nfrom tpde.io.sinks import FileSink\n"
        "s = FileSink(sys.argv[1]); s.write(0, [b'1']); os.kill(os.getpid(), signal.SIGKILL)"
    )
    out = tmp_path / "out"
    out.mkdir()
    subprocess.run([sys.executable, "-c", code, str(out / "x")], check=False, timeout=100)
    (left,) = visible(out)
    assert left.startswith(".x.")
    pack(model / "model.safetensors", out / "y")
    assert visible(out) == ["y"]


JOURNALS: dict[str, Any] = {
    "nothing": None,
    "no JSON": "{",
    "no object": "[]",
    "half": '{"name": "there"',
    "no name": {"old": 1, "removable": {}},
    "no number": {"name": "there", "removable": {}},
    "no list": {"name": "there", "old": 1},
    "a number": {"name": 5, "old": 1, "removable": {}},
    "another folder": {"name": "../there", "old": 1, "removable": {}},
    "names that lead out": {"name": "there", "old": "new", "removable": {"../victim": "victim"}},
    "a path": {"name": "there", "old": "new", "removable": {"/victim": "victim"}},
}


@pytest.mark.parametrize("kind", JOURNALS)
def test_a_journal_from_a_stranger_removes_nothing(kind: str, tmp_path: Path) -> None:
    """What was only begun is removed; of what is not ours nothing is known."""
    out = tmp_path / "out"
    left = out / ".there.01234567.tpde-tmp"
    (left / "new").mkdir(parents=True)
    (left / "new" / "file").touch()
    (left / "victim").touch()
    (out / "there").mkdir()
    value = JOURNALS[kind]
    if isinstance(value, dict):
        info = (left / "victim").stat()
        victim = [info.st_ino, info.st_size, info.st_mtime_ns, stat.S_IFMT(info.st_mode)]
        value = dict(value)
        if value.get("old") == "new":
            value["old"] = (left / "new").stat().st_ino
            value["removable"] = dict.fromkeys(value["removable"], victim)
        value = json.dumps(value)
    if value is not None:
        (left / "journal").write_text(value)
    folder_swap.clear(out)
    if value is None:
        assert names(out) == {"there"}
    else:
        assert names(left) == {"new", "new/file", "victim", "journal"}
        assert (out / "there").is_dir()


def test_what_was_replaced_is_put_back_or_settled_by_the_next_run(tmp_path: Path) -> None:
    for there in (False, True):
        out = tmp_path / str(there)
        left = out / ".there.01234567.tpde-tmp"
        (left / "old").mkdir(parents=True)
        for name in ("model", "changed", "theirs"):
            (left / "old" / name).write_text(name)
        number = (left / "old").stat().st_ino
        identities = {}
        for name in ("model", "changed", "gone"):
            info = os.stat(left / "old" / (name if name != "gone" else "model"))
            identities[name] = [info.st_ino, info.st_size, info.st_mtime_ns, stat.S_IFREG]
        identities["changed"][1] += 1
        if there:
            (out / "there").mkdir()
        (left / "journal").write_text(json.dumps({"name": "there", "old": number, "removable": identities}))
        folder_swap.clear(out)
        assert visible(out) == ["there"]
        assert names(out / "there") == ({"changed", "theirs"} if there else {"changed", "model", "theirs"})


def test_what_others_are_writing_is_not_removed(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    other = FileSink(out / "x")
    other.write(0, [b"theirs"])
    names_of_others = [".x.tmp", ".tpde-tmp", "x.01234567.tpde-tmp", ".x.0123456g.tpde-tmp"]
    for name in names_of_others:
        (out / name).touch()
    (out / ".l.01234567.tpde-tmp").symlink_to(model)
    pack(model / "model.safetensors", out / "y")
    pack(model, out / "z")
    other.commit()
    assert (out / "x").read_bytes() == b"theirs"
    assert visible(out) == sorted([*names_of_others, ".l.01234567.tpde-tmp", "x", "y", "z"])


def test_a_temporary_name_fits(tmp_path: Path) -> None:
    for name in ("a" * 255, "é" * 127):
        found = temporary.temporary_name(tmp_path / name)
        assert len(os.fsencode(found.name)) <= 255
        FileSink(tmp_path / name).commit()
        assert (tmp_path / name).exists()


def test_whoever_cleans_up_in_between_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is created and then locked: one that is removed in between is created again."""
    made: list[Path] = []

    def make(path: Path) -> int:
        made.append(path)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        if len(made) == 1:
            temporary.clear_files(tmp_path)
        return descriptor

    path, descriptor = temporary.create(tmp_path / "x", make)
    os.close(descriptor)
    assert len(made) == 2
    assert visible(tmp_path) == [path.name] == [made[1].name]


# ---- two at a time


@pytest.mark.parametrize("what", ["file", "folder"])
@pytest.mark.parametrize("fallback", [False, True])
def test_two_packs_to_one_place_never_replace_each_other(
    what: str, fallback: bool, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second begins and ends after the first has looked for the last time."""
    source = model if what == "folder" else model / "model.safetensors"
    target, before = tmp_path / "out", []

    def second_first(old: Path, new: Path, swap: bool) -> None:
        if new == target and not before:
            before.append(0)
            pack(source, target)
            before[0] = target.stat().st_ino

    if fallback:
        renames.missing(monkeypatch)
    renames.watched(monkeypatch, second_first)
    with pytest.raises(DestinationExists):
        pack(source, target)
    assert target.stat().st_ino == before[0]
    assert visible(tmp_path) == ["model", "out"]


# ---- what fails


def test_a_close_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, failed = os.close, []

    writer = FileWriter(tmp_path / "x", {"w": SPEC}, threads=1)
    writer.write("w", fill("normal", SPEC))
    (written,) = (it.stat() for it in tmp_path.iterdir())

    def once(descriptor: int) -> None:
        first = not failed and os.path.samestat(os.fstat(descriptor), written)
        if first or descriptor in failed:
            failed.append(descriptor)
        real(descriptor)
        if first:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "close", once)
    with pytest.raises(OSError, match=r"closing the file failed: Input/output error.*x") as told:
        writer.close()
    assert told.value.errno == errno.EIO
    assert len(failed) == 1  # by then it may be another file's
    assert not list(tmp_path.iterdir())


def test_a_close_that_is_not_complete_leaves_nothing(tmp_path: Path) -> None:
    writer = FileWriter(tmp_path / "x", {"w": SPEC})
    with pytest.raises(ValueError, match="not complete"):
        writer.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("what", ["file", "folder"])
def test_an_interrupt_while_a_temporary_is_made_leaves_nothing(
    what: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = "open" if what == "file" else "mkdir"
    real = getattr(os, call)

    def interrupted(path: Any, *args: Any, **options: Any) -> Any:
        result = real(path, *args, **options)
        if ".tpde-tmp" in str(path):
            if what == "file":
                os.close(result)
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(os, call, interrupted)
    with pytest.raises(KeyboardInterrupt):
        pack(model if what == "folder" else model / "model.safetensors", tmp_path / "x")
    assert visible(tmp_path) == ["model"]


def test_everything_is_synced_before_the_old_folder_goes(
    model: Path, old: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (model / "sub").mkdir()
    (model / "sub" / "notes").write_text("notes")
    synced: set[int] = set()
    events: list[str] = []
    real_sync, real_unlink = os.fsync, os.unlink

    def fsync(descriptor: int) -> None:
        real_sync(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    def renamed(new: Path, there: Path, swap: bool) -> None:
        if there != old:
            return
        if not events:  # which finds that something is there
            missing = [it for it in (new, *new.rglob("*")) if it.stat().st_ino not in synced]
            assert not missing
            events.append("put")
        elif swap:  # from here on only the journal tells the old folder from the new
            assert {it.stat().st_ino for it in (new.parent / "journal", new.parent)} <= synced
            assert names(new) == NEW | {"sub", "sub/notes"}  # complete as soon as it is there
            carried = [new, *(new / name for name in (".cache", ".cache/deep", "logs"))]
            assert {it.stat().st_ino for it in carried} <= synced
            assert there.parent.stat().st_ino in synced
            events.append("exchange")
        else:
            return
        synced.clear()

    def unlink(path: Any, *args: Any, **options: Any) -> None:
        if Path(path).name == "config.json":  # the first that goes of the old model
            assert {old.parent.stat().st_ino, Path(path).parent.parent.stat().st_ino} <= synced
            events.append("settle")
        real_unlink(path, *args, **options)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "unlink", unlink)
    renames.watched(monkeypatch, renamed)
    pack(model, old, force=True)
    assert events == ["put", "exchange", "settle"]


def test_a_second_rename_that_fails_puts_the_old_folder_back(
    model: Path, old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renames.missing(monkeypatch)
    real, failed = os.rename, []

    def failing(here: Path, there: Path) -> None:
        if there == old and not there.exists() and not failed:
            failed.append(here)
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(here))
        real(here, there)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(OSError, match="Input/output error"):
        pack(model, old, force=True)
    assert failed
    assert names(old) == OLD
    assert visible(old.parent) == ["model", "there"]


def test_a_replaced_file_keeps_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "x"
    for mode, force in ((0o600, True), (0o640, True)):
        path.touch()
        path.chmod(mode)
        with FileWriter(path, {"w": SPEC}, force=force) as writer:
            writer.write("w", fill("normal", SPEC))
        assert stat.S_IMODE(path.stat().st_mode) == mode
