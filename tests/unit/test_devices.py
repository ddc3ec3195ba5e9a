"""Where models go: devices that users name, maps of them, and how much memory each has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")

from tpde.errors import InvalidInput, UnsupportedDevice  # noqa: E402
from tpde.files.target_device import target_device  # noqa: E402
from tpde.integrations.transformers.device_maps import device_of, devices_of, largest_block, spread  # noqa: E402
from tpde.loading.devices import WITHOUT_BUDGET, check_gpu, checked_device, map_entry  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs, of which the second is the current one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("named", "found"),
    [
        (None, "cuda:1"),
        ("cpu", "cpu"),
        (CPU, "cpu"),
        (0, "cuda:0"),
        (1, "cuda:1"),
        ("cuda", "cuda:1"),
        ("cuda:0", "cuda:0"),
        (torch.device("cuda"), "cuda:1"),
        (torch.device("cuda", 0), "cuda:0"),
    ],
)
def test_devices_that_are_there(named: Any, found: str) -> None:
    assert checked_device(named) == torch.device(found)


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("gpu", "`gpu` is no device"),
        (-1, "is no device"),
        (True, "`True` is no device"),
        (5.5, r"`5\.5` is no device"),
        (torch.float16, r"`torch\.float16` is no device"),
        ("meta", "not on `meta`"),
        ("mps", "not on `mps`"),
        (2, "there is no `cuda:2`, the last device is `cuda:1`"),
    ],
)
def test_devices_that_are_not_there(named: Any, said: str) -> None:
    with pytest.raises(UnsupportedDevice, match=said):
        checked_device(named)


def test_a_pytorch_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedDevice, match="there is no CUDA device that PyTorch can use") as caught:
        checked_device("cuda:0")
    assert 'run on the CPU with `device="cpu"`' in str(caught.value.hint)
    assert "vram" not in str(caught.value.hint)
    with pytest.raises(UnsupportedDevice, match="leave it out to run on the CPU, or see what `tpde doctor`"):
        checked_device("cuda", WITHOUT_BUDGET)
    assert checked_device("cpu") == checked_device(None) == CPU


def test_a_device_for_tensors() -> None:
    """Of any kind that PyTorch has."""
    assert target_device("meta") == torch.device("meta")
    assert target_device(CPU) == CPU
    for named in ("hip", "mtia:0"):  # of other builds of PyTorch
        with pytest.raises(UnsupportedDevice, match=f"PyTorch can put no tensors on `{named}`") as caught:
            target_device(named, "map_location")
        assert caught.value.where == "map_location"


def test_a_budget_of_a_gpu_is_for_one() -> None:
    for device in ("cpu", "disk", "meta", CPU):
        with pytest.raises(InvalidInput, match="goes to") as caught:
            check_gpu(device, "use another")
        assert (caught.value.where, caught.value.hint) == ("vram", "use another")
    for device in ("cuda", 0, "auto", torch.device("cuda", 1)):
        check_gpu(device, "")


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("a.b.c", "a.b"),
        ("a.b", "a.b"),
        ("a.bc", "a"),
        ("a", "a"),
        ("b.c", None),
        ("", None),
    ],
)
def test_the_closest_entry_of_a_map(name: str, entry: str | None) -> None:
    assert map_entry(name, {"a": 0, "a.b": 1}) == entry
    assert map_entry(name, {"": 0, "a": 0, "a.b": 1}) == ("" if entry is None else entry)
    assert map_entry(name, {}) is None


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("device_map", "found"),
    [
        (None, "cpu"),
        ({}, "cpu"),
        ({"": "cpu"}, "cpu"),
        ({"": 1}, "cuda:1"),
        ({"": "cuda"}, "cuda:1"),
        ({"": "cuda:0"}, "cuda:0"),
        ({"a": 0, "b": 1}, "cuda:0"),
        ({"a": "cuda:1", "b": "cpu"}, "cuda:1"),
        ({"a": 0, "b": "disk"}, "cuda:0"),
        ({"a": torch.device("cuda"), "b": 0}, "cuda:1"),
        ({"a": CPU, "b": "cpu"}, "cpu"),
    ],
)
def test_a_place_in_a_map(device_map: Any, found: str) -> None:
    assert device_of("a.weight", device_map) == torch.device(found)


@pytest.mark.parametrize(
    ("device_map", "said"),
    [
        ({"b": 0}, "no place for `a.weight`"),
        ({"": "disk"}, "`device_map` puts `the model` on disk beside cpu"),
        ({"a": "disk", "b": "cpu"}, "puts `a` on disk beside cpu"),
        ({"a": "cpu", "b": 1, "c": 0}, "puts `a` on cpu beside 0, 1"),
        ({"a": "cpu", "b": "disk", "c": 0}, "puts `a` on cpu beside 0"),
    ],
)
def test_a_map_that_cannot_be(device_map: Any, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        device_of("a.weight", device_map)


def test_where_all_of_a_model_goes() -> None:
    """Tied parameters by each of their names; what a map says nothing of is left out."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 2))
    model[2].weight = model[0].weight
    names = {*dict(model.named_parameters(remove_duplicate=False)), *dict(model.named_buffers())}
    assert "2.weight" in names
    assert devices_of(model, None) == dict.fromkeys(names, CPU)
    found = devices_of(model, {"0": 0, "1.running_mean": 1})
    assert found == {
        "0.weight": torch.device("cuda", 0),
        "0.bias": torch.device("cuda", 0),
        "1.running_mean": torch.device("cuda", 1),
    }


def test_the_largest_block_or_weight() -> None:
    sizes = {"embed.weight": 70, "layers.0.a": 30, "layers.0.b": 50, "layers.1.a": 60, "layers.10.a": 19}
    assert largest_block(sizes) == 80
    assert largest_block(sizes | {"embed.weight": 90}) == 90
    assert largest_block(sizes | {"layers.1.c": 31}) == 91
    assert largest_block({}) == 0


def _model(sizes: dict[str, int]) -> Any:
    found = [(name, SimpleNamespace(numel=lambda size=size: size)) for name, size in sizes.items()]
    return SimpleNamespace(named_parameters=lambda: found)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_model_is_spread_evenly(count: int) -> None:
    """The first has room for two blocks more, the last for whatever is left."""
    model = _model({"layers.0.a": 10, "layers.1.a": 20, "layers.2.a": 30})
    given = dict.fromkeys(range(count), 1 << 20) | {"cpu": 1 << 30, count: 0}
    limits = spread(given, model, lambda *_: 1.5)
    block, share = 45, 90 // count
    wanted = [share + 2 * block, *[share + block // 2] * (count - 1)]
    wanted[-1] = 1 << 60
    assert limits == dict(enumerate(wanted))
    assert spread({"cpu": 5}, model, lambda *_: 1.5) == {}
