"""inspect and plot: against the stock library's sizes and NumPy's own counts."""

from __future__ import annotations

import dataclasses
import json
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from support import spoilt

import tpde
from tpde.codec.selection import PREFIX_CHUNK_WORDS, SAMPLE_CHUNKS
from tpde.errors import Corrupt, InvalidInput, MissingDependency
from tpde.files.inspection import inspect
from tpde.files.inspection_report import Histogram, Report
from tpde.files.plot import _largest, plot
from tpde.io.sources import FileSource

# Constants are found by the writer only beyond a kilobyte.
TENSORS = {
    "layers.10.w": (0.02 * torch.randn(300, 128, generator=torch.Generator().manual_seed(0))).bfloat16(),
    "layers.9.w": (0.02 * torch.randn(128, 300, generator=torch.Generator().manual_seed(1))).float(),
    "ids": torch.arange(4096, dtype=torch.int64),
    "ones": torch.ones(4096),
    "few": torch.tensor([1.0, 2.0]),
    "empty": torch.empty(3, 0, dtype=torch.float16),
    "scalar": torch.tensor(3, dtype=torch.int32),
}


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A plain file."""
    path = tmp_path / "plain.safetensors"
    safetensors.torch.save_file(TENSORS, path)
    return path


def test_sizes_and_codecs(plain: Path, packed: Path) -> None:
    report = inspect(packed)
    found = {t.name: t for t in report.tensors}
    assert [t.name for t in report.tensors][:2] == ["layers.9.w", "layers.10.w"]
    with safetensors.safe_open(packed, "pt") as stock:
        for name, tensor in TENSORS.items():
            stored = found[name].codec == "plain"
            slice_ = stock.get_tensor(name if stored else f"{name}_tpde")
            assert found[name].stored_bytes == slice_.nbytes
            assert found[name].source_bytes == tensor.nbytes
            assert found[name].shape == tuple(tensor.shape)
            assert found[name].file == "packed.safetensors"
    assert {n: t.codec for n, t in found.items()} == {
        "layers.10.w": "prefix",
        "layers.9.w": "prefix",
        "ids": "zstd",
        "ones": "constant",
        "few": "plain",
        "empty": "plain",
        "scalar": "plain",
    }
    assert found["layers.10.w"].bits_per_weight == 8 * found["layers.10.w"].stored_bytes / (300 * 128)
    assert (found["empty"].bits_per_weight, found["empty"].entropy, found["empty"].ratio) == (None, None, 1.0)
    assert report.packed
    assert report.file_bytes == packed.stat().st_size
    assert not inspect(plain).packed


def test_summary_adds_up(packed: Path) -> None:
    report = inspect(packed)
    for groups in (report.by_codec, report.by_dtype):
        assert sum(g.tensors for g in groups) == len(TENSORS)
        assert sum(g.source_bytes for g in groups) == report.source_bytes
        assert sum(g.stored_bytes for g in groups) == report.stored_bytes
        sizes = [g.source_bytes for g in groups]
        assert sizes == sorted(sizes, reverse=True)
    assert report.source_bytes == sum(t.nbytes for t in TENSORS.values())
    assert report.ratio == report.source_bytes / report.stored_bytes
    assert {g.name for g in report.by_codec} == {"prefix", "zstd", "constant", "plain"}
    assert {g.name for g in report.by_dtype} == {"BF16", "F32", "I64", "F16", "I32"}


@pytest.mark.parametrize("which", ["plain", "packed"])
def test_entropy_and_histogram(which: str, request: pytest.FixtureRequest) -> None:
    report = inspect(request.getfixturevalue(which), histogram=True)
    found = {t.name: t for t in report.tensors}
    words = TENSORS["layers.10.w"].view(torch.int16).numpy().view(np.uint16).reshape(-1)
    counts = np.bincount((words >> 7) & 0xFF, minlength=256)
    p = counts[counts > 0] / counts.sum()
    assert found["layers.10.w"].entropy == pytest.approx(-(p * np.log2(p)).sum(), abs=1e-12)
    assert found["ones"].entropy == 0
    assert found["few"].entropy == 1  # two exponents
    assert report.histogram is not None
    histograms = {h.dtype: h.counts for h in report.histogram}
    assert histograms["BF16"] == tuple(counts)
    assert sum(histograms["F32"]) == 128 * 300 + 4096 + 2
    assert inspect(request.getfixturevalue(which)).histogram is None


def test_report_is_ready_for_json(packed: Path) -> None:
    report = inspect(packed, histogram=True)
    again = json.loads(json.dumps(dataclasses.asdict(report), allow_nan=False))
    assert again["tensors"][0]["name"] == "layers.9.w"
    assert len(again["histogram"][0]["counts"]) == 256


@pytest.mark.parametrize("pack", [False, True])
def test_only_a_sample_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pack: bool) -> None:
    path = tmp_path / "large.safetensors"
    words = PREFIX_CHUNK_WORDS * 4 * SAMPLE_CHUNKS
    safetensors.torch.save_file({"w": (0.02 * torch.randn(words)).bfloat16()}, path)
    if pack:
        tpde.pack(path, tmp_path / "p.safetensors")
        path = tmp_path / "p.safetensors"
    sizes: list[int] = []
    read = FileSource.read_into

    def counted(self: FileSource, offset: int, out: memoryview) -> None:
        sizes.append(out.nbytes)
        read(self, offset, out)

    monkeypatch.setattr(FileSource, "read_into", counted)
    report = inspect(path)
    sample = SAMPLE_CHUNKS * PREFIX_CHUNK_WORDS * 2
    assert sample / 2 < sum(sizes) < sample + (1 << 16)
    assert max(sizes) <= 1 << 16
    assert report.tensors[0].entropy == pytest.approx(2.55, abs=0.1)


def test_directory(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    (folder / "sub").mkdir(parents=True)
    (folder / ".cache").mkdir()
    safetensors.torch.save_file({"a": torch.zeros(4)}, folder / "b.safetensors")
    safetensors.torch.save_file({"a": torch.zeros(4)}, folder / "sub" / "a.safetensors")
    (folder / ".cache" / "c.safetensors").write_bytes(b"not looked at")
    report = inspect(folder)
    assert report.files == ("b.safetensors", "sub/a.safetensors")
    assert [(t.file, t.name) for t in report.tensors] == [("b.safetensors", "a"), ("sub/a.safetensors", "a")]
    (folder / "b.safetensors").unlink()
    (folder / "sub" / "a.safetensors").unlink()
    with pytest.raises(InvalidInput, match="has no"):
        inspect(folder)


def test_damage_is_an_error(packed: Path) -> None:
    data = bytearray(packed.read_bytes())
    at = data.index(b"\x89TPDE\r\n\x1a")
    struct.pack_into("<B", data, at + 10, 9)  # the codec
    packed.write_bytes(data)
    with pytest.raises(Corrupt, match="codec 9 is unknown"):
        inspect(packed)


@pytest.mark.parametrize("way", spoilt.PACKED_WAYS)
def test_files_that_cannot_be_read_are_refused(way: str, tmp_path: Path) -> None:
    (tmp_path / "good.safetensors").write_bytes(spoilt.PACKED)
    for whole in (spoilt.PACKED, *([spoilt.PLAIN] if way in spoilt.WAYS else [])):
        path = tmp_path / "x.safetensors"
        path.unlink(missing_ok=True)
        error = spoilt.write(path, way, whole)
        for it in (path, tmp_path) if path.exists() else (path,):
            with pytest.raises(error):
                inspect(it)


def fabricated(report: Report, tensors: int) -> Report:
    """Give a report of as many tensors, names too long, signs that a formula would take, huge ratios."""
    names = [f"model.language_model.layers.{i}.$attn.k_proj_größe_重み\n.weight" for i in range(tensors)]
    made = [
        dataclasses.replace(report.tensors[i % len(report.tensors)], name=name)
        for i, name in enumerate(names)
    ]
    return dataclasses.replace(report, tensors=tuple(made))


@pytest.mark.parametrize("tensors", [0, 1, 30, 130])
def test_plot_of_any_number_of_tensors(packed: Path, tmp_path: Path, tensors: int) -> None:
    png = tmp_path / "x.png"
    plot(fabricated(inspect(packed, histogram=True), tensors), png)
    data = png.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", data[16:24])
    assert 1000 < width < 4000
    assert 400 < height < 4000


def test_plot_keeps_the_largest(packed: Path) -> None:
    report = fabricated(inspect(packed), 403)
    tensors = [dataclasses.replace(t, source_bytes=(i * 7) % 403) for i, t in enumerate(report.tensors)]
    kept = _largest(tuple(tensors))
    assert kept == [t for t in tensors if t.source_bytes >= 3]  # in their order
    assert len(kept) == 400


def test_plot_of_another_codec(packed: Path, tmp_path: Path) -> None:
    report = inspect(packed)
    tensors = tuple(dataclasses.replace(t, codec="later") for t in report.tensors)
    plot(dataclasses.replace(report, tensors=tensors), tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_plot_without_words(packed: Path, tmp_path: Path) -> None:
    report = dataclasses.replace(inspect(packed), histogram=(Histogram("BF16", (0,) * 256),))
    plot(report, tmp_path / "a.png")
    plot(dataclasses.replace(report, histogram=None), tmp_path / "b.png")
    # Nothing was sampled: both draw the ratios alone.
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_plot_needs_matplotlib(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependency, match=r'pip install "tpde\[plot\]"'):
        plot(inspect(packed), "x.png")


def test_plot_has_no_global_state(packed: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from tpde.files.inspection import inspect; from tpde.files.plot import plot\n"
        "plot(inspect(sys.argv[1], histogram=True), sys.argv[2])\n"
        "assert 'matplotlib.figure' in sys.modules\n"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    args = [sys.executable, "-c", code, str(packed), str(tmp_path / "x.png")]
    assert subprocess.run(args, check=False, timeout=120).returncode == 0
