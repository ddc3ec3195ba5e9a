"""Exit codes and messages: damage, and input that cannot be."""

from __future__ import annotations

import json
import os
import pickle
import re
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from support.cli import Run, damage, weights
from support.folders import names

from tpde.cli import common


def test_verify_names_tensor_and_chunk(run: Run, packed: Path) -> None:
    damage(packed)
    done = run("verify", packed)
    assert (done.code, done.err) == (1, "")
    first, last = done.out.splitlines()
    assert first.startswith(f"{packed}: tensor `layers.0.weight`, chunk 2: ")
    assert last == "1 problem found"


@pytest.mark.parametrize("name", ["a\x1b[2Jb", "a\nintact, 0.01 s", "a\r\x08b"])
def test_verify_names_what_is_damaged_in_one_line(name: str, run: Run, tmp_path: Path) -> None:
    """Whatever files and tensors are called: what is printed is for terminals and scripts."""
    source = tmp_path / "source"
    safetensors.torch.save_file({name: weights()["layers.0.weight"]}, source)
    packed = tmp_path / f"{name}.safetensors"
    assert run("pack", source, packed).code == 0
    damage(packed, name)
    done = run("verify", packed)
    assert (done.code, done.err) == (1, "")
    first, last = done.out.splitlines()
    assert first.isprintable()
    assert "`, chunk 2: " in first
    assert last == "1 problem found"


def test_verify_against_another_source(run: Run, packed: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    tensors = weights()
    tensors["layers.1.bias"][3] = 7
    safetensors.torch.save_file(tensors, other, metadata={"format": "pt"})
    done = run("verify", packed, "--against", other)
    assert done.code == 1
    assert "tensor `layers.1.bias`: byte 24 is 0x03, but 0x07 in the source" in done.out
    assert done.err.startswith(
        f"hint: compare with what `{packed}` was packed from, or leave out `--against`"
    )
    assert run("verify", packed, "--against", other, "--json").err == ""


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def with_header(path: Path, header: dict[str, Any], data: bytes) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def test_not_safetensors(run: Run, tmp_path: Path) -> None:
    source, target = tmp_path / "s.safetensors", tmp_path / "p"
    source.write_text("This is a text, and a long one.")
    run("pack", source, target).failed(
        2,
        "s.safetensors` is not a safetensors file: its first 8 bytes, b'This is ', ",
        "`tpde` packs safetensors",
    )
    source.write_bytes(struct.pack("<Q", 16) + b"neither is this.")
    run("pack", source, target).failed(2, "header is not JSON", "safetensors files, state dicts")
    assert not target.exists()


@pytest.mark.parametrize("size", [0, 7, 8, 100, -1])
def test_truncated(run: Run, plain: Path, packed: Path, tmp_path: Path, size: int) -> None:
    for path, command in ((plain, "pack"), (packed, "unpack"), (packed, "inspect"), (packed, "verify")):
        short = tmp_path / "short.safetensors"
        short.write_bytes(path.read_bytes()[:size])
        targets = [tmp_path / "t"] if command in ("pack", "unpack") else []
        run(command, short, *targets).failed(3, "`.*short.safetensors` ", "incomplete, fetch the rest")
        assert not (tmp_path / "t").exists()


def test_bytes_at_the_end(run: Run, plain: Path, tmp_path: Path) -> None:
    plain.write_bytes(plain.read_bytes() + b"x")
    run("pack", plain, tmp_path / "t").failed(3, "its header describes only", "fetch it again")


def test_unpack_refuses_damage(run: Run, packed: Path, tmp_path: Path) -> None:
    damage(packed)
    before = names(tmp_path)
    run("unpack", packed, tmp_path / "t").failed(
        3, f"`{packed}`: tensor `layers.0.weight`, chunk 2: ", "fetch the file again"
    )
    assert names(tmp_path) == before


def test_already_packed(run: Run, packed: Path, model: Path, tmp_path: Path) -> None:
    plain = f"{packed.stem}-plain{packed.suffix}"
    run("pack", packed, tmp_path / "t").failed(2, "is packed already", f"`tpde unpack {packed} {plain}`, or")
    assert run("pack", model, tmp_path / "d").code == 0
    for command in (f"`tpde unpack {tmp_path / 'd'} d-plain`", f"`tpde inspect {tmp_path / 'd'}`"):
        run("pack", tmp_path / "d", tmp_path / "t").failed(2, "is packed already", command)


def test_not_packed(run: Run, plain: Path, model: Path, tmp_path: Path) -> None:
    run("unpack", plain, tmp_path / "t").failed(2, "is not packed", "use it as it is")
    run("verify", plain).failed(2, "is not packed", "pack it with")
    run("unpack", model, tmp_path / "t").failed(2, "not a packed model directory", "pack it with")


def test_unknown_version(run: Run, packed: Path, tmp_path: Path) -> None:
    header, data = header_of(packed)
    header["__metadata__"]["tpde"] = "7"
    newer = with_header(tmp_path / "n.safetensors", header, data)
    for args in (["unpack", newer, tmp_path / "t"], ["verify", newer], ["inspect", newer]):
        run(*args).failed(2, "has format version 7; this tpde reads version 1", "upgrade tpde")


def test_unknown_dtype(run: Run, plain: Path, tmp_path: Path) -> None:
    header, data = header_of(plain)
    header["layers.0.weight"]["dtype"] = "BF17"
    source = with_header(tmp_path / "s.safetensors", header, data)
    run("pack", source, tmp_path / "t").failed(2, "`layers.0.weight` has dtype `BF17`", "upgrade tpde")


def test_a_long_name_is_no_work(run: Run, plain: Path, tmp_path: Path) -> None:
    header, data = header_of(plain)
    header["`; `; " * 13_000] = {**header.pop("layers.0.weight"), "dtype": "BF17"}
    source = with_header(tmp_path / "s.safetensors", header, data)
    began = time.process_time()
    run("pack", source, tmp_path / "t").failed(2, "`; `; ` has dtype `BF17`", "upgrade tpde")
    assert (
        time.process_time() - began < 2
    )  # of the processor; 21 where the text was split by a regular expression


def test_what_is_no_safetensors_file_has_a_hint(run: Run, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"\xff" * 100)
    for command in ("verify", "inspect"):
        run(command, other).failed(2, "is not a safetensors file", "name a safetensors file")


def test_missing_shard(run: Run, model: Path, tmp_path: Path) -> None:
    (model / "model-00002-of-00002.safetensors").unlink()
    run("pack", model, tmp_path / "t").failed(
        2, "names the shard `model-00002-of-00002.safetensors`, which is missing", "fetch it: all shards"
    )
    assert not (tmp_path / "t").exists()


def test_directory_without_weights(run: Run, tmp_path: Path) -> None:
    for args in (["pack", tmp_path, tmp_path.parent / "t"], ["inspect", tmp_path]):
        run(*args).failed(2, r"has no `\*.safetensors` file", ".")


class _Code:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, ("executed",)


def test_pickle_with_code_is_not_run(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"a": torch.zeros(3), "b": _Code()}, "model.pt")
    run("pack", "model.pt", "t").failed(2, "code from files is never run", "convert it to safetensors")
    assert names(tmp_path) == {"model.pt"}
    (tmp_path / "raw.bin").write_bytes(pickle.dumps({"a": 1}, protocol=2))
    assert run("pack", "raw.bin", "t").code == 2
    assert names(tmp_path) == {"model.pt", "raw.bin"}


def test_another_dtype_in_the_source(run: Run, packed: Path, plain: Path, tmp_path: Path) -> None:
    header, data = header_of(plain)
    header["layers.0.weight"]["dtype"] = "F16"
    other = with_header(tmp_path / "other.safetensors", header, data)
    done = run("verify", packed, "--against", other)
    assert done.code == 1
    assert re.search(r"tensor `layers.0.weight` is BF16 \[.*\], but F16 \[.*\] in the source", done.out)


def test_compare_like_with_like(run: Run, packed: Path, model: Path, tmp_path: Path) -> None:
    run("verify", packed, "--against", model).failed(
        2, "is a file, .* is a directory", "compare like with like"
    )


def test_control_characters_do_not_reach_the_terminal(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common.say("note", "a\x1b[2J\x07\x9b1m\rb")
    assert capsys.readouterr().err == "note: a\\x1b[2J\\x07\\x9b1m\\rb\n"
    for name in ("x\x1b[2J.safetensors", "x\nhint: fine.pt", "x\r\x08"):
        found = run("pack", tmp_path / name, tmp_path / "out")
        found.failed(common.USAGE, "does not exist", "check the path")
        assert all(line.isprintable() for line in found.err.splitlines())
