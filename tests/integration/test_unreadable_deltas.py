"""States and deltas that cannot be read: nothing is left behind, and every file is closed."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
from support import spoilt
from support.delta_files import OLD, file_delta, makers, weight_folder
from support.files import safetensors_bytes
from support.states import files

from tpde.errors import Corrupt, InvalidDestination, InvalidInput, Truncated, UnsupportedVersion
from tpde.io.sources import FileSource
from tpde.store.delta_file import is_delta_file
from tpde.store.delta_report import inspect_delta
from tpde.store.diffing import diff
from tpde.store.patching import patch
from tpde.store.verify_delta import verify_delta


def test_what_is_no_delta_is_refused(tmp_path: Path) -> None:
    base, _ = files(tmp_path)
    for path in (base, tmp_path, tmp_path / "nothing"):
        for call in (inspect_delta, verify_delta, lambda it: patch(base, it, tmp_path / "out")):
            with pytest.raises(InvalidInput):
                call(path)


@pytest.mark.parametrize("way", spoilt.PACKED_WAYS)
def test_states_that_cannot_be_read_are_refused_and_nothing_is_left(way: str, tmp_path: Path) -> None:
    base, target = file_delta(tmp_path)
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
    base, target = file_delta(tmp_path)
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
    base, _ = file_delta(tmp_path)
    delta, out = tmp_path / "delta", tmp_path / "out"
    (tmp_path / "wrong").write_bytes(_in_the_head(delta.read_bytes()))
    (tmp_path / "text").write_bytes(b"no weights at all, and no delta")
    (tmp_path / "other").write_bytes(safetensors_bytes({"x": (spoilt.SMALL, bytes(9))}))
    folder = weight_folder(tmp_path / "folder", {"1.safetensors": {"w": OLD}})
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
