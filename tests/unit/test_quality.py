"""What `python -m benchmarks quality` reads, and how it compares."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")

from support.llama import llama  # noqa: E402

import tpde  # noqa: E402
from benchmarks import quality  # noqa: E402
from benchmarks.harness import texts  # noqa: E402
from benchmarks.harness.report import Page  # noqa: E402
from benchmarks.harness.texts import tokens_of  # noqa: E402
from benchmarks.quality import (  # noqa: E402
    FUSED,
    OTHERS,
    PLAIN,
    Seen,
    Way,
    compare,
    largest_two,
    look,
    measure,
    multiplied,
)
from benchmarks.serve.models import make  # noqa: E402
from tpde.nn import packed_modules  # noqa: E402


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "device", lambda: "cpu")


@pytest.mark.parametrize("length", [150, 129])
def test_steps_and_batches_give_what_one_forward_pass_does(length: int) -> None:
    """Of each token but the first of a window, in steps that cut windows, and in a last group of few."""
    torch.manual_seed(0)
    model = llama(initializer_range=0.3).float().eval()
    windows = torch.randint(0, 1000, (quality.GROUP + 3, length))
    with torch.no_grad():
        logits = model(windows).logits[:, :-1]
    ways = {PLAIN: Way(model, 1), "short": Way(model, 1, 8), "two": Way(model, 2), "all": Way(model, 8)}
    found = measure(ways, windows)
    for seen in found.values():
        assert torch.equal(seen.greedy, logits.argmax(-1))
        assert seen.moved.shape == (len(windows), length - 1)
        assert seen.moved.max() < 1e-3


def test_what_is_seen_in_logits() -> None:
    """They are those of plain's tokens, and of the one that is chosen."""
    plain = torch.tensor([[[1.0, 4.0, 3.5, 4.0], [0.0, 2.0, 1.0, -1.0]]]).bfloat16()
    ours = torch.tensor([[[1.0, 4.25, 4.5, 3.0], [0.0, 2.0, 1.5, -1.0]]]).bfloat16()
    top = largest_two(plain)
    assert top.tolist() == [[[1, 3], [1, 2]]]
    seen = look(ours, plain, top)
    assert seen.greedy.tolist() == [[2, 1]]
    assert seen.gaps.tolist() == [[0.5, 0.0]]
    assert seen.moved.tolist() == [[1.25, 0.5]]


def seen_of(greedy: list[int], gaps: list[float], moved: float) -> Seen:
    """Of one window."""
    differences = torch.zeros(1, len(greedy))
    differences[0, 0] = moved
    return Seen(torch.tensor([greedy]), torch.tensor([gaps]), differences)


@pytest.mark.parametrize(
    ("gap", "far"), [(0.2, 0), (0.25, 1), (math.nan, 1)], ids=["closer", "as the noise", "not a number"]
)
def test_greedy_tokens(gap: float, far: int) -> None:
    """They may differ where plain's logits are closer than the largest difference in any other batch."""
    one, *others, other = OTHERS
    plain = seen_of([5, 6, 7], [0.0, 0.0, 0.0], 0)
    found = {
        PLAIN: plain,
        **dict.fromkeys([one, *others], plain),
        other: seen_of([5, 6, 8], [0.0, 0.0, 0.375], 0.25),
        FUSED: seen_of([4, 6, 9], [0.125, 0.0, gap], 2.0),
    }
    page = Page("Quality", {})
    said = compare(page, found)
    assert [met for _, met in page.bars] == [not far]
    assert said["noise"] == 0.25, "of the plain model alone"
    assert [len(said["ways"][it]["differ"]) for it in (one, other, FUSED)] == [0, 1, 2]
    assert f"At {far} of the 2 positions" in page.markdown()
    assert page.markdown().count(" NO |") == far


def test_few_windows_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those the first group of several is read, and compared with the same windows of the plain model."""
    monkeypatch.setattr(quality, "GROUP", 2)
    monkeypatch.setattr(quality, "SEVERAL", 2)
    torch.manual_seed(0)
    model, windows = llama(initializer_range=0.3).float().eval(), torch.randint(0, 1000, (7, 12))
    found = measure({PLAIN: Way(model, 1), "some": Way(model, 1, 1, 2)}, windows)
    some, plain = found["some"], found[PLAIN]
    beside = quality.of_groups(plain, 2)
    assert torch.equal(beside.greedy, plain.greedy[[0, 1, 4, 5]])
    assert torch.equal(some.greedy, beside.greedy)


def test_the_list_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the positions where plain's logits are farthest apart; programs get all."""
    monkeypatch.setattr(quality, "LISTED", 2)
    plain = seen_of([5, 6, 7], [0.0, 0.0, 0.0], 0.25)
    found = dict.fromkeys([PLAIN, *OTHERS], plain) | {FUSED: seen_of([1, 2, 3], [0.0, 0.125, 0.0625], 0)}
    page = Page("Quality", {})
    said = compare(page, found)
    table = page.parts[-1]
    assert [row[:4] for row in table.rows] == [["0", "1", "6", "2"], ["0", "2", "7", "3"]]  # type: ignore[union-attr]
    assert [it["gap"] for it in said["ways"][FUSED]["differ"]] == [0.125, 0.0625, 0.0]


def run(folder: Path, words: str, file: str = "text.txt") -> Page:
    (folder / "text.txt").write_text(words)
    page = Page("Quality", {}, json=folder / "page.json")
    quality.run(
        argparse.Namespace(model=folder / "model", text=folder / file, tokens=60, rows=16, seconds=100), page
    )
    page.save()
    return page


@pytest.mark.parametrize("looked", [1, 12])
def test_a_model(looked: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, where fused kernels give the plain model's bits; greedy tokens are of the first windows."""
    monkeypatch.setattr(quality, "WINDOW", 24)
    monkeypatch.setattr(quality, "GROUP", 1)
    monkeypatch.setattr(quality, "LOOKED", looked)
    monkeypatch.setattr(quality, "multiplied", lambda *_: (16, 16))  # none is on the CPU
    make(tmp_path / "model", "tiny", 0)
    page = run(tmp_path, " ".join(f"t{5 + it * it % 7}" for it in range(80)))
    assert not page.missed
    assert len(page.bars) == 3
    found = json.loads((tmp_path / "page.json").read_text())["data"]
    assert found["texts"][FUSED] == found["texts"][PLAIN]
    assert found["texts"][PLAIN] | {"sums": []} == {"tokens": 46, "window": 24, "step": 64, "sums": []}
    assert list(found["texts"]) == [PLAIN, f"{PLAIN}, 64 rows", FUSED]
    assert found["ways"][FUSED] == {"differ": [], "moved": 0.0, "mostly_moved": 0.0}
    with pytest.raises(SystemExit, match="other` is not there"):
        run(tmp_path, "", "other")
    with pytest.raises(ValueError, match="less than two tokens"):
        run(tmp_path, "t5")


def test_weights_that_are_multiplied(tmp_path: Path) -> None:
    """Those in windows, if so many rows are multiplied from these; on the CPU none are."""
    make(tmp_path, "tiny", 0)
    model = tpde.from_pretrained(tmp_path, device="cpu", pack=True, kernels="fused")
    slots = [slot for _, it in packed_modules(model) for slot in it.tpde_slots.values()]
    count = sum(it.packed.multiplies for it in slots)
    assert 0 < count < len(slots)
    assert multiplied(model, 0) == (count, count)
    assert multiplied(model, 1) == (0, count)


def test_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Python files, in the order of their names, and no more than it takes."""
    for at, number in (("b.py", 2), ("a/z.py", 1), ("c.txt", 9), ("d.py", 3)):
        (tmp_path / at).parent.mkdir(exist_ok=True)
        (tmp_path / at).write_text(str(number))
    read: list[list[str]] = []

    def tokenizer(texts: list[str], verbose: bool) -> dict[str, list[list[int]]]:
        read.append(texts)
        return {"input_ids": [[int(it)] * 3 for it in texts]}

    assert tokens_of(tokenizer, tmp_path, 8) == [1, 1, 1, 2, 2, 2, 3, 3]
    assert tokens_of(tokenizer, tmp_path / "c.txt", 2) == [9, 9]
    assert tokens_of(tokenizer, tmp_path) == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    read.clear()
    monkeypatch.setattr(texts, "FILES", 1)
    assert tokens_of(tokenizer, tmp_path, 6) == [1, 1, 1, 2, 2, 2]
    assert read == [["1"], ["2"]]
