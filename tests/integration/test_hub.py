"""What is no path may be the id of a model on the hub; messages say what to do. No network here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.contents import fill, spec_of
from support.files import safetensors_bytes

from tpde.errors import InvalidInput, MissingDependency
from tpde.files.inputs import resolve
from tpde.files.operations import pack, unpack, verify

SPEC = spec_of("BF16", 2_000)


@pytest.mark.parametrize(
    "name",
    ["nothing", "a/b/c", "/a/b", "a/", "/b", "org/x.safetensors", "org/x.bin", "../x/y", "./x", "~/x"],
)
def test_what_cannot_be_an_id_is_a_path_that_is_not_there(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="does not exist; check the path"):
        pack(name, tmp_path / "out")


def test_without_the_hub_package_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingDependency, match=r'`org/model`.*pip install "tpde\[hub\]"'):
        pack("org/model", tmp_path / "out")


def test_an_id_is_downloaded_and_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    snapshot, asked = tmp_path / "snapshot", []
    snapshot.mkdir()
    (snapshot / "blob").write_bytes(safetensors_bytes({"w": (SPEC, fill("normal", SPEC))}))
    (snapshot / "model.safetensors").symlink_to("blob")  # as the hub's cache has it

    def download(name: str) -> str:
        asked.append(name)
        return str(snapshot)

    monkeypatch.setattr(hub, "snapshot_download", download)
    assert pack("org/model", tmp_path / "packed").packed == 1
    assert asked == ["org/model"]
    unpack(tmp_path / "packed", tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (snapshot / "blob").read_bytes()


@pytest.mark.parametrize("kind", ["LocalEntryNotFoundError", "HFValidationError", "OSError"])
def test_a_download_that_fails_says_why(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    error = OSError if kind == "OSError" else getattr(hub.errors, kind)

    def download(_: str) -> str:
        raise error("no such model\nmore lines")

    monkeypatch.setattr(hub, "snapshot_download", download)
    with pytest.raises(InvalidInput, match=r"neither a path here nor .* no such model; check the name"):
        resolve("org/model")


def test_paths_win_over_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "model").mkdir(parents=True)
    assert resolve("org/model") == Path("org/model")


@pytest.mark.parametrize("action", [verify, lambda path: unpack(path, "out")])
def test_only_packing_downloads(action, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub, "snapshot_download", lambda _: pytest.fail("a download"))
    with pytest.raises(InvalidInput, match="check the path"):
        action("org/model")
