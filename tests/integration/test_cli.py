"""The command line: every command, exit code and message, on small files."""

from __future__ import annotations

import errno
import json
import os
import pickle
import pty
import re
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import tpde
from tpde.cli import common, doctor, main
from tpde.errors import UnsupportedDevice

Run = Callable[..., "Outcome"]


class Outcome:
    """What a command printed, and its exit code."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    def failed(self, code: int, error: str, hint: str) -> None:
        """Check that it ended with one `error:` line and one `hint:` line, and printed no data."""
        assert self.code == code, self.err
        lines = self.err.splitlines()
        assert len(lines) == 2, self.err
        assert re.fullmatch(f"error: .*{error}.*", lines[0]), lines[0]
        assert re.fullmatch(f"hint: .*{hint}.*", lines[1]), lines[1]
        assert self.out == ""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Run the command line in this process."""
    before = signal.getsignal(signal.SIGTERM)

    def call(*args: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["tpde", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            main()
        return Outcome(int(ended.value.code or 0), *capsys.readouterr())

    yield call
    signal.signal(signal.SIGTERM, before)


def process(*args: object, code: str | None = None, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own, or code that calls it."""
    how = ["-c", code] if code is not None else ["-m", "tpde"]
    kwargs = {"capture_output": True} | kwargs
    return subprocess.run(
        [sys.executable, *how, *map(str, args)], text=True, timeout=120, check=False, **kwargs
    )


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """Give a small model: BF16 and F16 that shrink, and what stays plain."""
    random = torch.Generator().manual_seed(seed)
    return {
        "layers.0.weight": (0.02 * torch.randn(300, 128, generator=random)).bfloat16(),
        "layers.1.weight": (0.02 * torch.randn(200, 128, generator=random)).half(),
        "layers.1.bias": torch.arange(5, dtype=torch.int64),
        "empty": torch.empty(0, 4),
    }


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A safetensors file."""
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file(weights(), path, metadata={"format": "pt"})
    return path


@pytest.fixture
def packed(tmp_path: Path, plain: Path) -> Path:
    """Give the same file packed."""
    path = tmp_path / "packed.safetensors"
    tpde.pack(plain, path)
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model directory of two shards."""
    folder = tmp_path / "model"
    folder.mkdir()
    index: dict[str, str] = {}
    for i in range(2):
        name = f"model-{i + 1:05}-of-00002.safetensors"
        tensors = {f"{i}.{k}": v for k, v in weights(i).items()}
        safetensors.torch.save_file(tensors, folder / name)
        index |= dict.fromkeys(tensors, name)
    text = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)
    (folder / "config.json").write_text('{"model_type": "test"}')
    return folder


def names(folder: Path) -> set[str]:
    """Give everything below a folder."""
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*")}


# ---- commands


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
    source = tmp_path / "s.safetensors"
    safetensors.torch.save_file({"a": torch.zeros(3)}, source)
    done = run("pack", source, tmp_path / "p")
    assert (done.code, done.err) == (0, "note: no tensor would shrink; all are stored as they were\n")


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


def test_bench_codec(run: Run) -> None:
    done = run("bench", "codec", "--size", 1, "--threads", 1)
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


def test_doctor_asks_for_the_gpu(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from tpde.cuda import device

    facts = device.DeviceFacts("NVIDIA H200", (9, 0), 132, 1, 1)
    monkeypatch.setattr(device, "facts", lambda number: facts)
    monkeypatch.setattr(device, "driver_version", lambda: (13, 0))
    found = "NVIDIA H200, compute capability 9.0, driver for CUDA 13.0"
    assert re.search(rf"^GPU +ok +{found} +running models on it$", run("doctor").out, re.M)

    def refuse(number: int) -> device.DeviceFacts:
        raise UnsupportedDevice("no NVIDIA driver is installed; install one, or use the CPU")

    monkeypatch.setattr(device, "facts", refuse)
    done = run("doctor")
    assert done.code == 0
    assert re.search(r"^GPU +missing +no NVIDIA driver is installed +running models on it$", done.out, re.M)


def test_doctor_finds_a_broken_core(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from tpde.codec import native

    monkeypatch.setattr(
        native.Codec, "decode", lambda self, index, first, data, at, end, out, threads=1: None
    )
    done = run("doctor")
    assert done.code == 1
    assert re.search(r"^self test, portable +broken +tensor `bf16` came back .* pip install", done.out, re.M)
    assert done.out.endswith("an essential part is broken\n")


def test_doctor_names_what_is_missing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_PACKAGES", (("no_such_package", "a test", "pip install no_such_package"),))
    done = run("doctor")
    assert done.code == 0  # nothing essential
    assert re.search(r"^no_such_package +missing +- +a test +pip install no_such_package$", done.out, re.M)
    monkeypatch.setattr(doctor, "_REQUIRED", ("no_such_package",))
    assert run("doctor").code == 1


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
    bench = json.loads(run("bench", "codec", "--size", 1, "--json").out)
    assert [r["dtype"] for r in bench["results"]] == ["BF16", "F16", "F32", "F8_E4M3", "F32"]
    assert all(r["ratio"] > 1.1 and r["decode_gb_per_s"] > 0 for r in bench["results"])
    checks = json.loads(run("doctor", "--json").out)
    assert checks["ok"]
    assert {c["status"] for c in checks["checks"] if c["required"]} == {"ok"}


# ---- exit code 1: damage


def damage(packed: Path) -> None:
    """Flip a bit in the last chunk that holds weights, of three in `layers.0.weight`."""
    data = bytearray(packed.read_bytes())
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    start = 8 + int.from_bytes(data[:8], "little") + header["layers.0.weight_tpde"]["data_offsets"][0]
    shape_end = start + 128 + 16 + 8 + 8  # format.md 2: header, shape, planes, padding
    (tables,) = struct.unpack_from("<I", data, start + 104)
    (offset,) = struct.unpack_from("<I", data, shape_end + tables + 12 * 2)
    data[start + offset * 16 + 40] ^= 1
    packed.write_bytes(data)


def test_verify_names_tensor_and_chunk(run: Run, packed: Path) -> None:
    damage(packed)
    done = run("verify", packed)
    assert (done.code, done.err) == (1, "")
    first, last = done.out.splitlines()
    assert first.startswith(f"{packed}: tensor `layers.0.weight`, chunk 2: ")
    assert last == "1 problem found"


def test_verify_against_another_source(run: Run, packed: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    tensors = weights()
    tensors["layers.1.bias"][3] = 7
    safetensors.torch.save_file(tensors, other, metadata={"format": "pt"})
    done = run("verify", packed, "--against", other)
    assert done.code == 1
    assert "tensor `layers.1.bias`: byte 24 is 0x03, but 0x07 in the source" in done.out


# ---- exit codes 2 and 3: messages


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
        2, "s.safetensors` is not a safetensors file: its first 8 bytes", "`tpde` packs safetensors"
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
    run("pack", packed, tmp_path / "t").failed(2, "is packed already", "`tpde unpack`")
    assert run("pack", model, tmp_path / "d").code == 0
    run("pack", tmp_path / "d", tmp_path / "t").failed(2, "is packed already", "`tpde unpack`|unpack it")


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


def test_missing_source(run: Run, tmp_path: Path) -> None:
    gone = tmp_path / "gone.safetensors"
    for args in (["pack", gone, "t"], ["unpack", gone, "t"], ["verify", gone], ["inspect", gone]):
        run(*args).failed(2, "gone.safetensors` does not exist", "check the path")


def test_unreadable_source(run: Run, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opener = os.open

    def refuse(path: Any, *args: Any, **kwargs: Any) -> int:  # root may read everything
        if os.fspath(path) == str(plain):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return opener(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    run("pack", plain, tmp_path / "t").failed(2, "may not be read by this user", "change its permissions")


def test_permissions_of_other_files(
    run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied", os.fspath(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)  # of `config.json` and the index
    run("pack", model, tmp_path / "t").failed(
        2, "(config|index).json`: Permission denied", "change its permissions"
    )


def test_a_pipe_is_refused_at_once(run: Run, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    for command in ("verify", "inspect"):
        run(command, tmp_path / "pipe.safetensors").failed(2, "is not a regular file", "name one")


def test_what_is_no_safetensors_file_has_a_hint(run: Run, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"\xff" * 100)
    for command in ("verify", "inspect"):
        run(command, other).failed(2, "is not a safetensors file", "name a safetensors file")


@pytest.mark.parametrize("command", [("run", "--embed", "x"), ("plan", "--vram", "1GiB")])
@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_running_without_its_packages(tmp_path: Path, package: str, command: tuple[str, ...]) -> None:
    code = (
        f"import sys; sys.modules['{package}'] = None; sys.argv = {['tpde', command[0], 'm', *command[1:]]}; "
        "from tpde.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(
        rf"error: running models needs {package}.*\nhint: run `pip install \"tpde\[transformers\]\"`\n",
        done.stderr,
    )


def test_hub_id_without_the_hub(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    run("pack", "org/no-such-model", tmp_path / "t").failed(
        2, "is no path here", r'pip install "tpde\[hub\]"'
    )


def test_plot_without_matplotlib(run: Run, plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    run("inspect", plain, "--plot", "x.png").failed(2, "needs matplotlib", r'pip install "tpde\[plot\]"')


def test_destinations_that_cannot_be(run: Run, plain: Path, model: Path, tmp_path: Path) -> None:
    cases: list[tuple[list[object], str, str]] = [
        (["pack", plain, model], "exists already", "`--force`"),
        (["pack", plain, plain, "--force"], "is the source itself", "choose another"),
        (["pack", plain, tmp_path / "no" / "t"], "cannot be written", "create the folder first"),
        (["pack", plain, plain / "t"], "cannot be written: Not a directory", "choose another"),
        (["pack", plain, "/proc/t"], "`/proc/t` cannot be written", "."),
        (["pack", model, model / "t"], "lies inside the source", "outside it"),
        (["pack", model, plain / "t"], "cannot be written: Not a directory", "choose another"),
        (["inspect", plain, "--plot", "/proc/x.png"], "`/proc/x.png` cannot be written", "choose another"),
    ]
    before = names(tmp_path)
    for args, error, hint in cases:
        run(*args).failed(2, error, hint)
    assert names(tmp_path) == before


def test_read_only_folder(run: Run, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opener = os.open

    def refuse(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_CREAT:
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return opener(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    run("pack", plain, tmp_path / "t").failed(
        2, "cannot be written: Permission denied", "change its permissions"
    )


def test_missing_shard(run: Run, model: Path, tmp_path: Path) -> None:
    (model / "model-00002-of-00002.safetensors").unlink()
    run("pack", model, tmp_path / "t").failed(
        2, "names the shard `model-00002-of-00002.safetensors`, which is missing", "2 shards are needed"
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


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (["no-such-command"], "No such command"),
        (["pack"], "Missing argument"),
        (["pack", "a", "b", "--threads", "0"], "--threads"),
        (["pack", "a", "b", "--codec", "lz4"], "lz4"),
        (["verify", "a", "--no-such-option"], "--no-such-option"),
    ],
)
def test_usage(run: Run, args: list[str], error: str) -> None:
    run(*args).failed(2, error, "--help` shows what there is")


@pytest.mark.parametrize("args", [[], ["bench"]])
def test_no_arguments_show_help(run: Run, args: list[str]) -> None:
    done = run(*args)
    assert "Commands:" in done.out + done.err
    assert done.code in (0, 2)  # by the version of click


# ---- exit code 4: input and output


@pytest.mark.parametrize("source", ["plain", "model"])
def test_full_disk(
    run: Run, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(source)
    before = names(tmp_path)

    def full(fd: int, buffers: Any, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwritev", full)
    run("pack", path, tmp_path / "t").failed(4, "t.*No space left on device", "make room")
    assert names(tmp_path) == before


def test_file_size_limit(plain: Path, tmp_path: Path) -> None:
    code = (
        "import resource as r; from tpde.cli import main; r.setrlimit(r.RLIMIT_FSIZE, (20000, 20000)); main()"
    )
    before = names(tmp_path)
    done = process("pack", plain, tmp_path / "t", code=code)
    Outcome(done.returncode, done.stdout, done.stderr).failed(4, "File too large", "nothing was left behind")
    assert names(tmp_path) == before


# ---- signals

INTERRUPT = """
import os, signal, sys
from tpde.format.sink import FileSink
write, calls = FileSink.write, 0

def interrupted(self, offset, buffers):
    global calls
    write(self, offset, buffers)
    calls += 1
    if calls == 2:
        os.kill(os.getpid(), {signal})

FileSink.write = interrupted
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
from tpde.cli import main
main()
"""


@pytest.mark.parametrize("command", ["pack", "unpack"])
@pytest.mark.parametrize("what", ["file", "directory"])
def test_interrupt_leaves_nothing(command: str, what: str, plain: Path, model: Path, tmp_path: Path) -> None:
    source = plain if what == "file" else model
    if command == "unpack":
        tpde.pack(source, tmp_path / "packed")
        source = tmp_path / "packed"
    before = names(tmp_path)
    done = process(command, source, tmp_path / "t", code=INTERRUPT.format(signal="signal.SIGINT"))
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "interrupted; no half-written file is left\n"
    assert names(tmp_path) == before


def test_termination_leaves_nothing(plain: Path, tmp_path: Path) -> None:
    before = names(tmp_path)
    done = process("pack", plain, tmp_path / "t", code=INTERRUPT.format(signal="signal.SIGTERM"))
    assert done.returncode == 128 + signal.SIGTERM
    assert names(tmp_path) == before


# ---- streams


def terminal(*args: object, **env: str) -> tuple[int, str, str]:
    """Run with a terminal as stderr: exit code, stdout, and what the terminal got."""
    ours, theirs = pty.openpty()
    clean = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    done = process(
        *args,
        env=clean | {"TERM": "xterm"} | env,
        stdout=subprocess.PIPE,
        stderr=theirs,
        capture_output=False,
    )
    os.close(theirs)
    got = b""
    try:
        while part := os.read(ours, 4096):
            got += part
    except OSError:  # Linux gives EIO at the end
        pass
    os.close(ours)
    return done.returncode, done.stdout, got.decode()


def test_progress_only_on_a_terminal(plain: Path, tmp_path: Path) -> None:
    code, out, err = terminal("pack", plain, tmp_path / "a")
    assert (code, out.count("\n")) == (0, 1)
    assert "packing" in err
    assert "MB/s" in err or "kB/s" in err or "?" in err
    assert "packing" not in out
    done = process("pack", plain, tmp_path / "b")
    assert (done.returncode, done.stderr) == (0, "")


def test_colour(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    assert terminal("pack", gone, "t")[2].startswith("\x1b[1;31merror:\x1b[0m `")
    for env in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        err = terminal("pack", gone, "t", **env)[2]
        assert err.startswith("error: `")
        assert "\x1b" not in err
    assert "\x1b" not in process("pack", gone, "t").stderr


def test_bar_without_colour(plain: Path, tmp_path: Path) -> None:
    colours = re.compile("\x1b\\[[0-9;]*3[0-9][0-9;]*m")
    assert colours.search(terminal("pack", plain, tmp_path / "a")[2])
    err = terminal("pack", plain, tmp_path / "b", NO_COLOR="1")[2]
    assert "packing" in err
    assert not colours.search(err)
    assert terminal("pack", plain, tmp_path / "c", TERM="dumb")[2] == ""


def test_reader_that_goes_away(packed: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = process("inspect", packed, stdout=writer, stderr=subprocess.PIPE, capture_output=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_names_cannot_steer_the_terminal(run: Run, tmp_path: Path) -> None:
    source = tmp_path / "s.safetensors"
    safetensors.torch.save_file({"a\x1b[2Jb": torch.zeros(3)}, source)
    done = run("inspect", source)
    assert done.code == 0
    assert "a\\x1b[2Jb" in done.out
    assert "\x1b" not in done.out


def test_names_that_the_locale_cannot_write(tmp_path: Path) -> None:
    source = tmp_path / "s.safetensors"
    safetensors.torch.save_file({"größe": torch.zeros(3)}, source)
    done = process("inspect", source, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, "")
    assert "gr\\xf6\\xdfe" in done.stdout


# ---- imports and completion


def imported(*args: object) -> set[str]:
    """Run a command; which of the heavy packages did it import?"""
    heavy = {"numpy", "torch", "matplotlib", "safetensors", "huggingface_hub", "zstandard"}
    code = (
        "import sys, contextlib, io\nfrom tpde.cli import main\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n    main()\n"
        f"print(*sorted({heavy!r} & set(sys.modules)))"
    )
    done = process(*args, code=code)
    assert done.stderr == ""
    return set(done.stdout.split())


def test_help_imports_nothing_heavy() -> None:
    assert imported("--help") == set()
    assert imported("pack", "--help") == set()


def test_no_command_imports_torch(plain: Path, packed: Path, tmp_path: Path) -> None:
    for args in (
        ["pack", plain, tmp_path / "p"],
        ["unpack", packed, tmp_path / "u"],
        ["verify", packed],
        ["inspect", packed],
        ["doctor"],
        ["bench", "codec", "--size", "1", "--threads", "1"],
    ):
        found = imported(*args)
        assert "numpy" in found  # the command ran
        assert "torch" not in found, args


def test_completion() -> None:
    env = os.environ | {"_TPDE_COMPLETE": "complete_bash", "COMP_WORDS": "tpde ver", "COMP_CWORD": "1"}
    assert process(env=env).stdout.split() == ["verify"]
    env = os.environ | {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    for shell in ("bash", "zsh", "fish"):
        done = process("--show-completion", shell, env=env)
        assert done.returncode == 0
        assert "_TPDE_COMPLETE" in done.stdout


def test_install_completion(tmp_path: Path) -> None:
    env = os.environ | {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1", "HOME": str(tmp_path)}
    done = process("--install-completion", "bash", env=env)
    assert done.returncode == 0, done.stderr
    assert "_TPDE_COMPLETE" in (tmp_path / ".bash_completions" / "tpde.sh").read_text()


# ---- common


def test_split_hint() -> None:
    assert common.split_hint("a is b; c is d; do e") == ("a is b; c is d", "do e")
    assert common.split_hint("tensor `x; y` is bad; fetch it") == ("tensor `x; y` is bad", "fetch it")
    assert common.split_hint("tensor `x; y` is bad") == ("tensor `x; y` is bad", "")


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
    ours = bench._e4m3(array.copy()).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    theirs = array.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert np.mean(ours != theirs) < 0.01  # ties, and what halves round first
    assert not np.isnan(words.view(ml_dtypes.float8_e4m3fn).astype(np.float32)).any()
