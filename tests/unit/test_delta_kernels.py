"""The kernels of deltas, run on the CPU: what they compute, and that no bytes lead them astray."""

from __future__ import annotations

import pytest
from support.device_deltas import DeviceDeltas
from support.emulated import on_cpu  # noqa: F401


@pytest.mark.usefixtures("on_cpu")
class TestOnTheCpu(DeviceDeltas):
    place = "cpu"
    sizes = (1, 7, 8, 255, 257, 65537)
