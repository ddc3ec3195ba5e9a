"""How warps share a block's memory for weights as the packer writes them."""

from __future__ import annotations

import numpy as np
import pytest
from support.contents import fill
from support.packed import pack
from support.weights import LAYOUTS, LEAST_SHARED, WARPS, item, weights

from tpde.cuda import geometry
from tpde.format.container import TensorSpec


def test_staged_planes_seldom_exceed_their_room() -> None:
    """Chunks that do not fit take the slow way: few may."""
    packed = weights("BF16")
    chosen, header = geometry.geometry(geometry.need([item(packed)]), LEAST_SHARED), packed.header
    assert not chosen.piece
    at = packed.blob[header.index_at : header.index_at + 12 * header.chunks].view("<u4")[::3].astype(np.int64)
    sizes = np.diff(np.append(at << header.unit_log2, header.blob_bytes)) - header.chunk_words
    assert (sizes > chosen.room).mean() < 0.02


@pytest.mark.parametrize("shared", [163 << 10, 227 << 10])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_planes_are_staged_where_shared_memory_is_large(layout: str, shared: int) -> None:
    chosen = geometry.geometry(geometry.need([item(weights(layout))]), shared)
    assert chosen.piece == 0


@pytest.mark.parametrize("shared", [99 << 10, 163 << 10, 227 << 10])
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "F64", "F8_E4M3", "I8"])
def test_geometry_fits(dtype: str, shared: int) -> None:
    spec = TensorSpec(dtype, (300, 1000))
    packed = pack(spec, fill("normal", spec))
    assert packed is not None
    wanted = geometry.need([item(packed)])
    for chunks in (0, 1, 7, 100, 249, 10**9):
        chosen = geometry.geometry(wanted, shared, chunks)
        windows = 2 * wanted.raw * chosen.window
        used = chosen.warps * (windows + (1 + chosen.ahead) * chosen.room) + chosen.table_room
        used += 0 if chosen.piece else wanted.slack
        assert chosen.shared == used <= shared - 144  # a descriptor in static memory takes so much
        assert 1 <= chosen.warps <= (wanted.warps if shared > LEAST_SHARED else WARPS)
        assert chosen.room % 16 == chosen.table_room % 16 == 0
        if chosen.piece:  # a lane's ring starts at a multiple of its size
            assert chosen.table_room % (4 * chosen.piece) == windows % (4 * chosen.piece) == chosen.ahead == 0
            assert chosen.room == wanted.rings


def test_one_round_has_no_warps_to_spare() -> None:
    wanted = geometry.need([item(weights("BF16"))])
    for chunks, warps in ((1, 8), (8, 8), (11, 11), (wanted.warps, wanted.warps)):
        chosen = geometry.geometry(wanted, 227 << 10, chunks)
        assert (chosen.warps, chosen.ahead) == (warps, 0)
    assert geometry.geometry(wanted, 227 << 10, wanted.warps + 1).ahead == 1


def test_tables_too_large_for_shared_memory_stay_outside() -> None:
    wanted = geometry.need([item(weights("BF16"))])._replace(tables=256 << 10, room=200 << 10, fair=200 << 10)
    chosen = geometry.geometry(wanted, LEAST_SHARED)
    assert chosen.table_room == chosen.room == 0
    assert chosen.shared <= LEAST_SHARED
