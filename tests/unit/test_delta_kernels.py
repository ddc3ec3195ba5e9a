"""The kernels of deltas, run on the CPU: what they compute, and that no bytes lead them astray."""

from __future__ import annotations

import sys

import pytest
from support.device_delta_contents import DeltaContents
from support.device_delta_faults import DeltaFaults
from support.emulated import on_cpu  # noqa: F401

from tpde.cuda.backend import CudaBackend, current, launching_on
from tpde.cuda.capability import bindings
from tpde.errors import MissingDependency
from tpde.store import device_deltas


@pytest.mark.usefixtures("on_cpu")
class TestOnTheCpu(DeltaContents, DeltaFaults):
    place = "cpu"
    sizes = (1, 7, 8, 255, 257, 65537)


def test_without_cuda_core_nothing_is_resident(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch brings `cuda-bindings` and NVRTC, but not `cuda-core`."""
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    with pytest.raises(MissingDependency, match=r"cuda-core.*tpde\[cuda\]"):
        bindings()
    with launching_on(CudaBackend()):
        assert not device_deltas.can_run(current(), 0)
