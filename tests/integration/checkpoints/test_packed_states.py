"""States with packed weights: stored as the plain ones are, decoded one at a time."""

from __future__ import annotations

import copy
import weakref
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from support.models import assert_same_bits  # noqa: E402
from support.small import IDS, Model  # noqa: E402

from tpde import CheckpointStore  # noqa: E402
from tpde.nn import pack_module, set_kernels  # noqa: E402


def _model() -> Any:
    torch.manual_seed(3)
    model = Model().bfloat16()
    model.picture = torch.nn.Conv2d(16, 32, 3).bfloat16().to(memory_format=torch.channels_last)
    return model


@pytest.mark.parametrize("kernels", ["decoded", "fused"])
@pytest.mark.parametrize("background", [False, True])
def test_a_packed_models_state(background: bool, kernels: str, tmp_path: Path) -> None:
    plain = _model()
    packed = pack_module(copy.deepcopy(plain), min_bytes=0)
    if kernels == "fused":
        set_kernels(packed, "fused")
    with CheckpointStore(tmp_path) as store:
        store.save(1, {"model": packed.state_dict()}, background=background)
        store.save(2, {"model": plain.state_dict()}, background=background)
    found = CheckpointStore(tmp_path).load(1)["model"]
    assert list(found) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        assert_same_bits(found[name], value, name)
    assert found["head.weight"] is found["embed.weight"]
    first, second = sorted(it.stat().st_size for it in tmp_path.glob("*.tpde*"))
    assert first < second / 4  # the second step changes nothing
    packed.load_state_dict(found)
    assert_same_bits(packed(IDS), plain(IDS))


def test_packed_weights_are_decoded_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tpde.weights.packed_tensor import PackedTensor

    decoded, there = PackedTensor.decoded, list[Any]()

    def counted(self: Any, room: int = 0) -> Any:
        made = decoded(self, room)
        there[:] = [it for it in there if it() is not None]
        there.append(weakref.ref(made.untyped_storage()))
        most.append(len(there))
        return made

    most: list[int] = []
    packed = pack_module(_model(), min_bytes=0)
    monkeypatch.setattr(PackedTensor, "decoded", counted)
    with CheckpointStore(tmp_path) as store:
        store.save(1, packed.state_dict())
    assert len(most) >= 7
    assert max(most) <= 2
