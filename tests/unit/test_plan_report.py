"""`tpde plan`: which rates it measures, and what it tells of a plan as JSON and as text."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.backends import MadeBackend

from tpde import errors


class Measured:
    """Notes what is measured, of a machine of round numbers."""

    def __init__(self) -> None:
        from tpde.streaming.rates import Meters

        self.log: list[Any] = []
        self.meters = Meters(self._copy, lambda device: 6e-6, self._disk)

    def _copy(self, device: Any) -> tuple[float, float]:
        self.log.append(str(device))
        return 1e9, 4e9

    def _disk(self, files: Any) -> float:
        self.log.append(list(files))
        return 3e9


@pytest.fixture
def measured(launch_on: Any) -> Measured:
    """Give what was measured, on a machine of two GPUs."""
    pytest.importorskip("torch", reason="needs torch")
    launch_on(MadeBackend())
    return Measured()


@pytest.fixture
def gpus(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let PyTorch see two GPUs, of which it uses the first."""
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


FILES = [Path("a")]


@pytest.mark.parametrize(
    ("given", "measures", "rates"),
    [
        ({"copy": 10.0, "memory": 20.0}, [FILES], (10e9, 3e9, 20e9)),
        ({"copy": 10.0, "memory": 20.0, "disk": 7.0}, [], (10e9, 7e9, 20e9)),
        ({"copy": 10.0}, ["cuda:0", FILES], (10e9, 3e9, 4e9)),
        ({"memory": 20.0, "disk": 7.0}, ["cuda:0"], (1e9, 7e9, 20e9)),
        ({"device": "cuda:1"}, ["cuda:1", FILES], (1e9, 3e9, 4e9)),
    ],
)
def test_rates_that_are_given_are_not_measured(
    given: dict[str, Any], measures: list[Any], rates: tuple[float, ...], measured: Measured, gpus: None
) -> None:
    from tpde.cli.plan import _rates

    every = dict.fromkeys(("device", "copy", "memory", "disk", "call")) | given
    found = _rates(*every.values(), FILES, measured.meters)
    assert measured.log == measures
    assert (found.copy, found.disk, found.memory) == rates
    called = _rates(*(every | {"call": 50.0}).values(), FILES, measured.meters)
    assert called.launch == pytest.approx(50e-6)
    assert called.launch != found.launch


def test_without_files_no_disk_is_measured(measured: Measured) -> None:
    from tpde.cli.plan import _rates

    found = _rates(None, 10.0, 20.0, None, None, [], measured.meters)
    assert (measured.log, found.disk) == ([], float("inf"))


def test_without_a_gpu_its_rates_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that is named is looked for."""
    torch = pytest.importorskip("torch", reason="needs torch")

    from tpde.cli.plan import _rates

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for given, missing in (((10.0, None), "--memory-rate"), ((None, 10.0), "--copy-rate")):
        with pytest.raises(errors.InvalidInput, match=f"no GPU to measure, and `{missing}` is not") as caught:
            _rates(None, *given, None, None, [])
        hint = str(caught.value.hint)
        assert (hint.count("-rate`"), f"name `{missing}`" in hint, caught.value.where) == (1, True, missing)
    with pytest.raises(errors.InvalidInput, match="there is no GPU to measure") as caught:
        _rates(None, None, None, None, None, [])
    assert "`--copy-rate` (" in str(caught.value.hint)
    assert "`--memory-rate` (" in str(caught.value.hint)
    with pytest.raises(errors.UnsupportedDevice, match="no CUDA device that PyTorch can use") as refused:
        _rates("cuda:0", None, None, None, None, [])
    assert "`--copy-rate` (" in str(refused.value.hint)
    with pytest.raises(errors.InvalidInput, match="`--device` is what is measured"):
        _rates("cuda:0", 1.0, 2.0, None, None, [])


def test_a_plan_as_json_and_as_text_has_all_of_it() -> None:
    from tpde.cli.plan import as_dict, render
    from tpde.planning.units import Placement, Rates, Unit

    units = [Unit("embed", 10, 20, 1), Unit("layers.0", 30, 40, 1), Unit("layers.1", 50, 60, 1)]
    plan = SimpleNamespace(
        placements={"embed": Placement.HOST, "layers.0": Placement.DISK, "layers.1": Placement.HOST},
        tiled=("embed",), vram=1 << 30, ram=None, workspace=7, slots=2, piece=3,
        parts={"plain": 2048, "ring": 0},
        used=3072, host=4096, staging=0, times={"copy": 0.25, "disk": 0.0}, seconds=0.25, limit="copy",
    )  # fmt: skip
    rates = Rates(1e9, float("inf"), 4e9, 5e9, 6e-6, 7e9)
    budget = SimpleNamespace(max_tokens=11, max_batch=3)
    found = as_dict(plan, units, budget, rates, "m")  # type: ignore[arg-type]
    assert found == {
        "model": "m", "vram": 1 << 30, "ram": None, "max_tokens": 11, "max_batch": 3,
        "placements": [
            {"placement": "host", "units": ["embed", "layers.1"], "packed_bytes": 60, "plain_bytes": 80},
            {"placement": "disk", "units": ["layers.0"], "packed_bytes": 30, "plain_bytes": 40},
        ],
        "tiled": ["embed"], "workspace_bytes": 7, "ring_slots": 2, "piece_bytes": 3,
        "device_bytes": {"plain": 2048, "ring": 0}, "used_bytes": 3072, "host_bytes": 4096,
        "staging_bytes": 0,
        "seconds": {"copy": 0.25, "disk": 0.0}, "seconds_per_token": 0.25, "tokens_per_second": 4.0,
        "limit": "copy",
        "rates": {"copy": 1e9, "memory": 4e9, "decode": 5e9, "windows": 7e9, "launch_seconds": 6e-6},
    }  # fmt: skip
    text = render(plan, units, 11)  # type: ignore[arg-type]
    lines = [line.split() for line in text.splitlines()]
    assert ["host", "2", "60", "B", "80", "B"] in lines
    assert ["in", "all", "3.0", "KiB"] in lines
    assert ["of", "1.0", "GiB"] in lines
    assert ["plain", "weights", "and", "buffers", "2.0", "KiB"] in lines
    assert ["copying", "from", "host", "memory", "250.00"] in lines
    assert "ring, to copy to" not in text
    assert "reading from the disk" not in text
    assert "used row by row, since they do not fit whole: embed" in text
    assert "host memory: 4.0 KiB page-locked\n" in text
    assert text.endswith(
        "250.0 ms for each token, 4.0 tokens/s, for up to 11 tokens; limited by copying from host memory"
    )
    plan.tiled, plan.staging, plan.ram = (), 1024, 2048
    text = render(plan, units, 11)  # type: ignore[arg-type]
    assert "row by row" not in text
    assert "host memory: 4.0 KiB page-locked, 1.0 KiB to read files to, of 2.0 KiB\n" in text
