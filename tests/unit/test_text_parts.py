"""What perplexities of whole windows are of."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")

from support.llama import llama  # noqa: E402

from benchmarks.harness import parts  # noqa: E402
from benchmarks.harness.parts import Reader, in_parts, sums_of  # noqa: E402


@pytest.mark.parametrize("length", [150, 129])
def test_parts_give_what_one_forward_pass_does(length: int) -> None:
    """Of each token but the first of a window, in parts that cut windows, and in a last batch of few."""
    torch.manual_seed(0)
    model = llama(initializer_range=0.3).float().eval()
    windows = torch.randint(0, 1000, (parts.GROUP + 3, length))
    with torch.no_grad():
        logits = model(windows).logits[:, :-1]
    wanted = -torch.nn.functional.cross_entropy(
        logits.flatten(0, 1).double(), windows[:, 1:].flatten(), reduction="none"
    ).view(len(windows), -1)
    readers = {"all": Reader(model), "few": Reader(model, 8), "more": Reader(model, 100)}
    for sums in sums_of(readers, windows, "cpu", 100).values():
        assert sums.dtype == torch.float64
        assert torch.allclose(sums, wanted.sum(1), rtol=1e-5)


def test_how_many_rows_are_multiplied_at_a_time() -> None:
    """By each linear layer, and within `in_parts` alone."""
    seen: list[int] = []

    class Counting(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(len(x))
            return super().forward(x)

    layers, x = torch.nn.Sequential(Counting(4, 6, bias=False), Counting(6, 3)), torch.rand(3, 3, 4)
    with in_parts(layers, 4):
        made = layers(x)
    assert seen == [4, 4, 1, 4, 4, 1]
    assert torch.allclose(made, layers(x))
    with in_parts(layers, None):
        layers(x)
    assert seen[6:] == [3, 3, 3, 3]


def test_no_more_windows_than_there_is_time_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is looked at once for some groups, after the first, too."""
    monkeypatch.setattr(parts, "GROUP", 1)
    monkeypatch.setattr(parts, "PROGRESS", 4)
    model, windows = llama().float().eval(), torch.randint(0, 1000, (6, 12))
    readers = {"all": Reader(model)}
    monkeypatch.setattr(parts.time, "monotonic", iter(range(9)).__next__)
    assert [len(sums_of(readers, windows, "cpu", seconds)["all"]) for seconds in (1, 0.5)] == [5, 1]
