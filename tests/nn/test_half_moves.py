"""Moves that fail halfway, as without memory: what was moved is there, and moving again goes on."""

from __future__ import annotations

from typing import Any

import pytest
from support.emulated import on_cpu  # noqa: F401
from support.models import assert_same_bits
from support.parameters import draw, packed
from support.row_tunes import IDS, Tunes
from support.small import torch

from tpde.errors import InvalidInput
from tpde.nn import PackedTensor
from tpde.weights.changed import Changed
from tpde.weights.windowed import Windowed

MOST = 16  # bytes by which functions are tried


class Move:
    """Copies bytes; of the copy that has number `fails`, says that there is no memory for it."""

    def __init__(self, fails: int | None = None) -> None:
        self.fails, self.count = fails, 0

    def __call__(self, blob: Any) -> Any:
        if blob.numel() <= MOST:
            return blob.clone()
        self.count += 1
        if self.count == self.fails:
            raise torch.OutOfMemoryError("no memory")
        return blob.clone()


def windows() -> PackedTensor:
    """Experts, each a source of its own, in windows."""
    parts = [Windowed.of(packed(draw(64, 32, seed=it)).packed.sources[0], 9) for it in range(3)]
    return PackedTensor([it for it in parts if it is not None], (3, 64, 32), "experts")


@pytest.mark.parametrize("fails", [1, 2, 3])
@pytest.mark.parametrize("kind", ["codes", "windows"])
def test_users_are_told_of_half_a_move(kind: str, fails: int) -> None:
    weights = [draw(64, 32, seed=it) for it in range(3)]
    made = windows()
    if kind == "codes":
        made = PackedTensor([packed(it).packed.sources[0] for it in weights], (3, 64, 32))
    told: list[str] = []

    class User:
        def changed(self) -> None:
            told.append("changed")

    user = User()
    made.watch(user)  # type: ignore[arg-type]
    made.prepare()
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        made.apply(Move(fails))
    assert told == ["changed"] * (fails > 1)
    assert_same_bits(made.decoded(), torch.stack(weights))
    made.apply(Move())
    assert told == ["changed"] * (1 + (fails > 1))
    assert_same_bits(made.decoded(), torch.stack(weights))


@pytest.mark.parametrize("which", [0, 1])
def test_what_is_on_two_devices_is_not_decoded(which: int) -> None:
    made = windows()
    made.sources[which]._device = torch.device("meta")  # type: ignore[attr-defined]
    with pytest.raises(InvalidInput, match=r"is on (meta|cpu), the weights decoded with it on") as error:
        made.prepare()
    assert "move the whole block to one device" in str(error.value)
    rows = PackedTensor(made.sources, (192, 32), "rows")
    for read in (rows.prepare, rows.span(100 * 64, 110 * 64).decoded):
        with pytest.raises(InvalidInput, match="the weights decoded with it on"):
            read()


def test_half_a_move_of_what_deltas_change_counts(tunes: Tunes) -> None:
    tunes.packed.use("math")
    source = tunes.packed.blocks[0].up.weight.packed.sources[0]
    assert isinstance(source, Changed)
    total = Move()
    source.apply(total)
    assert total.count > 2
    for fails in range(1, total.count + 1):
        before, variants, version = source.base.memory, source.variants, source.version
        with pytest.raises(torch.OutOfMemoryError, match="no memory"):
            source.apply(Move(fails))
        moved = source.base.memory is not before or source.variants != variants
        assert moved == (source.version > version)
        for name in ("math", "law"):
            tunes.packed.use(name)
            tunes.check([name] * len(IDS))
    source.apply(Move())
    tunes.check(["law"] * len(IDS))


def test_kernels_read_no_changes_that_are_elsewhere(on_cpu: None, tunes: Tunes) -> None:  # noqa: F811
    source = tunes.packed.blocks[0].up.weight.packed.sources[0]
    for variant in source.variants.values():
        for change in variant.changes:
            change.data = change.data.to("meta")
    with pytest.raises(InvalidInput, match="changes are on meta, the weight that they change on cpu"):
        PackedTensor(source).prepare()


def test_a_window_without_memory_for_its_launches_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    (source, *_) = windows().sources
    before = source.memory, source.version

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(Windowed, "_tell", fail)
        with pytest.raises(torch.OutOfMemoryError, match="no memory"):
            source.apply(Move())
    assert (source.memory, source.version) == before
    source.apply(Move())
    assert source.memory is not before[0]
