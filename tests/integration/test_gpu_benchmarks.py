"""Benchmarks of GPUs on one that is pretended: they run to their end, with the right bits and their bars."""

from __future__ import annotations

import importlib
import json
import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")

from support.backends import FACTS, MadeBackend  # noqa: E402
from support.emulated import on_cpu  # noqa: E402, F401
from support.pretended import Product, pretended  # noqa: E402, F401

from benchmarks.harness import gpu, runner  # noqa: E402
from tpde.cuda import tuning  # noqa: E402
from tpde.cuda.product_ways import KERNELS  # noqa: E402


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets constants of a benchmark."""
    monkeypatch.setattr(gpu, "FLUSH_BYTES", 64)
    monkeypatch.setattr(gpu.Flush.__init__, "__defaults__", (64,))

    def change(name: str, **constants: Any) -> Any:
        module = importlib.import_module(f"benchmarks.{name}")
        for key, value in constants.items():
            monkeypatch.setattr(module, key, value)
        return module

    return change


def run(folder: Path, *words: str) -> tuple[dict[str, bool], str]:
    """Bars, and the page."""
    page, data = folder / "page.md", folder / "page.json"
    code = runner.main([*words, "--out", str(page), "--json", str(data)])
    found = json.loads(data.read_text("utf-8"))
    assert code == (0 if found["passed"] else 1)
    return {it["what"]: it["met"] for it in found["bars"]}, page.read_text("utf-8")


@pytest.mark.usefixtures("pretended")
class TestKernels:
    """What a benchmark compares is compared; speeds are those of no GPU."""

    def test_windows(self, small: Any, tmp_path: Path) -> None:
        small("windows_gpu", SHAPES=((128, 256), (256, 256)), LAYER=((64, 256), (128, 128)))
        bars, text = run(tmp_path, "windows_gpu", "--runs", "1")
        assert bars == {"both": False, "bytes": True}
        assert "Pretended" in text
        assert text.count("(bar 1000: FAIL)") == 1

    def test_encoding(self, small: Any, tmp_path: Path) -> None:
        layer = ((128, 256), (64, 256))
        groups = (("one", "BF16", ((256, 256),)), ("two", "BF16", layer), ("half", "F16", ((256, 256),)))
        small("encode_gpu", GROUPS=groups, LAYER=layer, LARGEST="one")
        bars, text = run(tmp_path, "encode_gpu", "--runs", "1")
        assert bars == {"kernels": False, "bytes": True}
        assert "sample, GB/s" in text

    def test_deltas(self, small: Any, tmp_path: Path) -> None:
        small("delta_gpu", HIDDEN=256, MIDDLE=512, KEYS=64, VOCABULARY=512)
        bars, text = run(tmp_path, "delta_gpu", "--layers", "1", "--runs", "1")
        assert bars == {"bits": True, "make": False, "apply": False}
        assert "index and value" in text

    def test_decoding(self, small: Any, tmp_path: Path) -> None:
        mib = 1 << 16
        layers = {"one": (256, 512)}
        small("gpu_decode", MIB=mib, SIDE=512, DISTINCT=16 * mib, MANY=2, LAYERS=layers)
        options = ["--dtypes", "bf16", "E4M3", "bf16 pruned", "--sizes", "4", "16", "512", "--runs", "1"]
        bars, text = run(tmp_path, "gpu_decode", *options, "--plot", str(tmp_path / "plot.png"))
        assert not [what for what in bars if what.startswith("bits")]
        assert bars["bf16, 512 MiB, GB/s"] is False
        assert "bf16, 16 MiB alone, GB/s" in bars
        assert "2 x 1 MiB" in text
        assert text.count("not installed") == 9
        assert "not measured" in text

    def test_wrong_bits(self, small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        module = small("gpu_decode", MIB=1 << 16, SIDE=512, DISTINCT=1 << 20, MANY=1, LAYERS={})
        monkeypatch.setattr(module.Decoder, "__call__", lambda self: self._out)
        bars, text = run(tmp_path, "gpu_decode", "--dtypes", "E4M3", "--sizes", "4", "--no-peers")
        assert bars["bits, tpde, E4M3, 4 MiB"] is False
        assert "WRONG BITS" in text

    def test_products(self, small: Any, tmp_path: Path) -> None:
        module = importlib.import_module("benchmarks.linear")
        models = {"8b": module.Model("Small", 2, 256, 256, 128, 384, 512)}
        small(
            "linear", MODELS=models, COLD=1 << 18, DeviceWindow=Product, BARS={"Pretended": {1: 9.0, 4: 0.0}}
        )
        plot = tmp_path / "plot.png"
        options = ["--rows", "1", "4", "100", "--runs", "1", "--models", "8b", "--plot", str(plot)]
        bars, text = run(tmp_path, "linear", *options)
        errors = {what: met for what, met in bars.items() if what.startswith("error")}
        assert len(errors) == 15
        assert all(errors.values())
        assert {what: met for what, met in bars.items() if what.startswith("all")} == {
            "all, 1 rows": False,
            "all, 4 rows": True,
        }
        assert "bits a weight; at the rate of a copy all of them take" in text
        assert plot.read_bytes().startswith(b"\x89PNG")
        assert "\n- Ways of fused products: built in\n" in text

    def test_peers_of_products(self, small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """What others take is beside ours; what they refuse, and what is wrong, is said."""
        module = importlib.import_module("benchmarks.linear")
        models = {"8b": module.Model("Small", 1, 256, 256, 128, 256, 256)}
        small("linear", MODELS=models, COLD=1 << 18, DeviceWindow=Product, _memory_rate=lambda: 1e12)

        def one_row(weight: Any) -> Any:
            def product(x: Any) -> Any:
                if len(x) > 1:
                    raise RuntimeError("one row alone")
                return x @ weight.T

            return product

        def refuse(weight: Any) -> Any:
            raise ValueError("no such layout")

        made = {"one": one_row, "wrong": lambda weight: lambda x: torch.nan * (x @ weight.T), "none": refuse}
        peers = {name: (name.title(), make, ()) for name, make in made.items()}
        monkeypatch.setattr(module.products, "PEERS", peers)
        bars, text = run(tmp_path, "linear", "--rows", "1", "4", "--runs", "1", "--models", "8b")
        assert len(bars) == 10, "peers have none"
        assert all(bars.values())
        assert "\nNone does not pack them: ValueError: no such layout\n" in text
        assert "\nOne refuses what has a dash: RuntimeError: one row alone\n" in text
        cells = [[it.strip() for it in line.split("|")[1:-1]] for line in text.splitlines() if "|" in line]
        assert cells[0][9:] == ["One, us", "Wrong, us"]
        ones = {row[0]: row[9] for row in cells[2:]}
        assert ones["4"] == "-" != ones["1"]
        assert all("(error nan)" in row[10] for row in cells[2:] if row[1] != "all")
        assert not any("error" in row[9] for row in cells[2:])

    def test_a_table_of_products(
        self, small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launch_on: Any
    ) -> None:
        """A page names the one that is followed, without its folder."""
        monkeypatch.setenv("TPDE_CACHE_DIR", str(tmp_path / "home"))
        monkeypatch.setenv("TPDE_TUNING", "")
        launch_on(MadeBackend())
        table = tuning.table_path(FACTS)
        table.parent.mkdir(parents=True)
        tuning.write_table(table, FACTS, KERNELS, {(256, 256): {1: "some", 8: "other"}})
        small("linear", MODELS={}, _memory_rate=lambda: 1e12)
        for more, said in (
            ([], "`simulated-sm_90-132.json` of `tpde tune`, 2 products"),
            (["--untuned"], "built in"),
        ):
            _, text = run(tmp_path, "linear", *more)
            assert f"\n- Ways of fused products: {said}\n" in text
            assert str(tmp_path) not in text
        assert os.environ["TPDE_TUNING"] == "0", "processes that a benchmark starts follow none either"

    @pytest.mark.filterwarnings("ignore:nvCOMP")
    def test_prototypes(self, small: Any, tmp_path: Path) -> None:
        module = importlib.import_module("benchmarks.origin")
        words = 4 * module.CHUNK_WORDS
        small("origin", ROWS=words // 4096, WORDS=words, CHUNKS=4)
        bars, text = run(tmp_path, "origin", "--runs", "1", "--threads", "2")
        assert all(bars.values())
        assert text.count("not installed") == 1

    def test_compiling(self, small: Any, tmp_path: Path) -> None:
        given = iter([(0.1, 1.0), (0.1, 0.02)] * 2 + [(0.1, 1.0), (0.1, 0.2)] * 2)
        small("compile", call=lambda *_, **__: next(given))
        assert run(tmp_path, "compile", "--runs", "1")[0] == {
            "kernels, first use": True,
            "kernels, cached": True,
        }
        assert run(tmp_path, "compile", "--runs", "1")[0]["kernels, cached"] is False


def told(rows: dict[str, list[dict[str, Any]]]) -> Any:
    """Stands in for processes: what each task tells."""
    return lambda perform, task, *_: iter(rows[task])


MADE = {"rows": 1000, "plain": 80e9, "packed": 54e9, "pack_s": 60.0}
USED = {"seconds": 1.0, "peak": 1 << 30, "load_s": 1.0, "first_s": 1.5, "predicted_s": 1.0, "workspace": 1}
TILE = {"tile": [0, 10], "weights": True, "outputs": True}


class TestBeyondMemory:
    """What is made of what processes tell."""

    def layer(self, small: Any, folder: Path, *rows: dict[str, Any]) -> dict[str, bool]:
        made = [{"gpu": "one"}, {"rate": 55e9}, {"made": MADE}]
        holder = SimpleNamespace(ends=[])
        small("big_layer", rows=told({"make": made, "use": [*rows]}), Holder=lambda: nullcontext(holder))
        return run(folder, "big_layer", "--dir", str(folder), "--host", "mapped", "arena")[0]

    def test_a_layer(self, small: Any, tmp_path: Path) -> None:
        pytest.importorskip("transformers")
        good = self.layer(small, tmp_path, {"used": USED}, TILE)
        assert good == {"seconds": True, "card peak": True, "bits": True}
        bad = self.layer(small, tmp_path, {"used": USED | {"seconds": 2.0}}, TILE | {"outputs": False})
        assert bad == {"seconds": False, "card peak": True, "bits": False}
        assert self.layer(small, tmp_path, {"problem": "no"}) == {"used and checked": False, "problem": False}

    @pytest.mark.parametrize("slow", [False, True])
    def test_a_disk(self, small: Any, tmp_path: Path, slow: bool) -> None:
        pytest.importorskip("transformers")
        used = {
            "token_s": 1.0,
            "rate": 4e9 if slow else 5e9,
            "a_token": 5e9,
            "memory": 1 << 30,
            "resident": 2 << 30,
        }
        rows = {
            "start": [{"gpu": "one"}, {"made": {"layers": 2, "packed_bytes": 1e9}}],
            "predict": [{"predicted": [4.0, 1.3 if slow else 1.1]}],
            "use": [{"used": used}],
        }
        small("disk", rows=told(rows), drop=lambda _: None, direct_rate=lambda *_: 5e9)
        bars, text = run(tmp_path, "disk", "--dir", str(tmp_path))
        assert bars == {"tpde, GB/s": not slow, "memory, GiB": True, "predicted, s/token": not slow}
        assert str(tmp_path) not in text
