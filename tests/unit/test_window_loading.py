"""Weights that go to the window layout under a budget: into the room that a plan keeps, and no more."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from support.card import Card  # noqa: E402
from support.files import pack_bytes, safetensors_bytes  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import tpde.torch as packed_torch  # noqa: E402
from tpde.errors import Corrupt, OutOfMemory  # noqa: E402
from tpde.format.container import TensorSpec  # noqa: E402
from tpde.loading import window_weights  # noqa: E402
from tpde.loading.checkpoint_files import Checkpoint  # noqa: E402
from tpde.loading.model_units import header_of, units_of  # noqa: E402
from tpde.loading.runs import Run  # noqa: E402
from tpde.loading.window_weights import (  # noqa: E402
    bring_windows,
    groups_in,
    settle,
    strip_room,
    window_room,
)
from tpde.nn import PackedTensor, finish, replace_parameter  # noqa: E402
from tpde.nn.tiles import row_tiles  # noqa: E402
from tpde.weights import windowing  # noqa: E402
from tpde.weights.resident import Resident  # noqa: E402
from tpde.weights.windowed import Windowed  # noqa: E402

CPU = torch.device("cpu")


def spread(rows: int, columns: int, share: float) -> Any:
    """A matrix, so many of whose words have exponents far from the others'."""
    made = torch.randn(rows, columns) * 0.02
    far = torch.rand(rows, columns) < share
    return torch.where(far, made * 2.0 ** torch.randint(-60, -20, made.shape), made).to(torch.bfloat16)


@pytest.fixture
def weights() -> dict[str, Any]:
    """The largest has few escapes, `some` more than its share, which others leave, `many` far too many."""
    torch.manual_seed(0)
    shares = {"largest": (512, 0.0), "some": (256, 0.018), "few": (128, 0.0), "many": (256, 0.05)}
    return {f"{name}.weight": spread(rows, 512, share) for name, (rows, share) in shares.items()}


@pytest.fixture
def checkpoint(weights: dict[str, Any], tmp_path: Path) -> Iterator[Checkpoint]:
    packed_torch.save_file(weights, tmp_path / "model.safetensors")
    with Checkpoint([tmp_path / "model.safetensors"]) as found:
        yield found


@pytest.fixture
def rooms(checkpoint: Checkpoint, weights: dict[str, Any]) -> dict[Any, int]:
    parts = [checkpoint.packed[name] for name in weights]
    return {it: window_room(it, header_of(it)) for it in parts}


def bits(tensor: Any) -> Any:
    return tensor.contiguous().view(torch.int16)


@pytest.mark.parametrize("room", [0, 1 << 30], ids=["on the host", "on the device"])
def test_all_is_in_the_room_that_was_planned(
    room: int, rooms: dict[Any, int], weights: dict[str, Any]
) -> None:
    assert all(rooms.values())
    told: list[int] = []
    found = bring_windows(rooms, CPU, room, told.append)
    assert sum(told) == sum(it.extent.size for it in rooms)
    assert set(found) == set(weights)
    memory = {it.memory.untyped_storage().data_ptr() for it in found.values()}
    sizes = {it.memory.untyped_storage().nbytes() for it in found.values()}
    assert len(memory) == 1
    assert sizes == {sum(rooms.values())}
    ends = sorted((it.memory.data_ptr(), it.memory.numel()) for it in found.values())
    assert all(at + size <= other for (at, size), (other, _) in pairwise(ends))
    assert not any((at - ends[0][0]) % 512 for at, _ in ends)
    for name, it in found.items():
        assert torch.equal(bits(PackedTensor(it).decoded()), bits(weights[name])), name
    kinds = {name.partition(".")[0]: type(it) for name, it in found.items()}
    assert kinds == {"largest": Windowed, "some": Windowed, "few": Windowed, "many": Resident}
    assert found["some.weight"].packed_bytes > rooms[next(it for it in rooms if it.name == "some.weight")]
    for it in found.values():
        if isinstance(it, Windowed):
            assert (it.strip_bytes, it.budgeted) == (64 << 20, True)


def test_a_blob_takes_the_start_of_its_room(weights: dict[str, Any]) -> None:
    matrix = weights["largest.weight"]
    alone = windowing.encode(matrix)
    assert alone is not None
    size = alone.blob.numel()
    room = torch.full((size + 100,), 7, dtype=torch.uint8)
    made = windowing.encode(matrix, None, room)
    assert made is not None
    assert made.blob.data_ptr() == room.data_ptr()
    assert torch.equal(room[:size], alone.blob)
    assert (room[size:] == 7).all()
    elsewhere = windowing.encode(matrix, None, room.to("meta"))
    assert elsewhere is not None
    assert (elsewhere.blob.device.type, elsewhere.blob.numel()) == ("meta", size)
    assert windowing.encode(matrix, None, room[: size - 1]) is None
    assert windowing.encode(matrix, size - 1, room) is None


class Noted:
    """A file that notes what is read of it, by the parts that begin there."""

    def __init__(self, inner: Any, log: list[str]) -> None:
        self.name, self.size, self.view, self.close = inner.name, inner.size, inner.view, inner.close
        self._inner, self._log = inner, log
        self.parts: dict[int, str] = {}

    def read_into(self, offset: int, out: memoryview) -> None:
        self._log.append(f"read {self.parts[offset]}")
        self._inner.read_into(offset, out)


def test_what_is_read_at_a_time(rooms: dict[Any, int]) -> None:
    """As many blobs as fit beside one of them plain; those that do not fit alone are encoded on the host."""
    log: list[str] = []
    _, _, few, many = ((-(-it.extent.size // 512) * 512, it.nbytes) for it in rooms)
    names = {it.extent.size: it.name.partition(".")[0] for it in rooms}
    noted = Noted(next(iter(rooms)).extent.source, log)
    for it in rooms:
        noted.parts[it.extent.offset] = names[it.extent.size]
        it.extent = it.extent._replace(source=noted)

    def at(room: int) -> list[list[str]]:
        """Groups in the order of their use."""
        log.clear()
        bring_windows(rooms, CPU, room, lambda size: log.append(names[size]))
        found: list[list[str]] = []
        for number, it in enumerate(log):
            if it.startswith("read"):
                continue
            if log[number - 1].startswith("read"):
                there = {name.removeprefix("read ") for name in log[:number] if name.startswith("read")}
                found.append([])
            found[-1].append(it)
            assert it in there, "its group was read first"
        assert sum(it.startswith("read") for it in log) == len(rooms), "once"
        return found

    spare = window_weights.SPARE_BYTES
    assert at(0) == [["largest"], ["some"], ["many"], ["few"]]
    assert at(spare + sum(many) - 1) == [["largest"], ["many"], ["some"], ["few"]]
    assert at(spare + sum(many)) == [["largest"], ["some"], ["many"], ["few"]]
    assert at(spare + few[0] + sum(many)) == [["largest"], ["some"], ["many", "few"]]
    assert at(1 << 30) == [["largest", "some", "many", "few"]]


def test_groups_are_bounded(rooms: dict[Any, int]) -> None:
    ordered = sorted(rooms, key=lambda it: -it.nbytes)
    for room in range(0, 4 * ordered[0].nbytes, ordered[0].nbytes // 7):
        groups = list(groups_in(room, ordered))
        assert [it for group in groups for it in group] == ordered
        for group in groups:
            there = sum(-(-it.extent.size // 512) * 512 for it in group) + max(it.nbytes for it in group)
            assert len(group) == 1 or there <= room
    largest, some, many, few = ordered
    plain = some.nbytes + many.nbytes
    assert list(groups_in(1 << 30, ordered, group_bytes=plain)) == [[largest], [some, many], [few]]
    assert list(groups_in(1 << 30, ordered, group_bytes=plain - 1)) == [[largest], [some], [many, few]]


def test_damage_is_told(tmp_path: Path, weights: dict[str, Any], rooms: dict[Any, int]) -> None:
    path = tmp_path / "model.safetensors"
    data = bytearray(path.read_bytes())
    (part,) = (it for it in rooms if it.name == "few.weight")
    data[part.extent.offset + part.extent.size - 200] ^= 0x55
    path.write_bytes(data)
    with pytest.raises(Corrupt, match=r"few\.weight"):
        bring_windows(rooms, CPU, 1 << 30)


def test_no_room_at_all(rooms: dict[Any, int], monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch)
    card.free = 0
    card.exhaust(monkeypatch, sum(rooms.values()))
    with pytest.raises(OutOfMemory, match="the room for weights in the window layout"):
        bring_windows(rooms, CPU, 1 << 30)
    assert bring_windows({}, CPU, 1 << 30) == {}


# ---- what stays packed in the place of one in windows ----


@pytest.mark.parametrize("strip", [64 << 20, 160 << 10])
def test_too_many_escapes(
    strip: int,
    rooms: dict[Any, int],
    weights: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is multiplied from a buffer of the size that was planned, whatever else there is."""
    found = bring_windows(rooms, CPU, 1 << 30)
    parts = {it.name: PackedTensor(found[it.name]) for it in rooms}
    with caplog.at_level(logging.WARNING, "tpde"):
        told = settle(parts, {it.name: min(strip_room(it), strip) for it in rooms})
    assert "1 of 4 weights have too many escapes" in caplog.text
    assert "`many.weight`" in caplog.text
    there = [it for it in found.values() if isinstance(it, Windowed)]
    assert told == {"window_weights": 3, "window_bytes": sum(it.packed_bytes for it in there)}
    assert parts["largest.weight"].tile_bytes == 0
    model = nn.Module()
    with torch.device("meta"):
        for name, it in weights.items():
            setattr(model, name.partition(".")[0], nn.Linear(*reversed(it.shape), bias=False, dtype=it.dtype))
    for name, it in parts.items():
        replace_parameter(model, name, it)
    finish(model)
    (slot,) = model.many.tpde_slots.values()
    (part,) = (it for it in rooms if it.name == "many.weight")
    assert slot.packed.tile_bytes == slot.group.pool.capacity == min(strip_room(part), strip)
    tiles = row_tiles(*part.shape, 2, slot.packed.sources[0].header.chunk_words, slot.packed.tile_bytes)
    assert len(tiles) == (1 if strip > part.nbytes else 2)
    x = torch.randn(3, 512).to(torch.bfloat16)
    with torch.no_grad():
        for name, weight in weights.items():
            made = getattr(model, name.partition(".")[0])(x)
            parts_of = tiles if name == "many.weight" else [(0, len(weight))]
            expected = torch.cat([functional.linear(x, weight[slice(*it)]) for it in parts_of], -1)
            assert torch.equal(bits(made), bits(expected)), name


# ---- what a plan counts ----


class Model(nn.Module):
    def __init__(self, rows: dict[str, int]) -> None:
        super().__init__()
        for name, count in rows.items():
            self.add_module(name, nn.Linear(512, count, bias=False, dtype=torch.bfloat16))


def test_units(checkpoint: Checkpoint, rooms: dict[Any, int], weights: dict[str, Any]) -> None:
    runs = {name: Run(it.spec.shape, it.dtype, [it]) for name, it in checkpoint.packed.items()}
    with torch.device("meta"):
        model = Model({name.partition(".")[0]: len(it) for name, it in weights.items()})
    assert all(it.windows is None for it in units_of(model, runs))
    for unit in units_of(model, runs, None, set(runs) - {"few.weight"}):
        (part,) = (it for it in rooms if it.name == f"{unit.name}.weight")
        if unit.name == "few":
            assert unit.windows is None
            continue
        found = unit.windows
        assert found is not None
        assert (found.size, found.read, found.beside) == (rooms[part], rooms[part], 0)
        assert found.matrices == unit.plain == part.nbytes
        assert found.strip == part.nbytes + 2 * 65536
        assert found.rows == part.shape[0]


def test_only_what_gains_is_there(checkpoint: Checkpoint) -> None:
    part = checkpoint.packed["few.weight"]
    header = header_of(part)
    room = window_room(part, header)
    assert 0.7 * part.nbytes < room < 0.75 * part.nbytes
    assert room >= part.extent.size, "it may stay packed, and have that room"
    most = int(0.85 * part.nbytes)
    for size, kept in ((most, most // 512 * 512), (most + 512, 0)):
        part.extent = part.extent._replace(size=size // 512 * 512)
        assert window_room(part, header) == kept, "hardly less than plain"


def test_a_row_must_fit_where_rows_are_decoded(checkpoint: Checkpoint) -> None:
    """For the case that it stays packed."""
    part = checkpoint.packed["few.weight"]
    header = header_of(part)
    for columns, there in ((30 << 20, True), (33 << 20, False)):
        part.spec = TensorSpec("BF16", (16, columns))
        assert bool(window_room(part, header)) == there
    part.spec = TensorSpec("BF16", (1 << 14, 1 << 12))
    assert strip_room(part) == 64 << 20, "of larger ones a part at a time"
    part.spec = TensorSpec("BF16", (1 << 10, 1 << 12))
    assert part.nbytes < strip_room(part) < part.nbytes + (1 << 20)


def test_what_must_be_whole_on_a_gpu_has_no_windows(weights: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(
        pack_bytes(
            safetensors_bytes(
                {"few": (TensorSpec("BF16", (128, 512)), bits(weights["few.weight"]).numpy().tobytes())}
            ),
            codec="zstd",
        )
    )
    with Checkpoint([tmp_path / "model.safetensors"]) as found:
        part = found.packed["few"]
        assert window_room(part, header_of(part)) == 0
