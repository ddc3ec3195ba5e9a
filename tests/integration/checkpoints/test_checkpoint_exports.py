"""Steps of checkpoint stores become safetensors files and JSON."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from support.training import equal, filled

from tpde import CheckpointStore
from tpde.errors import DestinationExists, InvalidDestination, TpdeError

torch = pytest.importorskip("torch", reason="checkpoints hold PyTorch's tensors")


def test_an_export_is_what_others_read(run: dict[int, Any], tmp_path: Path) -> None:
    from safetensors.torch import load_file

    store = filled(tmp_path / "store", run)
    out = tmp_path / "out"
    store.export(4, out)
    assert sorted(it.name for it in out.iterdir()) == [
        "model.safetensors",
        "optimizer.safetensors",
        "rng.safetensors",
        "state.json",
    ]
    model = load_file(out / "model.safetensors")
    assert equal({name: model[name] for name in run[4]["model"]}, dict(run[4]["model"]))
    exp_avg = load_file(out / "optimizer.safetensors")["state/0/exp_avg"]
    assert equal(exp_avg, run[4]["optimizer"]["state"][0]["exp_avg"])
    rest = json.loads((out / "state.json").read_text())
    assert rest["step"] == 4
    assert rest["state"]["rng"]["torch"] == ["tensor", ["rng.safetensors", "torch"]]
    with pytest.raises(DestinationExists):
        store.export(4, out)
    store.export(5, out, force=True)
    assert json.loads((out / "state.json").read_text())["step"] == 5
    (out / "mine").write_text("mine")
    with pytest.raises(TpdeError):
        store.export(6, out, force=True)
    assert json.loads((out / "state.json").read_text())["step"] == 5


@pytest.mark.parametrize(
    ("state", "files"),
    [
        ([torch.ones(2)], {"state.safetensors": ["0"]}),
        (torch.ones(2), {"state.safetensors": ["tensor"]}),
        (
            {"a/b": torch.ones(1), ".c": torch.ones(1)},
            {"part-0.safetensors": ["tensor"], "part-1.safetensors": ["tensor"]},
        ),
        ({1: torch.ones(1), "1": {"x": torch.ones(2)}}, {"1.safetensors": ["tensor", "x"]}),
        (
            {"part-1": torch.ones(1), "/": torch.ones(1), "part-0": torch.ones(1)},
            {f"part-{i}.safetensors": ["tensor"] for i in (0, 1, 2)},
        ),
        (
            {"/": torch.ones(1), "part-0": torch.ones(1)},
            {f"part-{i}.safetensors": ["tensor"] for i in (0, 1)},
        ),
        ({"a": {"__metadata__": torch.ones(1)}}, {"a.safetensors": ["__metadata__'0"]}),
        ({"a": 1}, {}),
    ],
)
def test_exports_of_odd_states(tmp_path: Path, state: Any, files: dict[str, list[str]]) -> None:
    from safetensors import safe_open

    with CheckpointStore(tmp_path / "store") as store:
        store.save(1, state)
        store.export(1, tmp_path / "out")
    found = {}
    for path in (tmp_path / "out").glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found[path.name] = sorted(file.keys())
    assert found == files


def test_an_export_replaces_one_that_had_more_parts(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with CheckpointStore(tmp_path / "store") as store:
        store.save(1, {"a": torch.ones(1), "b": {1: [torch.ones(2)], "tensor": ["mine"]}, "/": torch.ones(3)})
        store.save(2, {"a": torch.ones(1), "c": torch.zeros(2)})
        store.save(3, {"x": 1})
        for step, files in ((1, {"a", "b", "part-0"}), (2, {"a", "c"}), (3, set()), (2, {"a", "c"})):
            store.export(step, out, force=True)
            assert {it.name for it in out.iterdir()} == {f"{it}.safetensors" for it in files} | {"state.json"}
        (out / "mine.safetensors").write_text("mine")
        with pytest.raises(InvalidDestination, match=r"mine\.safetensors`, which is no file of this"):
            store.export(3, out, force=True)
        os.rename(out / "mine.safetensors", out / "b.safetensors")  # whose name step 1 needs
        with pytest.raises(InvalidDestination, match=r"b\.safetensors`, which is no file of this"):
            store.export(1, out, force=True)
    assert json.loads((out / "state.json").read_text())["step"] == 2
    assert (out / "b.safetensors").read_text() == "mine"


@pytest.mark.parametrize(
    "name", ["../notes.safetensors", "mine", "in/x.safetensors", ".safetensors/..", 3, None]
)
def test_an_export_removes_nothing_that_no_export_writes(tmp_path: Path, name: object) -> None:
    (out := tmp_path / "out").mkdir()
    (out / "in").mkdir()
    places = (tmp_path / "notes.safetensors", out / "mine", out / "in" / "x.safetensors")
    for place in places:
        place.write_text("mine")
    (out / "state.json").write_text(json.dumps({"step": 1, "state": {"a": ["tensor", [name, "a"]]}}))
    with CheckpointStore(tmp_path / "store") as store:
        store.save(1, {"x": 1})
        with pytest.raises(InvalidDestination):
            store.export(1, out, force=True)
    assert {it.read_text() for it in places} == {"mine"}


@pytest.mark.parametrize("rest", [None, "{}", "no JSON", '{"step": 1}'])
def test_an_export_replaces_only_what_one_wrote(tmp_path: Path, rest: str | None) -> None:
    (out := tmp_path / "out").mkdir()
    (out / "model.safetensors").write_text("theirs")
    if rest is not None:
        (out / "state.json").write_text(rest)
    (tmp_path / "notes.txt").write_text("theirs")
    (tmp_path / "link").symlink_to("out")
    with CheckpointStore(tmp_path / "store") as store:
        store.save(1, {"model": {"w": torch.ones(1)}})
        for force in (False, True):
            with pytest.raises(
                InvalidDestination, match=r"model\.safetensors`, .* no `state.json` of an exp"
            ):
                store.export(1, out, force=force)
            with pytest.raises(InvalidDestination, match="txt` is a file, which is never replaced"):
                store.export(1, tmp_path / "notes.txt", force=force)
        store.export(1, tmp_path / "link", force=True)
    assert (out / "model.safetensors").read_text() == (tmp_path / "notes.txt").read_text() == "theirs"
    assert not (tmp_path / "link").is_symlink()


def test_a_full_disk_is_told_of_the_json_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    with CheckpointStore(tmp_path / "store") as store:
        store.save(1, {"model": {"w": torch.ones(1)}})
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match=r"failed at byte 0: No space .*; nothing was left.*out/state\.json"):
        store.export(1, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("key", ["a/b", "m"])
def test_names_that_are_taken_as_others_would_be(key: str, tmp_path: Path) -> None:
    """Two ways to a tensor have one name, and the first name instead of it is a third tensor's."""
    one, two, three = (torch.full((2,), float(it)) for it in (1, 2, 3))
    inner: dict[str, Any] = {"a/b": one, "a/b'2": two, "a": {"b": three}}
    state = inner if key == "a/b" else {"first": three.clone(), "m": inner}
    store = CheckpointStore(tmp_path / "store")
    store.save(1, state)
    assert equal(store.load(1), state)
    store.export(1, tmp_path / "out")
    rest = json.loads((tmp_path / "out" / "state.json").read_text())["state"]
    assert len({json.dumps(it) for it in _places(rest)}) == len(_places(rest)) == (3 if inner is state else 4)


def _places(rest: Any) -> list[Any]:
    """Where an export's tensors are."""
    if isinstance(rest, list) and rest[:1] == ["tensor"]:
        return [rest]
    parts = rest.values() if isinstance(rest, dict) else rest if isinstance(rest, list) else ()
    return [place for part in parts for place in _places(part)]
