"""`tpde tune` on a GPU: it writes a table that products follow, and no bit of a product changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.commands import process
from support.gpu import needs_cuda, torch

from tpde.cuda import tuning
from tpde.cuda.backend import CudaBackend, current
from tpde.cuda.compile import cache_directory
from tpde.cuda.product_ways import KERNELS, ways_of
from tpde.cuda.window_products import DeviceWindow
from tpde.weights import windowing

pytestmark = needs_cuda

SHAPES = [(513, 4160), (4096, 1024)]
COUNTS = (1, 8, 16, 64)


class Held:
    """A matrix on the device, and rows of x."""

    def __init__(self, rows: int, columns: int) -> None:
        draw = torch.Generator("cuda").manual_seed(rows)
        plain = 0.02 * torch.randn(rows, columns, device="cuda", generator=draw)
        encoded = windowing.encode(plain.bfloat16())
        assert encoded is not None
        self.blob, self.window = encoded
        self.x = torch.randn(max(COUNTS), columns, device="cuda", generator=draw).bfloat16()

    def device(self) -> DeviceWindow:
        """As the back end of now launches it."""
        return DeviceWindow(self.window, self.blob.data_ptr(), 0)

    def product(self, count: int) -> Any:
        """The words that the default way gives."""
        y = torch.full((count, self.window.rows), 7, dtype=torch.bfloat16, device="cuda")
        places = self.x.data_ptr(), self.x.stride(0), count, y.data_ptr(), y.stride(0)
        device = self.device()
        room = torch.empty(device.room(count), dtype=torch.uint8, device="cuda")
        device.product(*places, 0, torch.cuda.current_stream().cuda_stream, room.data_ptr())
        return y.view(torch.int16)


@pytest.fixture(scope="module")
def held() -> dict[tuple[int, int], Held]:
    return {shape: Held(*shape) for shape in SHAPES}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, but for compiled kernels; where its table is."""
    kernels = cache_directory() / "kernels"
    kernels.mkdir(parents=True, exist_ok=True)
    (tmp_path / "kernels").symlink_to(kernels.absolute())
    monkeypatch.setenv("TPDE_CACHE_DIR", str(tmp_path))
    tuning._table.cache_clear()
    return tuning.table_path(current().facts(0))


def test_products_follow_the_table_that_the_command_writes(
    held: dict[tuple[int, int], Held], cache: Path, launch_on: Any
) -> None:
    launch_on(CudaBackend())  # which has launched nothing of these shapes
    needed = {(shape, count): held[shape].product(count) for shape in SHAPES for count in COUNTS}
    shapes, rows = ",".join(f"{a}x{b}" for a, b in SHAPES), ",".join(map(str, COUNTS))
    made = process("tune", "--shapes", shapes, "--rows", rows, "--json")
    assert made.returncode == 0, made.stderr
    found = json.loads(made.stdout)
    assert found["path"] == str(cache)
    assert found["device"] == torch.cuda.get_device_name(0)
    tuning._table.cache_clear()
    launch_on(CudaBackend())
    told = {(tuple(it["shape"]), it["rows"]): it for it in found["products"]}
    assert told.keys() == needed.keys()
    for (shape, count), it in told.items():
        ways = ways_of(current().facts(0), held[shape].window, count)
        assert it["default"] == ways[0].label
        assert {*it["seconds"]} == {way.label for way in ways}
        assert all(0 < seconds < 1e-3 for seconds in it["seconds"].values())
        assert held[shape].device().ways(count)[0].label == it["best"]
        assert torch.equal(held[shape].product(count), needed[shape, count])


def test_whatever_a_table_names_the_bits_are_the_same(
    held: dict[tuple[int, int], Held], cache: Path, launch_on: Any
) -> None:
    cache.parent.mkdir()
    launch_on(CudaBackend())
    for shape in SHAPES:
        for count in COUNTS:
            needed = held[shape].product(count)
            for how in ways_of(current().facts(0), held[shape].window, count):
                tuning.write_table(cache, current().facts(0), KERNELS, {shape: {count: how.label}})
                tuning._table.cache_clear()
                launch_on(CudaBackend())
                assert held[shape].device().ways(count)[0] == how
                assert torch.equal(held[shape].product(count), needed), how
