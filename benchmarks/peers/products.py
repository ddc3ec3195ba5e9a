"""The contestants of `linear` that are not ours: products from weights that are packed without loss.

Both are optional. Glyd (`pip install "glyd[gpu]"`) packs linear layers of a model in place, in the layout
that it chooses for the card. NWC (`pip install neural-weight-compression`) multiplies one row straight from
packed weights, and decodes them for more.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

Product = Callable[[Any], Any]  # of rows of x: a tensor of its own


def _layer(weight: Any) -> Any:
    from torch import nn

    rows, columns = weight.shape
    layer = nn.Linear(columns, rows, bias=False, device="meta")
    layer.weight = nn.Parameter(weight.clone(), requires_grad=False)
    return layer


def glyd(weight: Any) -> Product:
    """Packed by Glyd."""
    from glyd import gpu
    from torch import nn

    made: Product = gpu.compress(nn.Sequential(_layer(weight)), compile=False)
    return made


def nwc(weight: Any) -> Product:
    """Packed by NWC."""
    from nwc import NWCLinear

    made: Product = NWCLinear(_layer(weight))
    return made


PEERS: dict[str, tuple[str, Callable[[Any], Product], tuple[str, ...]]] = {
    "glyd": ("Glyd", glyd, ("glyd", "glyd_gpu")),
    "nwc": ("NWC", nwc, ("nwc",)),
}


def installed() -> list[str]:
    """Which are there."""
    return [name for name, (_, _, modules) in PEERS.items() if all(map(find_spec, modules))]
