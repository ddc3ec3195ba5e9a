"""Peers of `linear`: which are there, and how their products are made."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from benchmarks.peers import products  # noqa: E402

NWC = """
class NWCLinear:
    def __init__(self, layer):
        self.weight = layer.weight.detach()
    def __call__(self, x):
        return x @ self.weight.T
"""
MODULES = "nwc", "glyd", "glyd.gpu", "glyd_gpu"
GLYD = """
def compress(model, *, compile):
    assert not compile
    return model
"""


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder whose modules are found, in the place of any that are installed."""
    monkeypatch.syspath_prepend(tmp_path)
    before = {name: sys.modules.pop(name) for name in MODULES if name in sys.modules}
    yield tmp_path
    for name in MODULES:
        sys.modules.pop(name, None)
    sys.modules.update(before)


@pytest.mark.skipif(products.installed() != [], reason="the peers themselves are installed")
def test_those_that_are_installed(there: Path) -> None:
    assert products.installed() == []
    (there / "nwc.py").write_text(NWC)
    (there / "glyd").mkdir()
    (there / "glyd" / "__init__.py").write_text("")
    importlib.invalidate_caches()  # of folders that changed less than a tick of the file system's clock ago
    assert products.installed() == ["nwc"]  # Glyd's other half is missing
    (there / "glyd_gpu.py").write_text("")
    importlib.invalidate_caches()
    assert products.installed() == ["glyd", "nwc"]


def test_each_packs_a_copy_of_the_weight(there: Path) -> None:
    (there / "nwc.py").write_text(NWC)
    (there / "glyd").mkdir()
    (there / "glyd" / "__init__.py").write_text("")
    (there / "glyd" / "gpu.py").write_text(GLYD)
    weight, x = torch.randn(6, 4), torch.randn(3, 4)
    for _, make, _ in products.PEERS.values():
        product = make(weight)
        assert torch.equal(product(x), x @ weight.T)
        kept = weight.clone()
        held = product[0] if isinstance(product, torch.nn.Sequential) else product
        held.weight.zero_()
        assert torch.equal(weight, kept)
