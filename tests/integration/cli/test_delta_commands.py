"""diff, patch, and verify and inspect of deltas: what they print, write and refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cli import Run
from support.contents import fill, spec_of
from support.files import safetensors_bytes
from support.states import content, files, folders

SPEC = spec_of("BF16", 900)


@pytest.mark.parametrize("make", [files, folders], ids=["file", "directory"])
def test_there_and_back(run: Run, tmp_path: Path, make) -> None:
    base, target = make(tmp_path)
    made = run("diff", base, target, tmp_path / "delta")
    assert made.code == 0, made.err
    assert "ratio" in made.out
    assert "sparse" in made.out
    done = run("patch", base, tmp_path / "delta", tmp_path / "out")
    assert done.code == 0, done.err
    assert "restored" in done.out
    assert content(tmp_path / "out") == content(target)
    for more in ((), ("--base", base)):
        checked = run("verify", tmp_path / "delta", *more)
        assert checked.code == 0, checked.err
        assert checked.out.startswith("intact")


def test_json(run: Run, tmp_path: Path) -> None:
    base, target = files(tmp_path)
    made = json.loads(run("diff", base, target, tmp_path / "delta", "--fast", "--json").out)
    assert made["base"] == base.name
    assert made["file_bytes"] == (tmp_path / "delta").stat().st_size
    assert {it["codec"] for it in made["tensors"]} == {"same", "sparse", "dense", "full", "plain"}
    seen = json.loads(run("inspect", tmp_path / "delta", "--json").out)
    assert seen == {key: value for key, value in made.items() if key != "seconds"}
    assert json.loads(run("verify", tmp_path / "delta", "--json").out)["ok"] is True
    done = json.loads(run("patch", base, tmp_path / "delta", tmp_path / "out", "--json").out)
    assert done["target_bytes"] == made["target_bytes"]


def test_inspect_shows_what_changed(run: Run, tmp_path: Path) -> None:
    base, target = folders(tmp_path)
    run("diff", base, target, tmp_path / "delta")
    lines = run("inspect", tmp_path / "delta").out.splitlines()
    (weight,) = [line.split() for line in lines if line.startswith("layers.0.weight ")]
    assert weight[1:5] == ["model-1.safetensors", "sparse", "BF16", "70000"]
    assert 0.3 < float(weight[-2]) < 0.7
    (norm,) = [line.split() for line in lines if line.startswith("layers.0.norm ")]
    assert norm[2] == "same"
    assert norm[-2:] == ["0.000", "%"]
    assert any(line.split() == ["config.json", "same"] for line in lines)
    assert lines[-1].endswith("its base was at `base`")


def test_where_a_base_was_cannot_steer_the_terminal(run: Run, tmp_path: Path) -> None:
    base, target = files(tmp_path)
    base = base.rename(tmp_path / "a\x1b[31m\nb")
    run("diff", base, target, tmp_path / "delta")
    shown = run("inspect", tmp_path / "delta").out
    assert shown.endswith("its base was at `a\\x1b[31m\\nb`\n")


def test_damage_is_shown_by_tensor(run: Run, tmp_path: Path) -> None:
    base, target = files(tmp_path)
    run("diff", base, target, tmp_path / "delta")
    data = bytearray((tmp_path / "delta").read_bytes())
    data[64 + 100] ^= 1
    (tmp_path / "delta").write_bytes(data)
    found = run("verify", tmp_path / "delta")
    assert found.code == 1
    assert "tensor `layers.0.weight`" in found.out
    run("patch", base, tmp_path / "delta", tmp_path / "out").failed(3, "layers.0.weight", "fetch it again")
    assert not (tmp_path / "out").exists()


def test_what_is_refused(run: Run, tmp_path: Path) -> None:
    base, target = files(tmp_path)
    run("diff", base, target, tmp_path / "delta")
    run("patch", target, tmp_path / "delta", tmp_path / "out").failed(2, "tensor `", "name the base")
    run("patch", base, base, tmp_path / "out").failed(2, "is no delta", "tpde diff")
    for command in ("pack", "unpack"):
        run(command, tmp_path / "delta", tmp_path / "out").failed(
            2, "delta` is a delta, not a safetensors file", f"`tpde patch BASE {tmp_path / 'delta'} TARGET`"
        )
    run("diff", base, target, tmp_path / "delta").failed(2, "exists already", "--force")
    run("diff", base, tmp_path / "nothing", tmp_path / "other").failed(2, "does not exist", "check the path")
    run("verify", tmp_path / "delta", "--against", target).failed(2, "is a delta", "--base")
    run("verify", base, "--base", target).failed(2, "is no delta", "--against")
    run("verify", tmp_path / "none", "--base", target).failed(2, "none` does not exist", "check the path")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "model.safetensors").write_bytes(base.read_bytes())
    run("diff", base, base, tmp_path / "same")  # which takes the header, too, from the base
    run("verify", tmp_path / "same", "--base", tmp_path / "folder").failed(
        2, "same` was made from a file, the base `.*folder` is a directory", "name the base"
    )
    run("inspect", tmp_path / "delta", "--plot", tmp_path / "x.png").failed(2, "no plot", "leave out")


def test_models_that_share_no_name_are_refused(run: Run, tmp_path: Path) -> None:
    """As where the names of one have a prefix."""
    made = []
    for prefix, files_too in (("", False), ("model.", False), ("", True), ("model.", True)):
        content = safetensors_bytes({f"{prefix}{it}": (SPEC, fill("normal", SPEC)) for it in "ab"})
        path = tmp_path / f"{prefix}{files_too}"
        if files_too:
            path.mkdir()
            (path / "model.safetensors").write_bytes(content)
        else:
            path.write_bytes(content)
        made.append(path)
    for base, target in (made[:2], made[2:]):
        run("diff", base, target, tmp_path / "delta").failed(
            2,
            "share no tensor's name: the one has `a`, the other `model.a`, of 2 and 2",
            "states of one model",
        )
        assert not (tmp_path / "delta").exists()
    one = tmp_path / "one"
    one.write_bytes(safetensors_bytes({"a": (SPEC, fill("normal", SPEC)), "c": (SPEC, fill("normal", SPEC))}))
    assert run("diff", made[0], one, tmp_path / "delta").code == 0  # one name is enough
    one.write_bytes(safetensors_bytes({}))
    for base, target in ((made[0], one), (one, made[0])):  # and none, of what has none
        assert run("diff", base, target, tmp_path / "delta", "--force").code == 0
        assert run("patch", base, tmp_path / "delta", tmp_path / "back", "--force").code == 0
        assert (tmp_path / "back").read_bytes() == target.read_bytes()


def test_a_tensor_larger_than_memory_is_named(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one of terabytes of the same word, which a packed file of a few bytes may hold."""
    base, target = files(tmp_path)
    allocate = np.empty

    def empty(shape: Any, dtype: Any = float) -> Any:
        if shape == 70_000 * 2:
            raise MemoryError("Unable to allocate")
        return allocate(shape, dtype)

    monkeypatch.setattr(np, "empty", empty)
    run("diff", base, target, tmp_path / "delta").failed(
        4,
        "tensor `layers.0.weight` of .* has 140000 bytes, too many for memory",
        "more memory",
    )
    assert not (tmp_path / "delta").exists()
