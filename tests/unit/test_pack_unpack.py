"""What `pack` and `unpack` promise of single files: what they return, and what they refuse."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from support import spoilt

import tpde
from tpde.codec.selection import CodecName
from tpde.errors import (
    AlreadyPacked,
    DestinationExists,
    InvalidArgument,
    InvalidDestination,
    InvalidInput,
    NotPacked,
    UnsupportedVersion,
)
from tpde.files.operations import total_bytes
from tpde.store.verify_delta import verify_delta

CALLS = {"pack": (tpde.pack, spoilt.PLAIN), "unpack": (tpde.unpack, spoilt.PACKED)}


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """Give a folder with a plain file, and the same packed."""
    (tmp_path / "plain").write_bytes(spoilt.PLAIN)
    (tmp_path / "packed").write_bytes(spoilt.PACKED)
    return tmp_path


@pytest.mark.parametrize("kind", ["plain", "state.bin", "packed"])
def test_a_source_may_be_removed_while_it_is_read(kind: str, there: Path) -> None:
    if kind.endswith(".bin"):
        torch = pytest.importorskip("torch", reason="reads state dicts")
        torch.save({"w": torch.arange(5000.0)}, there / kind)
    size = (there / kind).stat().st_size
    done = (tpde.unpack if kind == "packed" else tpde.pack)(
        there / kind, there / "out", progress=lambda _: (there / kind).unlink(missing_ok=True)
    )
    assert not (there / kind).exists()
    assert (done.source_bytes, done.destination_bytes) == (size, (there / "out").stat().st_size)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_source_that_changes_while_it_is_packed(replaced: bool, there: Path) -> None:
    """A file with some tensors of before and some of after is none; one that is replaced stays whole."""
    source, out, other = there / "plain", there / "out", there / "other"

    def change(_: int) -> None:
        if not replaced:
            source.write_bytes(spoilt.PLAIN)
            os.utime(source, ns=(5, 5))
        else:
            other.write_bytes(b"another")
            other.replace(source)

    if replaced:
        tpde.pack(source, out, progress=change)
        tpde.unpack(out, there / "back")
        assert (there / "back").read_bytes() == spoilt.PLAIN
    else:
        with pytest.raises(InvalidInput, match="plain` changed while it was read"):
            tpde.pack(source, out, progress=change)
        assert sorted(it.name for it in there.iterdir()) == ["packed", "plain"]


def test_summaries_say_what_was_done(there: Path) -> None:
    sizes = len(spoilt.PLAIN), len(spoilt.PACKED)
    packed = tpde.pack(there / "plain", there / "one")
    unpacked = tpde.unpack(there / "one", there / "two")
    assert (there / "two").read_bytes() == spoilt.PLAIN
    assert (packed.source, packed.destination) == (str(there / "plain"), str(there / "one"))
    assert (unpacked.source, unpacked.destination) == (str(there / "one"), str(there / "two"))
    assert (packed.source_bytes, packed.destination_bytes) == sizes
    assert (unpacked.source_bytes, unpacked.destination_bytes) == sizes[::-1]
    for summary in (packed, unpacked):
        assert (summary.tensors, summary.packed) == (2, 1)
        assert summary.ratio == sizes[0] / sizes[1]
        assert summary.left_out == ()
        (file,) = summary.files
        assert (file.source_bytes, file.destination_bytes) == (
            summary.source_bytes,
            summary.destination_bytes,
        )
        assert (file.tensors, file.packed) == (2, 1)


@pytest.mark.parametrize("name", CALLS)
def test_progress_counts_the_bytes_of_the_original(name: str, there: Path) -> None:
    call, whole = CALLS[name]
    (there / "source").write_bytes(whole)
    done: list[int] = []
    call(there / "source", there / "target", progress=done.append)
    assert sum(done) == spoilt.SPEC.nbytes + spoilt.SMALL.nbytes


@pytest.mark.parametrize("way", spoilt.PACKED_WAYS)
@pytest.mark.parametrize("name", CALLS)
def test_sources_that_cannot_be_read_are_refused_and_nothing_is_left(
    name: str, way: str, tmp_path: Path
) -> None:
    call, whole = CALLS[name]
    if name == "pack" and way not in spoilt.WAYS:
        pytest.skip("a plain file has neither version nor hashes")
    error = spoilt.write(tmp_path / "source", way, whole)
    before = list(tmp_path.iterdir())
    with pytest.raises(error):
        call(tmp_path / "source", tmp_path / "target")
    assert list(tmp_path.iterdir()) == before


def test_each_takes_only_what_the_other_makes(there: Path) -> None:
    before = sorted(there.iterdir())
    with pytest.raises(AlreadyPacked):
        tpde.pack(there / "packed", there / "target")
    for source in (there / "plain", there):
        with pytest.raises(NotPacked):
            tpde.unpack(source, there / "target")
    spoilt.write(there / "packed", "newer")
    with pytest.raises(UnsupportedVersion):
        tpde.pack(there / "packed", there / "target")
    assert sorted(there.iterdir()) == before


@pytest.mark.parametrize("name", CALLS)
def test_destinations_are_refused_before_anything_is_written(name: str, there: Path) -> None:
    call, whole = CALLS[name]
    (there / "source").write_bytes(whole)
    (there / "link").symlink_to("source")
    (there / "taken").write_bytes(b"theirs")
    (there / "folder").mkdir()
    before = sorted(there.rglob("*"))
    with pytest.raises(DestinationExists, match="taken"):
        call(there / "source", there / "taken")
    for force in (False, True):
        for target in ("source", "link", "folder", "none/target", "taken/target"):
            with pytest.raises(InvalidDestination):
                call(there / "source", there / target, force=force)
    assert sorted(there.rglob("*")) == before
    assert (there / "taken").read_bytes() == b"theirs"
    assert (there / "source").read_bytes() == whole
    call(there / "source", there / "taken", force=True)
    assert (there / "taken").read_bytes() == (spoilt.PACKED if name == "pack" else spoilt.PLAIN)


@pytest.mark.parametrize("name", CALLS)
def test_threads_do_not_change_a_byte(name: str, there: Path) -> None:
    call, whole = CALLS[name]
    (there / "source").write_bytes(whole)
    for threads in (1, 3, None):
        call(there / "source", there / f"target{threads}", threads=threads)
    made = {(there / f"target{threads}").read_bytes() for threads in (1, 3, None)}
    assert made == {spoilt.PACKED if name == "pack" else spoilt.PLAIN}


@pytest.mark.parametrize(
    "call",
    [
        lambda **it: tpde.pack("source", "target", **it),
        lambda **it: tpde.unpack("source", "target", **it),
        lambda **it: tpde.verify("source", **it),
        lambda **it: tpde.diff("source", "target", "delta", **it),
        lambda **it: tpde.patch("source", "delta", "target", **it),
        lambda **it: verify_delta("delta", **it),
        lambda **it: tpde.make_delta({}, {}, **it),
        lambda **it: tpde.apply_delta({}, b"", **it),
        lambda **it: tpde.CheckpointStore("source").verify(**it),
    ],
    ids=["pack", "unpack", "verify", "diff", "patch", "verify_delta", "make_delta", "apply_delta", "store"],
)
def test_progress_that_cannot_be_called_is_refused_first(call: Callable[..., object]) -> None:
    with pytest.raises(InvalidArgument, match="`progress` is a int, which cannot be called; pass a func"):
        call(progress=5)


@pytest.mark.parametrize("name", CALLS)
def test_what_is_asked_for_is_checked_before_a_source_is_read(name: str, tmp_path: Path) -> None:
    call, _ = CALLS[name]
    for it in ("source", "taken"):
        (tmp_path / it).write_bytes(b"no weights")
    with pytest.raises(DestinationExists):
        call(tmp_path / "source", tmp_path / "taken")
    for threads in (0, -1, True):
        with pytest.raises(ValueError, match="at least 1 is needed"):
            call(tmp_path / "source", tmp_path / "taken", threads=threads)
    with pytest.raises(ValueError, match="at least 1 is needed"):
        tpde.verify(tmp_path / "source", threads=0)


@pytest.mark.parametrize("name", CALLS)
def test_what_killed_processes_left_beside_a_destination_is_removed(name: str, there: Path) -> None:
    call, whole = CALLS[name]
    (there / "source").write_bytes(whole)
    (there / "folder").mkdir()
    for left in (there / "folder", there):
        (left / ".x.01234567.tpde-tmp").write_bytes(b"half")
    call(there / "source", there / "folder" / "target")
    assert [it.name for it in (there / "folder").iterdir()] == ["target"]
    assert (there / ".x.01234567.tpde-tmp").exists()


def test_bytes_of_a_progress_bar_are_those_that_pack(there: Path) -> None:
    assert total_bytes(there / "plain") == len(spoilt.PLAIN)
    assert total_bytes(there / "nothing") == 0
    model = there / "model"
    (model / "sub").mkdir(parents=True)
    (model / "config.json").write_text("{}")
    for name in ("a.safetensors", "sub/b.safetensors"):
        (model / name).write_bytes(spoilt.PLAIN)
    assert total_bytes(model) == 2 * len(spoilt.PLAIN)
    assert total_bytes(model, ["sub"]) == len(spoilt.PLAIN)


@pytest.mark.parametrize("saved_again", [False, True])
def test_progress_of_directories_counts_the_bytes_of_the_original(saved_again: bool, there: Path) -> None:
    model, packed = there / "model", there / "model packed"
    model.mkdir()
    (model / "config.json").write_text("{}")
    for name in ("a.safetensors", "b.safetensors"):
        (model / name).write_bytes(spoilt.PLAIN)
    done: list[int] = []
    tpde.pack(model, packed, progress=done.append)
    if saved_again:
        (packed / "tpde_manifest.json").unlink()
    calls = [
        lambda: tpde.unpack(packed, there / "back", progress=done.append),
        lambda: tpde.unpack(packed, there / "back", force=True, progress=done.append),
        lambda: tpde.verify(packed, progress=done.append),
    ]
    for call in calls:
        assert sum(done) == 2 * (spoilt.SPEC.nbytes + spoilt.SMALL.nbytes)
        done.clear()
        call()
    assert sum(done) == 2 * (spoilt.SPEC.nbytes + spoilt.SMALL.nbytes)


@pytest.mark.parametrize("codec", ["auto", "prefix", "zstd"])
@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_codec_is_the_one_that_was_asked_for(codec: CodecName, what: str, there: Path) -> None:
    (there / "model").mkdir()
    (there / "model" / "x.safetensors").write_bytes(spoilt.PLAIN)
    source = there / "plain" if what == "file" else there / "model"
    tpde.pack(source, there / "target", codec=codec)
    found = {it.codec for it in tpde.inspect(there / "target").tensors}
    assert found == {"zstd" if codec == "zstd" else "prefix", "plain"}


@pytest.mark.parametrize("name", CALLS)
def test_permissions_are_those_of_the_source(name: str, there: Path) -> None:
    call, whole = CALLS[name]
    (there / "source").write_bytes(whole)
    for mode, made in ((0o600, 0o600), (0o751, 0o751), (0o200, 0o600)):
        (there / "source").chmod(mode)
        try:
            (there / "source").read_bytes()
        except PermissionError:  # of whom nobody is root
            continue
        call(there / "source", there / "target", force=True)
        assert stat.S_IMODE((there / "target").stat().st_mode) == made


def test_a_source_that_is_no_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for source in (tmp_path / "folder", tmp_path / "nothing"):
        for call in (tpde.pack, tpde.unpack):
            with pytest.raises(InvalidInput):
                call(source, tmp_path / "target")
    assert [it.name for it in tmp_path.iterdir()] == ["folder"]


class _Model:
    def state_dict(self) -> dict[str, object]:
        return {}


@pytest.mark.parametrize(
    ("source", "remedy"),
    [
        (_Model(), r"in memory, `tpde.pack_module\(model\)` packs it"),
        ({"weight": 1}, r"in memory, `tpde.torch.save_file\(tensors, filename\)` packs it"),
        (5, "pass a path"),
    ],
)
def test_what_is_no_path_is_told_what_packs_it(source: object, remedy: str, tmp_path: Path) -> None:
    for more in ((), (tmp_path / "target",)):
        with pytest.raises(InvalidArgument, match=f"takes the path of a file or a directory.*{remedy}"):
            tpde.pack(source, *more)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_a_destination_must_be_named(there: Path) -> None:
    with pytest.raises(InvalidArgument, match="was not told where the packed `"):
        tpde.pack(there / "plain")


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".ckpt"])
def test_nothing_is_restored_under_the_name_of_a_pickle(suffix: str, there: Path) -> None:
    target = there / f"restored{suffix}"
    with pytest.raises(InvalidDestination, match=r"is a safetensors file; .*restored.safetensors"):
        tpde.unpack(there / "packed", target)
    assert not target.exists()
