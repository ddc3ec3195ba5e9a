"""Packed weights are hidden from transformers while it loads, and shown when they are tied, or in the end."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", minversion="5.13", reason="needs transformers 5.13")

from tpde.integrations.transformers.placeholders import Placeholders  # noqa: E402


class Loading(torch.nn.Module):
    """A model as transformers has it."""

    _keys_to_ignore_on_load_unexpected = {"known"}  # noqa: RUF012 - as transformers has it

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        self.ties = 0

    def tie_weights(self, how: str = "") -> str:
        """Ties."""
        self.ties += 1
        return f"tied {how}"


@pytest.mark.parametrize("own", [False, True])
def test_hidden_weights_are_shown_when_they_are_tied(own: bool) -> None:
    model, done = Loading(), list[int]()
    if own:
        model._keys_to_ignore_on_load_unexpected = {"mine"}
    every = list(model.state_dict())
    places = Placeholders(model, ["a.weight"], ["a.weight"], lambda: done.append(len(model.state_dict())))
    assert getattr(model.a.weight, "_is_hf_initialized", False)
    assert not hasattr(model.b.weight, "_is_hf_initialized")
    assert list(model.state_dict()) == [it for it in every if it != "a.weight"]
    assert "x.a.weight" not in model.state_dict(prefix="x.")
    patterns = {"mine" if own else "known", "_tpde$", r"(^|\.)(a\.weight)$"}
    assert model._keys_to_ignore_on_load_unexpected == patterns
    assert not done
    assert model.tie_weights("now") == "tied now"
    assert (done, model.ties) == ([4], 1), "by then they are shown"
    assert model.tie_weights(how="again") == "tied again"
    assert done == [4]
    assert list(model.state_dict()) == every
    assert model._keys_to_ignore_on_load_unexpected == patterns, "until the report of what was not expected"
    places.close()
    assert done == [4]
    assert model._keys_to_ignore_on_load_unexpected == ({"mine"} if own else {"known"})
    assert ("_keys_to_ignore_on_load_unexpected" in vars(model)) == own
    assert "tie_weights" not in vars(model)


def test_weights_that_nobody_has_tied_are_shown_in_the_end() -> None:
    model, done = Loading(), list[int]()
    places = Placeholders(model, ["b.weight"], [], lambda: done.append(1))
    places.close()
    assert done == [1]
    assert "b.weight" in model.state_dict()
    assert model.ties == 0


@pytest.mark.parametrize("inference", [False, True])
def test_what_is_written_to_is_noticed(inference: bool) -> None:
    """A part of a weight has no mark; weights that are made in inference mode count no writes."""
    with torch.inference_mode(inference), torch.device("meta"):
        model = Loading()
    model.b.bias = torch.nn.Parameter(torch.ones(2))  # decoded: it has what was written
    places = Placeholders(model, ["a.weight", "b.weight", "b.bias"], [], lambda: None)
    with torch.inference_mode(inference):
        model.a.weight.detach()[0].zero_()
    with torch.no_grad():
        model.b.bias[0].zero_()
    model.tie_weights()
    assert places.written == ([] if inference else ["a.weight"])
