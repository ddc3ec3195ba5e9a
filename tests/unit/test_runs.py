"""Runs answer torch's functions as tensors would, or not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from support.card import Card  # noqa: E402

from tpde.errors import OutOfMemory  # noqa: E402
from tpde.loading import runs  # noqa: E402
from tpde.loading.runs import STRIP_BYTES, NotARun, Run  # noqa: E402
from tpde.nn import pack_tensor  # noqa: E402


class Leaf:
    """A part with real words, to compare with what torch makes of them."""

    def __init__(self, *shape: int) -> None:
        self.words = torch.randint(0, 1 << 30, shape, dtype=torch.int32)
        self.nbytes = self.words.numel() * 4


def _both(*shapes: tuple[int, ...]) -> tuple[list[Any], list[Run[Leaf]]]:
    leaves = [Leaf(*shape) for shape in shapes]
    return [leaf.words for leaf in leaves], [Run(leaf.words.shape, torch.int32, [leaf]) for leaf in leaves]


def _same(run: Run[Leaf], tensor: Any) -> None:
    assert isinstance(run, Run)
    assert tuple(run.shape) == tuple(tensor.shape)
    words = [it.tensor.words.reshape(-1)[it.begin // 4 : it.end // 4] for it in run.spans]
    assert torch.equal(torch.cat([*words, torch.empty(0, dtype=torch.int32)]), tensor.reshape(-1))
    assert all(it.nbytes for it in run.spans)


WHOLE: list[Callable[..., Any]] = [
    lambda a, b, c, d: torch.stack([a, b, c, d], dim=0),
    lambda a, b, c, d: torch.stack([a, b]),
    lambda a, b, c, d: torch.cat([a, b], dim=0),
    lambda a, b, c, d: torch.cat([torch.stack([a, b]), torch.stack([c, d])], dim=1),  # gate, up of experts
    lambda a, b, c, d: torch.cat([torch.stack([a, b]), torch.stack([c, d])], dim=-2),
    lambda a, b, c, d: torch.cat([torch.stack([a, b]), torch.stack([c, d])], dim=0),
    lambda a, b, c, d: torch.chunk(torch.stack([a, b, c, d]), 4, dim=0)[2].squeeze(0),
    lambda a, b, c, d: torch.chunk(torch.stack([a, b, c, d]), 3, dim=0)[1].contiguous(),
    lambda a, b, c, d: torch.chunk(torch.cat([torch.stack([a, b]), torch.stack([c, d])], dim=1), 2, dim=1)[1],
    lambda a, b, c, d: torch.stack([a, b]).chunk(2)[0],
    lambda a, b, c, d: torch.unbind(torch.stack([a, b, c]))[1],
    lambda a, b, c, d: torch.split(torch.cat([a, b, c, d]), [4, 12])[1],
    lambda a, b, c, d: torch.split(torch.cat([a, b, c, d]), 8)[1],
    lambda a, b, c, d: torch.stack([a, b]).unsqueeze(1).squeeze(),
    lambda a, b, c, d: torch.cat(torch.chunk(a, 3)),  # cut, and whole again
    lambda a, b, c, d: a.unsqueeze(-1),
    lambda a, b, c, d: a.unsqueeze(-1).squeeze(-1),
    lambda a, b, c, d: a.unsqueeze(0).squeeze(1),  # which is no dimension of one
    lambda a, b, c, d: a.unsqueeze(1).squeeze(-2),
    lambda a, b, c, d: torch.unbind(torch.stack([a, b]), dim=-3)[1],
    lambda a, b, c, d: torch.split(torch.cat([a, b, c, d]), 16)[0],
    lambda a, b, c, d: torch.concat([a, b], -2),
]
CUT: list[Callable[..., Any]] = [
    lambda a, b, c, d: torch.chunk(a, 2)[0],
    lambda a, b, c, d: torch.chunk(a, 2)[1],
    lambda a, b, c, d: torch.chunk(a, 3)[1],  # two, two, and none
    lambda a, b, c, d: torch.split(a, [1, 3])[1],
    lambda a, b, c, d: torch.split(a, [3, 1])[0],
    lambda a, b, c, d: torch.split(a, 3)[1],
    lambda a, b, c, d: torch.split(torch.stack([a, b]), [1, 1])[1].squeeze(0).chunk(4)[3],
    lambda a, b, c, d: torch.split(torch.cat([a, b, c]), [2, 7, 3])[1],  # through two, and all of one
    lambda a, b, c, d: torch.unbind(a)[3],
    lambda a, b, c, d: torch.cat([torch.chunk(a, 2)[1], torch.chunk(a, 2)[0]]),  # in another order
    lambda a, b, c, d: torch.cat([torch.chunk(a, 2)[1], b, torch.chunk(c, 2)[0]]),
    lambda a, b, c, d: torch.stack([torch.chunk(a, 4)[1], torch.chunk(b, 4)[1]]),
    lambda a, b, c, d: torch.split(a, [0, 4, 0])[0],  # nothing
    lambda a, b, c, d: torch.split(a, [0, 4, 0])[2],
    lambda a, b, c, d: torch.chunk(torch.split(a, [4, 0])[1], 3)[2],
]
COLUMNS: list[Callable[..., Any]] = [
    lambda a, b, c, d: torch.cat([a, b], dim=1),  # rows of two blobs in turn
    lambda a, b, c, d: torch.stack([a, b], dim=1),
    lambda a, b, c, d: torch.chunk(a, 3, dim=1)[1],
    lambda a, b, c, d: torch.split(a, [2, 1], dim=1 - a.ndim)[1],
    lambda a, b, c, d: torch.chunk(torch.stack([a, b]), 2, dim=1)[1],  # of experts
    lambda a, b, c, d: torch.unbind(torch.stack([a, b]), dim=1)[2],
]


@pytest.mark.parametrize("make", [*WHOLE, *CUT])
def test_the_same_as_torch(make: Callable[..., Any]) -> None:
    tensors, made = _both(*[(4, 3)] * 4)
    _same(make(*made), make(*tensors))
    assert make(*made).whole == (make in WHOLE)


@pytest.mark.parametrize("make", COLUMNS)
def test_columns(make: Callable[..., Any]) -> None:
    """Cuts into many short spans are refused: each would decode the chunks of its neighbours."""
    tensors, made = _both(*[(4, 3)] * 4)
    with pytest.raises(NotARun):
        make(*made)
    tensors, made = _both(*[(4, 3, STRIP_BYTES // 4)] * 4)  # of longer rows
    _same(make(*made), make(*tensors))


@pytest.mark.parametrize(
    "make",
    [
        lambda a, b: torch.split(torch.stack([a, b]), [1, 2]),
        lambda a, b: torch.transpose(a, 0, 1),
        lambda a, b: a.transpose(0, 1),
        lambda a, b: a.view(2, 6),
        lambda a, b: a.reshape(-1),
        lambda a, b: a.T,
        lambda a, b: torch.cat([a, torch.zeros(4, 3, dtype=torch.int32)]),
        lambda a, b: torch.stack([a, b.squeeze().unsqueeze(0)]),
        lambda a, b: torch.cat([a, Run(b.shape, torch.int64, b.parts)]),
    ],
)
def test_what_is_no_sequence_of_spans(make: Callable[..., Any]) -> None:
    _, made = _both((4, 3), (4, 3))
    with pytest.raises(NotARun):
        make(*made)


@pytest.mark.parametrize("refused", [False, True])
def test_how_short_a_strip_may_be(refused: bool) -> None:
    """A strip is what lies together of a piece, however long the piece next to it is."""
    short = STRIP_BYTES // 4 - refused
    (a,), (made,) = _both((3, 4 * short))
    for sizes in ([short, 3 * short], [3 * short, short], [short, 0, 3 * short]):
        if refused:
            with pytest.raises(NotARun):
                torch.split(made, sizes, dim=1)
        else:
            for found, expected in zip(
                torch.split(made, sizes, dim=1), torch.split(a, sizes, dim=1), strict=True
            ):
                _same(found, expected)
    _same(torch.split(made, [1, 2])[0], torch.split(a, [1, 2])[0])  # rows are no strips


def test_what_a_run_says_of_itself() -> None:
    _, (made,) = _both((4, 3))
    assert made.dim() == made.ndim == 2
    assert (made.size(), made.size(0), made.size(-1)) == (torch.Size([4, 3]), 4, 3)
    assert made.contiguous() is made
    assert (made.nbytes, made.whole) == (48, True)
    assert made.parts == (made.spans[0].tensor,)
    nothing = torch.split(made, [0, 4])[0]
    assert (nothing.nbytes, nothing.whole) == (0, False)


@pytest.mark.parametrize(
    ("one", "other", "dim"),
    [((4, 3), (2, 4, 3), 0), ((4, 3), (4, 2), 0), ((2, 4, 3), (2, 5, 3), 0), ((2, 4, 3), (3, 4, 3), 1)],
)
def test_what_cannot_be_joined(one: Any, other: Any, dim: int) -> None:
    """However long their rows are."""
    _, made = _both(*((*it[:-1], it[-1] * STRIP_BYTES // 16) for it in (one, other)))
    with pytest.raises(NotARun):
        torch.cat(made, dim)


class Opened:
    """A blob, by its tensor; notes when it is opened."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def __call__(self, part: Any) -> Any:
        self.log.append(part.name)
        return part.source


def _parts(*names: str) -> list[Any]:
    made = []
    for seed, name in enumerate(names):
        torch.manual_seed(seed)
        words = torch.randn(64, 40).to(torch.bfloat16)
        packed = pack_tensor(words, name)
        assert packed is not None
        (source,) = packed.sources
        made.append(Part(name=name, nbytes=words.nbytes, words=words, source=source))
    return made


class Part(SimpleNamespace):
    __hash__ = object.__hash__


def test_each_blob_is_opened_once_for_all_that_is_cut_from_it() -> None:
    parts, opened = _parts("a", "b"), Opened()
    a, b = (Run(it.words.shape, torch.bfloat16, [it]) for it in parts)
    whole = torch.cat([it.words for it in parts])
    made = [torch.cat([a, b]), *torch.chunk(torch.cat([a, b]), 3), torch.split(a, [0, 64])[0]]
    wanted = [whole, *torch.chunk(whole, 3), whole[:0]]
    for dtype in (None, torch.float64):
        opened.log.clear()
        for found, expected in zip(
            runs.decoded(made, torch.device("cpu"), opened, dtype), wanted, strict=True
        ):
            assert found.dtype is (dtype or torch.bfloat16)
            assert torch.equal(found, expected.to(found.dtype))
        assert opened.log == ["a", "b"]


def test_what_there_is_no_room_for_is_named() -> None:
    (part,), opened = _parts("a"), Opened()
    run = Run(part.words.shape, torch.bfloat16, [part])
    for made, least, said in (
        ([run], 64 * 40 * 4, "`a`, decoded, needs"),
        ([torch.split(run, [0, 64])[0]], 1, "`nothing`, decoded, needs"),
    ):
        for short in (0, 1):
            with pytest.MonkeyPatch.context() as patch:
                Card(patch).exhaust(patch, least + 1 - short)
                with pytest.raises(OutOfMemory, match=said) if short else contextlib.nullcontext():
                    runs.decoded(made, torch.device("cpu"), opened, torch.float32)


def test_what_no_tensor_has() -> None:
    _, (a,) = _both((4, 3))
    with pytest.raises(AttributeError, match="`nothing`"):
        a.nothing  # noqa: B018 - raises
