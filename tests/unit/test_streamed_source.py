"""What a streamed weight gives kernels: its blob in locked memory, its tables on the device, once."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from support.kernels import memory  # noqa: E402
from support.ring import Fixture  # noqa: E402

from tpde.cuda.items import StagedChunks  # noqa: E402
from tpde.streaming.streamed_source import put_on_device  # noqa: E402

pytestmark = pytest.mark.usefixtures("bounded")


def test_what_kernels_take_to_read_over_the_bus(tmp_path: Path) -> None:
    """The blob where it is locked, and tables and index map on the device; nothing of what is not locked."""
    with Fixture(tmp_path, [50_000]) as made:
        it, address = made.tensors[0], 1 << 20
        assert it.item(64) is None
        made.feed.device_address = lambda extent: address  # type: ignore[method-assign]
        item = it.item(64)
        assert item is not None
        assert (item.blob, item.out, item.chunks) == (1 << 20, 64, None)
        tables, image = it.device_tables()  # type: ignore[misc]
        assert item.tables is tables
        assert item.tables_at == image.data_ptr()
        index = it.host_reader().index
        assert memory(item.index_at, index.nbytes).tobytes() == index.tobytes()
        assert item.header is it.header
        part = StagedChunks(1, 2, 3, 4)
        assert it.item(64, part).chunks == part  # type: ignore[union-attr]
        address += 8
        assert it.item(64) is None, "not at a multiple of 16"


def test_what_cannot_be_decoded_in_pieces_is_not_for_kernels(tmp_path: Path) -> None:
    with Fixture(tmp_path, [50_000]) as made:
        it = made.tensors[0]
        made.feed.device_address = lambda extent: 1 << 20  # type: ignore[method-assign]
        assert it.decodable()
        it.travels = False
        assert not it.decodable()
        assert it.item(0) is None


def test_which_weights_lie_in_host_memory(tmp_path: Path) -> None:
    with Fixture(tmp_path, [5000]) as made:
        it = made.tensors[0]
        assert it.in_host_memory(made.streamer)
        assert not it.in_host_memory(object()), "another streamer's"
        made.feed.ahead = 1
        assert not it.in_host_memory(made.streamer), "some are read from a disk"


def test_two_threads_put_tables_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One must not replace what the other has launched a kernel with."""
    with Fixture(tmp_path, [50_000]) as made:
        it, begun, empty = made.tensors[0], threading.Event(), torch.empty
        allocations: list[int] = []

        def slow(*args: Any, **options: Any) -> Any:
            allocations.append(1)
            begun.set()
            if len(allocations) == 1:
                other.start()
                other.join(0.2)  # it waits for this one
            return empty(*args, **options)

        monkeypatch.setattr(torch, "empty", slow)
        other = threading.Thread(target=lambda: put_on_device([it]))
        put_on_device([it])
        other.join()
        assert begun.is_set()
        assert allocations == [1]
