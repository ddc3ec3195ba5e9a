"""How blobs, rows and changes are launched: grids, blocks, arguments. Kernels are noted, not run."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.backends import FACTS, MadeBackend, MadeKernel
from support.emulated import declared

from tpde.codec.selection import base_header
from tpde.cuda.decode import Rows, WorkList
from tpde.cuda.geometry import geometry, kernel_defines, max_warps, need, staged
from tpde.cuda.items import _ITEM, DESCRIPTOR_BYTES, Item, StagedChunks, Tables, kind_defines
from tpde.format.blob_header import BlobHeader
from tpde.format.constants import CODEC_PREFIX
from tpde.format.container import TensorSpec

ONE_TABLE, TWO_TABLES = ((0, 0), (0, 1)), ((0, 0), (0, 2))


def _header(
    shape: tuple[int, ...], planes: tuple[tuple[int, int], ...] = ONE_TABLE, chunk: int = 512
) -> BlobHeader:
    header = base_header(TensorSpec("BF16", shape), CODEC_PREFIX, chunk)
    return replace(
        header,
        planes=planes,
        tables=planes[-1][1],
        tables_bytes=16,
        blob_bytes=header.chunks_at + 16 + 900 * header.chunks,
        max_chunk_bytes=960,
        max_stream_bytes=440,
    )


BF16 = {"WORD": 2, "CODED": 2}


def _item(header: BlobHeader, pairs: int = 0, blob: int = 4096, **more: Any) -> Item:
    return Item(header, Tables(np.zeros(4096, np.uint8), 11, pairs), blob, 8192, 0, **more)


class Noted(MadeBackend):
    """What is compiled, made and launched."""

    def __init__(self) -> None:
        super().__init__(self._note)
        self.kernels: list[Any] = []
        self.made: list[Any] = []
        self.launched: list[Any] = []

    def _note(self, *given: Any) -> MadeKernel:
        """Note a kernel, by its number from here on."""
        self.kernels.append(given)
        return MadeKernel(functools.partial(self._launch, len(self.kernels) - 1))

    def _launch(self, *given: Any) -> Any:
        self.made.append(given)
        number = len(self.made) - 1

        def run(stream: int, *arguments: int) -> None:
            source, name, *_ = self.kernels[given[0]]
            assert len(arguments) == declared(source, name)
            self.launched.append((number, stream, [*arguments]))

        return run


@pytest.fixture
def noted(launch_on: Any) -> Noted:
    return launch_on(Noted())


# ---- blobs ----


def test_kinds_have_a_launch_each_and_blobs_without_chunks_none(noted: Noted) -> None:
    large, small, none = _header((300, 512)), _header((40, 512)), _header((0, 512))
    items = [_item(large), _item(small, pairs=2), _item(none), _item(small, blob=16), _item(large, pairs=2)]
    work = WorkList(items, 3)
    assert work.descriptors.size == 4 * DESCRIPTOR_BYTES
    rows = work.descriptors.view(_ITEM)
    assert rows["number"].tolist() == [0, 3, 1, 4]
    assert rows["first"].tolist() == [0, 300, 0, 40]
    assert rows["blob"].tolist() == [4096, 16, 4096, 4096]
    assert not noted.kernels, "nothing is compiled before the first launch"
    work.launch(10_000, 20_000, 7, 30_000, base=40_000)
    assert [(it[0], it[1], it[3]) for it in noted.kernels] == [("decode.cu", "decode_items", 3)] * 2
    assert [it[2]["PAIRS"] for it in noted.kernels] == [0, 2]
    assert [it[2]["CHECK"] for it in noted.kernels] == [0, 0]
    for (number, stream, arguments), at, of in zip(noted.launched, (0, 2), ([0, 3], [1, 4]), strict=True):
        chosen = geometry(need([items[i] for i in of]), FACTS.shared_bytes, -(-340 // 132))
        kernel, grid, block, shared = noted.made[number]
        assert noted.kernels[kernel][2] == kernel_defines(
            kind_defines(items[of[0]].header, items[of[0]].tables), chosen, check=False
        )
        assert (grid, block, shared, stream) == (132, 32 * chosen.warps, chosen.shared, 7)
        assert arguments == [
            *(10_000 + at * DESCRIPTOR_BYTES, 2, 340, 40_000, 30_000, 20_000),
            *(chosen.room, chosen.table_room, chosen.ahead),
        ]


def test_no_more_blocks_than_chunks_and_no_more_threads_than_registers_allow(noted: Noted) -> None:
    few = WorkList([_item(_header((5, 512)))], 0)
    many = WorkList([_item(_header((100_000, 512)))], 0)
    for work in (few, many):
        work.launch(0, 0, 0, 0)
        work.launch(0, 0, 0, 0, check=True)
    grids = [(grid, block) for _, grid, block, _ in noted.made]
    chosen = geometry(need([_item(_header((100_000, 512)))]), FACTS.shared_bytes, -(-100_000 // 132))
    assert grids[:2] == [(5, 32 * 8)] * 2
    assert chosen.warps > max_warps(BF16, check=True)
    assert grids[2:] == [(132, 32 * chosen.warps), (132, 32 * max_warps(BF16, check=True))]


def test_the_same_launch_is_made_once_and_another_by_itself(noted: Noted) -> None:
    work = WorkList([_item(_header((40, 512)))], 0)
    work.launch(1, 2, 3, 4)
    work.launch(1, 2, 3, 4)
    assert len(noted.kernels) == len(noted.made) == 1
    for given in (
        (9, 2, 3, 4),
        (1, 9, 3, 4),
        (1, 2, 9, 4),
        (1, 2, 3, 9),
        (1, 2, 3, 4, False, 9),
        (1, 2, 3, 4),
    ):
        work.launch(*given)
    assert [(it[1], it[2][0], *it[2][3:6]) for it in noted.launched] == [
        *[(3, 1, 0, 4, 2)] * 2,
        (3, 9, 0, 4, 2),
        (3, 1, 0, 4, 9),
        (9, 1, 0, 4, 2),
        (3, 1, 0, 9, 2),
        (3, 1, 9, 4, 2),
        (3, 1, 0, 4, 2),
    ]
    work.launch(1, 2, 3, 4, check=True)
    assert noted.kernels[-1][2]["CHECK"] == 1
    assert noted.launched[-1][0] == 1


def test_what_launches_need_is_compiled_ahead(noted: Noted) -> None:
    work = WorkList([_item(_header((40, 512)))], 0)
    work.prepare()
    assert [it[2]["CHECK"] for it in noted.kernels] == [0, 1]
    assert not noted.launched
    for check in (True, False):
        work.launch(1, 2, 3, 4, check)
    assert [number for number, *_ in noted.launched] == [1, 0]
    assert len(noted.kernels) == 2


def test_a_list_of_nothing_launches_nothing(noted: Noted) -> None:
    for items in ([], [_item(_header((0, 512)))]):
        work = WorkList(items, 0)
        assert work.descriptors.size == 0
        work.launch(0, 0, 0, 0)
    assert not noted.launched


@pytest.mark.parametrize("wrong", [{"blob": 4104}, {"tables_at": 8}, {"blob": 1, "tables_at": 1}])
def test_odd_addresses_are_refused_by_number(wrong: dict[str, int], noted: Noted) -> None:
    good = _item(_header((40, 512)))
    with pytest.raises(ValueError, match="item 1: blob and tables must start at multiples of 16 bytes"):
        WorkList([good, good._replace(**wrong)], 0)


def test_a_part_of_a_blob_counts_its_own_chunks(noted: Noted) -> None:
    header = _header((40, 512))
    work = WorkList([_item(header, chunks=StagedChunks(5, 9, 0, 100)), _item(header)], 0)
    assert work.descriptors.view(_ITEM)["first"].tolist() == [0, 5]
    work.launch(0, 0, 0, 0)
    assert noted.launched[0][2][2] == 45
    assert noted.made[0][1] == 45


# ---- rows ----


@pytest.mark.parametrize(
    ("width", "per_row"),
    [
        (1, 1),
        (128, 1),
        (512, 1),
        (1024, 2),
        (1536, 3),
        (384, 2),  # a row starts anywhere, and may reach into the next chunk
        (513, 2),
        (514, 3),
        (1025, 3),
        (1026, 4),
    ],
)
def test_chunks_that_a_row_may_touch(width: int, per_row: int, noted: Noted) -> None:
    header, first = _header((30, width)), range(30)
    Rows(_item(header), 0).launch(1, 2, 3, 4, 5, 6)
    ((_, stream, arguments),) = noted.launched
    touched = max(header.chunk_of(width * (i + 1) - 1) - header.chunk_of(width * i) + 1 for i in first)
    assert touched <= per_row
    fit = staged(need([_item(header)]), FACTS.shared_bytes, need([_item(header)]).warps)
    assert stream == 3
    assert arguments == [1, 30, width, 4, 5, per_row, 6, 2, fit.room, fit.table_room]
    kernel, grid, block, shared = noted.made[0]
    assert (grid, block) == (-(-5 * per_row // 8), 256)
    assert shared == fit.table_room + 8 * fit.room + need([_item(header)]).slack
    assert noted.kernels[kernel][1:] == (
        "decode_rows",
        {
            **kind_defines(header, _item(header).tables),
            "WINDOW": fit.window,
            "PIECE": 0,
            "CHECK": 0,
            "THREADS": 32 * max_warps(BF16, check=False),
        },
        0,
    )


def test_rows_of_few_and_of_many(noted: Noted) -> None:
    rows = Rows(_item(_header((1000, 512))), 0)
    for count in (1, 8, 9, 8 * 4 * 132, 10**6):
        rows.launch(0, 0, 0, 0, count, 0)
    assert [grid for _, grid, _, _ in noted.made] == [1, 2, 4 * 132]
    assert [number for number, *_ in noted.launched] == [0, 0, 1, 2, 2], "as many blocks are made once"
    rows.launch(0, 0, 0, 0, 1, 0, check=True)
    assert noted.kernels[-1][2]["CHECK"] == 1
    assert noted.kernels[-1][2]["THREADS"] == 32 * max_warps(BF16, check=True)
    assert [number for number, *_ in noted.launched][-1] == 3


def test_no_rows_launch_nothing(noted: Noted) -> None:
    Rows(_item(_header((30, 512))), 0).launch(0, 0, 0, 0, 0, 0)
    assert not noted.made


def test_rows_are_of_matrices_of_one_segment(noted: Noted) -> None:
    with pytest.raises(ValueError, match=r"rows are of matrices, the shape is \(30, 16, 32\)"):
        Rows(_item(_header((30, 16, 32))), 0)
    for shape in ((512,), (30, 0), (0, 30)):
        with pytest.raises(ValueError, match="rows are of matrices"):
            Rows(_item(_header(shape)), 0)
    with pytest.raises(ValueError, match="rows are of matrices"):
        Rows(_item(replace(_header((30, 512)), segment_words=512)), 0)
