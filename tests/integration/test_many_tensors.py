"""Files of very many small tensors: what each tensor costs is counted, since times depend on the machine."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.contents import rng
from support.files import safetensors_bytes

import tpde
from tpde.cli.common import print_json
from tpde.cli.inspect import render
from tpde.files.file_writer import FileWriter
from tpde.files.inspection import inspect
from tpde.format.container import TensorSpec
from tpde.format.container_reader import parse_header
from tpde.io.sinks import BytesSink
from tpde.io.small_writes import Gathered

SPECS = {"empty": [0], "small": [8, 17, 100, 128]}


def _file(path: Path, kind: str, tensors: int) -> Path:
    """Write a file of as many tensors, in twenty blocks."""
    sizes = SPECS[kind]
    specs = [TensorSpec("BF16", (sizes[i % len(sizes)],)) for i in range(tensors)]
    path.write_bytes(
        safetensors_bytes(
            {f"layers.{i % 20}.experts.{i}.w": (s, rng(i).bytes(s.nbytes)) for i, s in enumerate(specs)}
        )
    )
    return path


def _calls(action: Callable[[], object]) -> int:
    """How many functions are called meanwhile, those in C too."""
    count = 0

    def seen(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        action()
    finally:
        sys.setprofile(before)
    return count


def _work(folder: Path, kind: str, tensors: int) -> dict[str, int]:
    """Count the calls that each command makes for a file of as many tensors."""
    folder.mkdir()
    plain = _file(folder / "plain.safetensors", kind, tensors)
    packed, back = folder / "packed.safetensors", folder / "back.safetensors"
    with contextlib.redirect_stdout(io.StringIO()):
        return _counted(plain, packed, back)


def _counted(plain: Path, packed: Path, back: Path) -> dict[str, int]:
    found = {
        "pack": _calls(lambda: tpde.pack(plain, packed, threads=1)),
        "inspect": _calls(lambda: render(inspect(packed))),
        "inspect --json": _calls(lambda: print_json(inspect(packed, histogram=True))),
        "verify": _calls(lambda: tpde.verify(packed, threads=1)),
        "unpack": _calls(lambda: tpde.unpack(packed, back, threads=1)),
    }
    assert back.read_bytes() == plain.read_bytes()
    return found


# Calls for each tensor, as counted, and a quarter more.
MOST = {"pack": 51, "inspect": 48, "inspect --json": 54, "verify": 9, "unpack": 11}


@pytest.mark.parametrize("kind", SPECS)
def test_each_tensor_costs_as_much_in_a_large_file_as_in_a_small_one(kind: str, tmp_path: Path) -> None:
    _work(tmp_path / "first", kind, 20)  # what is loaded and cached at the first use
    few, many, most = (_work(tmp_path / str(n), kind, n) for n in (500, 1000, 2000))
    for command, limit in MOST.items():
        assert (most[command] - many[command]) / 1000 <= limit, command
        assert most[command] - many[command] <= 2.1 * (many[command] - few[command]), command


class _Counting(BytesSink):
    """Counts what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def write(self, offset: int, buffers: object) -> None:
        self.sizes.append(sum(memoryview(b).nbytes for b in buffers))  # type: ignore[attr-defined]
        super().write(offset, buffers)  # type: ignore[arg-type]


def test_small_tensors_are_written_together() -> None:
    sink, spec = _Counting(), TensorSpec("BF16", (100,))
    with FileWriter(sink, {str(i): spec for i in range(2000)}, threads=1) as writer:
        for i in range(2000):
            writer.write(str(i), rng(i).bytes(spec.nbytes))
    assert sum(sink.sizes[:-1]) == 2000 * spec.nbytes
    assert len(sink.sizes) == 8  # 65,536 bytes at most, and the header


def test_pieces_that_do_not_follow_each_other_go_to_their_places() -> None:
    sink, want = _Counting(), bytearray(300_000)
    out = Gathered(sink)
    for offset, size in [
        (10, 5),
        (15, 5),
        (100, 70_000),
        (70_100, 3),
        (200_000, 65_536),
        (265_536, 1),
        (0, 2),
    ]:
        piece = rng(offset).bytes(size)
        want[offset : offset + size] = piece
        out.write(offset, memoryview(piece))
    out.flush()
    out.flush()
    assert bytes(sink.data) == want[: len(sink.data)]
    assert len(sink.data) == 265_537
    assert sink.sizes == [10, 70_000, 3, 65_536, 1, 2]


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_collected_again_after_a_header(enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    before, seen = gc.isenabled(), list[bool]()
    real = json.loads
    monkeypatch.setattr(json, "loads", lambda *a, **k: (seen.append(gc.isenabled()), real(*a, **k))[1])
    try:
        (gc.enable if enabled else gc.disable)()
        parse_header(b'{"a":{"dtype":"U8","shape":[],"data_offsets":[0,1]}}', "x")
        assert gc.isenabled() == enabled
        with pytest.raises(tpde.errors.NotSafetensors):
            parse_header(b"{", "x")
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()
    assert seen == [False, False]


def test_json_has_a_line_for_each_tensor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _file(tmp_path / "x.safetensors", "small", 50)
    print_json(inspect(path, histogram=True))
    text = capsys.readouterr().out
    found = json.loads(text)
    assert len(found["tensors"]) == 50
    assert [json.loads(line.strip().rstrip(",")) for line in text.split("\n") if '"shape"' in line] == found[
        "tensors"
    ]
    assert found["histogram"][0]["dtype"] == "BF16"


def test_entropies_do_not_depend_on_what_is_counted_beside(tmp_path: Path) -> None:
    """More tensors than are counted at a time, of two dtypes, some empty."""
    data = {
        f"t{i:04}": (TensorSpec(*kind), rng(i).bytes(TensorSpec(*kind).nbytes))
        for i in range(1500)
        for kind in [[("BF16", (i % 7,)), ("F32", (i % 5,)), ("U8", (40,))][i % 3]]
    }
    (tmp_path / "x.safetensors").write_bytes(safetensors_bytes(data))
    for it in inspect(tmp_path / "x.safetensors").tensors:
        spec, content = data[it.name]
        if not spec.nbytes:
            assert it.entropy is None
            continue
        symbols = {
            "BF16": lambda b: np.frombuffer(b, np.uint16) >> 7 & 255,
            "F32": lambda b: np.frombuffer(b, np.uint32) >> 23 & 255,
            "U8": lambda b: np.frombuffer(b, np.uint8),
        }[spec.dtype](content)
        p = np.unique(symbols, return_counts=True)[1] / symbols.size
        assert it.entropy == pytest.approx(-(p * np.log2(p)).sum(), abs=1e-12), it.name
