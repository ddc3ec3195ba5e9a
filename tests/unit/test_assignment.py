"""Where a model's tensors go: parameters, buffers, devices; and shapes and configurations that do not fit."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")

from tpde.errors import InvalidInput, UnsupportedDevice, UnsupportedVersion  # noqa: E402
from tpde.loading import devices  # noqa: E402
from tpde.loading.assignment import assign  # noqa: E402
from tpde.loading.quantized import PackedConfig  # noqa: E402


def test_devices_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert devices.checked_device("cuda") == torch.device("cuda", 1)
    assert devices.checked_device(0) == torch.device("cuda", 0)
    for index in (2, 3):
        with pytest.raises(
            UnsupportedDevice, match=f"there is no `cuda:{index}`, the last device is `cuda:1`"
        ):
            devices.checked_device(index)
    with pytest.raises(UnsupportedDevice, match="not on `meta`"):
        devices.checked_device("meta")


@pytest.mark.parametrize(("before", "frozen", "after"), [(1, 0, 1), (1, 1, 1), (0, 0, 1), (0, 1, 0)])
def test_what_was_frozen_stays_so_where_that_is_asked_for(before: int, frozen: int, after: int) -> None:
    layer = torch.nn.Linear(4, 3)
    layer.weight.requires_grad_(bool(before))
    assign(layer, "weight", torch.ones(3, 4), frozen=bool(frozen))
    assert layer.weight.requires_grad == bool(after)
    with pytest.raises(
        InvalidInput, match=r"has shape \[4, 3\] in the packed files, the model needs \[3, 4\]"
    ):
        assign(layer, "weight", torch.ones(4, 3))


def test_configurations_that_cannot_run() -> None:
    PackedConfig()
    with pytest.raises(UnsupportedVersion, match="format version 2"):
        PackedConfig(2)
    for source in ({"quant_method": "fp8"}, "fp8"):
        with pytest.raises(InvalidInput, match="quantized with `fp8` before it was packed"):
            PackedConfig(source=source)
    with pytest.raises(InvalidInput, match="quantized in a way that is not named before it was packed"):
        PackedConfig(source={})


def test_buffers_have_their_places_too() -> None:
    norm = torch.nn.BatchNorm1d(3)
    assign(norm, "running_mean", torch.full((3,), 7.0))
    assert norm.running_mean.tolist() == [7.0] * 3
    assert "running_mean" in dict(norm.named_buffers())
    for name, shape, needed in (
        ("running_mean", (4,), r"\[3\]"),
        ("nothing", (3,), "none"),
        ("weight", (4,), r"\[3\]"),
    ):
        with pytest.raises(InvalidInput, match=rf"has shape .* the model needs {needed}") as caught:
            assign(norm, name, torch.zeros(shape))
        assert caught.value.where == name
    whole = torch.nn.Linear(2, 2)
    whole.weight = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.int8), requires_grad=False)
    assign(whole, "weight", torch.ones(2, 2, dtype=torch.int8))
    assert not whole.weight.requires_grad, "integers have none"
