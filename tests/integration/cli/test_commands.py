"""Every command on small files, for people and as JSON."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from support.backends import MadeBackend
from support.cli import Outcome, Run, damage, weights
from support.folders import names
from support.states import content

import tpde
from tpde import errors
from tpde.cli import common
from tpde.cuda.capability import DeviceFacts
from tpde.errors import ReadError, UnsupportedDevice


def test_pack_verify_unpack_a_file(run: Run, plain: Path, tmp_path: Path) -> None:
    packed, back = tmp_path / "p.safetensors", tmp_path / "b.safetensors"
    done = run("pack", plain, packed, "--threads", 2)
    assert (done.code, done.err) == (0, "")
    assert re.fullmatch(
        r"\S+ KiB packed into \S+ KiB: ratio 1\.\d{4}, 2 of 4 tensors packed, \S+ s \(.*/s\)\n", done.out
    )
    assert packed.stat().st_size < plain.stat().st_size
    done = run("verify", packed, "--against", plain)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("intact and equal to its source, ")
    done = run("unpack", packed, back)
    assert (done.code, done.err) == (0, "")
    assert "4 tensors checked" in done.out
    assert back.read_bytes() == plain.read_bytes()


def test_pack_and_unpack_a_directory(run: Run, model: Path, tmp_path: Path) -> None:
    packed, back = tmp_path / "p", tmp_path / "b"
    assert run("pack", model, packed).code == 0
    assert run("verify", packed, "--against", model).code == 0
    assert run("unpack", packed, back).code == 0
    assert names(back) == names(model)
    for name in names(model):
        assert (back / name).read_bytes() == (model / name).read_bytes()


def test_force_replaces(run: Run, plain: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("old")
    assert run("pack", plain, target).code == 2
    assert target.read_text() == "old"
    assert run("pack", plain, target, "--force").code == 0
    assert run("verify", target).code == 0


@pytest.mark.parametrize(("codec", "found"), [("prefix", {"plain", "prefix"}), ("zstd", {"plain", "zstd"})])
def test_codec_choice(run: Run, tmp_path: Path, codec: str, found: set[str]) -> None:
    source, target = tmp_path / "s.safetensors", tmp_path / "p.safetensors"
    tensors = weights() | {"counter": torch.arange(4096, dtype=torch.int32)}
    safetensors.torch.save_file(tensors, source)
    assert run("pack", source, target, "--codec", codec).code == 0
    report = json.loads(run("inspect", target, "--json").out)
    assert {t["codec"] for t in report["tensors"]} == found


def test_dtype_report(run: Run, plain: Path, tmp_path: Path) -> None:
    lines = run("pack", plain, tmp_path / "p", "--dtype-report").out.splitlines()
    assert lines[1].split() == ["dtype", "tensors", "bytes", "packed", "bytes", "ratio"]
    rows = {line.split()[0]: line.split()[1:] for line in lines[2:]}
    assert set(rows) == {"BF16", "F16", "I64", "F32"}
    assert rows["BF16"][:2] == ["1", "76800"]
    assert int(rows["BF16"][2]) < 76800
    assert rows["I64"] == ["1", "40", "40", "1.0000"]


def test_what_does_not_shrink_is_noted(run: Run, tmp_path: Path) -> None:
    for name, tensors, note in (
        ("small", {"a": torch.zeros(3)}, "no tensor would shrink; all are stored as they were"),
        ("empty", {}, "there is no tensor"),
    ):
        safetensors.torch.save_file(tensors, tmp_path / name)
        done = run("pack", tmp_path / name, tmp_path / f"{name} packed")
        assert (done.code, done.err) == (0, f"note: {note}\n")


def test_state_dict(run: Run, tmp_path: Path) -> None:
    source, back = tmp_path / "model.bin", tmp_path / "b.safetensors"
    torch.save(weights(), source)
    assert run("pack", source, tmp_path / "p").code == 0
    assert run("unpack", tmp_path / "p", back).code == 0
    loaded = safetensors.torch.load_file(back)
    for name, tensor in weights().items():
        # Bits, as bytes: equality of floats proves nothing.
        assert bytes(loaded[name].reshape(-1).view(torch.uint8)) == bytes(
            tensor.reshape(-1).view(torch.uint8)
        )


def test_inspect_prints_a_table(run: Run, packed: Path) -> None:
    done = run("inspect", packed)
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[0].split() == (
        ["tensor", "codec", "dtype", "shape", "bytes", "stored", "ratio", "bits/weight", "entropy"]
    )
    rows = {line.split()[0]: line.split()[1:] for line in lines[1:5]}
    assert rows["layers.0.weight"][:4] == ["prefix", "BF16", "300x128", "76800"]
    assert rows["layers.1.bias"] == ["plain", "I64", "5", "40", "40", "1.0000", "64.000", "0.000"]
    assert rows["empty"][-2:] == ["-", "-"]
    assert lines[-1].startswith("4 tensors in 1 file of ")


def test_inspect_names_files_of_a_directory(run: Run, model: Path) -> None:
    done = run("inspect", model)
    assert done.out.split()[1] == "file"
    assert done.out.count("model-00002-of-00002.safetensors") == 4
    assert "8 tensors in 2 files" in done.out


def test_inspect_plot(run: Run, packed: Path, tmp_path: Path) -> None:
    png = tmp_path / "x.png"
    done = run("inspect", packed, "--plot", png)
    assert (done.code, done.err) == (0, f"note: drawn into `{png}`\n")
    assert png.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_a_plot_replaces_no_weights(run: Run, plain: Path, packed: Path, model: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    (tmp_path / "link.png").symlink_to(plain)
    os.link(plain, tmp_path / "hard.png")
    assert run("pack", model, tmp_path / "folder").code == 0
    shard = "model-00001-of-00002.safetensors"
    before = content(tmp_path)
    for source, name in (
        *((it, it.name) for it in (plain, packed)),
        *((plain, it) for it in ("link.png", "hard.png")),
        *((it, f"{it.name}/{shard}") for it in (model, tmp_path / "folder")),
    ):
        run("inspect", source, "--plot", tmp_path / name).failed(2, "sources?.* never modified", "choose")
    run("inspect", plain, "--plot", packed).failed(2, "is no PNG file", "choose another file")
    run("inspect", tmp_path / "folder", "--plot", tmp_path / "folder" / "x.png").failed(
        2, "inside the packed model", "outside it"
    )
    assert content(tmp_path) == before


def test_bench_codec(run: Run) -> None:
    done = run("bench", "codec", "--size", "1MiB", "--threads", 1)
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[0].startswith("1.0 MiB a tensor, 1 thread")
    starts = [line.split()[0] for line in lines[3:8]]
    assert starts == ["bf16", "fp16", "fp32", "E4M3", "bf16"]
    assert re.fullmatch(r"memory copy: [\d.]+ GB/s", lines[-1])


def test_doctor(run: Run) -> None:
    done = run("doctor")
    assert (done.code, done.err) == (0, "")
    for part in ("tpde", "Python", "core", "SIMD", "numpy", "torch", "self test, portable"):
        assert re.search(rf"^{part} +ok ", done.out, re.MULTILINE), part
    assert done.out.endswith("all essential parts work\n")


def test_doctor_asks_for_the_gpu(run: Run, launch_on: Any) -> None:
    launch_on(MadeBackend(facts=DeviceFacts("NVIDIA H200", (9, 0), 132, 1)))
    found = "NVIDIA H200, compute capability 9.0, driver for CUDA 13.0"
    assert re.search(rf"^GPU +ok +{found} +running models on it$", run("doctor").out, re.M)

    refusal = UnsupportedDevice("no NVIDIA driver is installed", hint="install one, or use the CPU")
    launch_on(MadeBackend(facts=refusal))
    done = run("doctor")
    assert done.code == 0
    assert re.search(r"^GPU +missing +no NVIDIA driver is installed +running models on it$", done.out, re.M)


def test_doctor_finds_a_broken_core(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from tpde.codec import prefix_codes

    monkeypatch.setattr(
        prefix_codes.PrefixCodec, "decode", lambda self, index, first, data, at, end, out, threads=1: None
    )
    done = run("doctor")
    assert done.code == 1
    assert re.search(r"^self test, portable +broken +tensor `bf16` came back .* pip install", done.out, re.M)
    assert done.out.endswith("an essential part is broken\n")


@pytest.mark.parametrize(
    ("package", "needed_for", "command", "code"),
    [
        ("matplotlib", "tpde inspect --plot", r'pip install "tpde\[plot\]"', 0),
        ("xxhash", "everything", "pip install --force-reinstall tpde", 1),
    ],
)
def test_doctor_names_what_is_missing(
    package: str, needed_for: str, command: str, code: int, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = importlib.metadata.version

    def without(name: str) -> str:
        return version("no-such-package" if name == package else name)

    monkeypatch.setattr(importlib.metadata, "version", without)
    done = run("doctor")
    assert done.code == code
    assert re.search(rf"^{package} +missing +- +{needed_for} +{command}$", done.out, re.M)


def test_version(run: Run) -> None:
    assert run("--version").out == f"tpde {tpde.__version__}\n"


def test_help_lists_exit_codes_and_examples(run: Run) -> None:
    text = run("--help").out
    for code in (0, 1, 2, 3, 4, 130):
        assert re.search(rf"^ +{code} +\S", text, re.MULTILINE)
    for command in (["pack"], ["unpack"], ["verify"], ["inspect"], ["bench", "codec"], ["doctor"]):
        done = run(*command, "--help")
        assert done.code == 0
        assert re.search(rf"^    tpde {' '.join(command)}", done.out, re.MULTILINE), done.out


# ---- JSON


def test_json_of_pack_and_unpack(run: Run, plain: Path, tmp_path: Path) -> None:
    packed, back = tmp_path / "p", tmp_path / "b"
    done = run("pack", plain, packed, "--json", "--dtype-report")
    found = json.loads(done.out)
    assert (found["source"], found["destination"]) == (str(plain), str(packed))
    assert found["destination_bytes"] == packed.stat().st_size
    assert found["ratio"] == plain.stat().st_size / packed.stat().st_size
    assert (found["tensors"], found["packed"], len(found["files"])) == (4, 2, 1)
    assert {g["name"] for g in found["by_dtype"]} == {"BF16", "F16", "I64", "F32"}
    found = json.loads(run("unpack", packed, back, "--json").out)
    assert found["destination_bytes"] == plain.stat().st_size


def test_json_of_verify(run: Run, packed: Path) -> None:
    found = json.loads(run("verify", packed, "--json").out)
    assert (found["ok"], found["problems"], found["against"]) == (True, [], None)
    damage(packed)
    done = run("verify", packed, "--json")
    assert done.code == 1
    found = json.loads(done.out)
    assert not found["ok"]
    (problem,) = found["problems"]
    assert (problem["tensor"], problem["chunk"], problem["file"]) == ("layers.0.weight", 2, str(packed))


def test_json_of_inspect_bench_and_doctor(run: Run, packed: Path) -> None:
    report = json.loads(run("inspect", packed, "--json").out)
    assert report["packed"]
    assert [t["name"] for t in report["tensors"]][:2] == ["layers.0.weight", "layers.1.bias"]
    assert sum(next(h for h in report["histogram"] if h["dtype"] == "BF16")["counts"]) == 300 * 128
    bench = json.loads(run("bench", "codec", "--size", "1MiB", "--json").out)
    assert [r["dtype"] for r in bench["results"]] == ["BF16", "F16", "F32", "F8_E4M3", "F32"]
    assert all(r["ratio"] > 1.1 and r["decode_gb_per_s"] > 0 for r in bench["results"])
    checks = json.loads(run("doctor", "--json").out)
    assert checks["ok"]
    assert {c["status"] for c in checks["checks"] if c["required"]} == {"ok"}


# ---- what commands share


def test_hints_are_those_of_the_error_or_of_its_class(capsys: pytest.CaptureFixture[str]) -> None:
    for error, message, hint in (
        (errors.Corrupt("a; b", hint="do c; and d"), "a; b", "do c; and d"),
        (errors.Corrupt("tensor `x; y` is bad"), "tensor `x; y` is bad", "fetch the file again"),
        (OSError(errno.ENOSPC, "No space; none left", "f"), "`f`: No space; none left", "make room, or .*"),
    ):
        code = common.fail(error)
        Outcome(code, *capsys.readouterr()).failed(code, re.escape(message), hint)
    assert common.fail(OSError(errno.EIO, "it failed; yes", "f")) == 4
    assert capsys.readouterr() == ("", "error: `f`: it failed; yes\n")


def test_sizes_and_tables() -> None:
    assert [common.size(n) for n in (0, 1023, 1024, 1 << 20, 3 << 39)] == (
        ["0 B", "1023 B", "1.0 KiB", "1.0 MiB", "1.5 TiB"]
    )
    assert common.table(("a", "b"), [("x\ny", "1"), ("z", "22")]) == "a      b\nx\\ny   1\nz     22"


def test_synthetic_e4m3_is_rounded_to_nearest() -> None:
    from tpde.cli import bench

    (words,) = [w for name, _, w in bench.tensors(1 << 20) if name == "E4M3"]
    ml_dtypes = pytest.importorskip("ml_dtypes")
    random = np.random.default_rng(1)
    array = random.standard_normal((8, 4096), np.float32)
    array *= 448 / np.abs(array).max(axis=1, keepdims=True)
    ours = bench.e4m3(array.copy()).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    theirs = array.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert np.mean(ours != theirs) < 0.01  # ties, and what halves round first
    assert not np.isnan(words.view(ml_dtypes.float8_e4m3fn).astype(np.float32)).any()


def test_a_failed_disk_is_no_mistake_of_use() -> None:
    assert common.exit_code(ReadError("the disk failed")) == common.IO_ERROR
