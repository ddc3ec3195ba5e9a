"""Kernels for weights in prefix codes are compiled ahead: those that weights take which come later."""

from __future__ import annotations

import queue
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.backends import MadeBackend, MadeKernel
from support.weights import LEAST_SHARED, item, weights

from tpde.cuda import prefix_kernels
from tpde.cuda.capability import DeviceFacts
from tpde.cuda.compiling import submit
from tpde.cuda.decode import WorkList
from tpde.cuda.digest import Bytestring, Digests
from tpde.cuda.encode import PackEncoder
from tpde.errors import CompileError, UnsupportedDevice

HAVE = DeviceFacts("GPU", (9, 0), 132, 227 << 10)


class Recorder:
    """A back end's `kernel` that tells what it was asked for."""

    def __init__(self) -> None:
        self.asked: queue.Queue[str] = queue.Queue()

    def __call__(self, source: str, name: str, defines: Any, *_: Any, **__: Any) -> MadeKernel:
        # All functions of a file with the same macros are compiled together.
        self.asked.put(repr((source, sorted(defines.items()))))
        return MadeKernel(lambda *_, **__: lambda *_: None)

    def all_of(self, count: int) -> set[str]:
        """The next so many, when they come."""
        return {self.asked.get(timeout=20) for _ in range(count)}

    def now(self) -> set[str]:
        """Those that were asked for by now."""
        return {self.asked.get() for _ in range(self.asked.qsize())}


def wait_for_compiling() -> None:
    """Until all that was asked for has ended."""
    ended = threading.Event()
    submit(lambda *_: ended.set(), (), 0)
    assert ended.wait(20)


@pytest.mark.parametrize(("dtype", "largest"), [("BF16", 5200), ("F16", 7500), ("F32", 8100)])
def test_decoding_takes_what_was_compiled_ahead(launch_on: Any, dtype: str, largest: int) -> None:
    """With and without checksums; then what tensors take of which a chunk is larger than is usual."""
    kernel = Recorder()
    launch_on(MadeBackend(kernel, HAVE))
    prefix_kernels.compile_ahead(dtype, 0, packing=False)
    ahead = kernel.all_of(4)
    assert len(ahead) == 4
    usual = item(weights(dtype))
    WorkList([usual], 0).prepare()
    taken = kernel.now()
    assert len(taken) == 2
    WorkList([usual._replace(header=replace(usual.header, max_stream_bytes=largest))], 0).prepare()
    assert taken | kernel.now() == ahead


def test_coded_planes_that_pass_through_rings_take_the_same_kernels_at_any_size(launch_on: Any) -> None:
    kernel = Recorder()
    launch_on(MadeBackend(kernel, DeviceFacts("GPU", (8, 9), 132, LEAST_SHARED)))
    prefix_kernels.compile_ahead("F16", 0, packing=False)
    wait_for_compiling()
    assert len(kernel.now()) == 2


def test_packing_takes_what_was_compiled_ahead(launch_on: Any) -> None:
    kernel = Recorder()
    launch_on(MadeBackend(kernel, HAVE))
    prefix_kernels.compile_ahead("BF16", 0, packing=True)
    ahead = kernel.all_of(6)
    packed = weights("BF16")
    encoder = PackEncoder(256, packed.header.spec, 0)
    encoder.gather(256, 0)
    drawn = np.random.default_rng(1).standard_normal(encoder.sample_bytes // 2, np.float32)
    chosen = encoder.choose((drawn.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8))
    assert chosen is not None
    encoder.measure(chosen, 256, 0)
    encoder.encode(chosen, 256, 256, 0)
    Digests([Bytestring(256, 1 << 20)], 0).sums(256, 0)
    WorkList([item(packed)], 0).prepare()
    taken = kernel.now()
    assert len(taken) == 4
    assert taken < ahead


def test_nothing_is_compiled_for_other_dtypes(launch_on: Any) -> None:
    kernel = Recorder()
    launch_on(MadeBackend(kernel, HAVE))
    prefix_kernels.compile_ahead("F8_E4M3", 0, packing=True)
    wait_for_compiling()
    assert not kernel.now()


def test_a_device_without_kernels_is_refused_later(launch_on: Any) -> None:
    """Blobs that the CPU decodes need none."""
    launch_on(MadeBackend(facts=UnsupportedDevice("too old")))
    prefix_kernels.compile_ahead("BF16", 0, packing=True)
    wait_for_compiling()
    with pytest.raises(UnsupportedDevice, match="too old"):
        WorkList([item(weights("BF16"))], 0).prepare()


def test_what_fails_is_tried_once(launch_on: Any) -> None:
    asked: queue.Queue[str] = queue.Queue()

    def kernel(source: str, *_: Any, **__: Any) -> MadeKernel:
        asked.put(source)
        raise CompileError("refused")

    launch_on(MadeBackend(kernel, HAVE))
    for _ in range(3):
        prefix_kernels.compile_ahead("BF16", 0, packing=False)
    wait_for_compiling()
    assert 1 <= asked.qsize() <= 4, "each layer asked again"


def test_reading_compiles_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What tensors that are read take, before they are there."""
    torch = pytest.importorskip("torch", reason="needs torch, of `tpde[torch]`")
    from tpde import torch as packed_torch
    from tpde.loading import checkpoint_files

    begun: set[tuple[str, int, bool]] = set()

    class Reading(Exception):
        pass

    def read(*_: Any) -> None:
        raise Reading

    monkeypatch.setattr(
        prefix_kernels, "compile_ahead", lambda dtype, device, *, packing: begun.add((dtype, device, packing))
    )
    monkeypatch.setattr(checkpoint_files, "read_extents", read)
    torch.manual_seed(0)
    tensors = {"a": torch.randn(256, 512).bfloat16(), "b": torch.randn(256, 512)}
    packed_torch.save_file(tensors, tmp_path / "model.safetensors")
    with checkpoint_files.Checkpoint([tmp_path / "model.safetensors"]) as found:
        for device in (torch.device("cpu"), torch.device("cuda", 3)):
            with pytest.raises(Reading):
                found.read([found.packed["a"]], device)
        assert begun == {("BF16", 3, False)}
        with pytest.raises(Reading):
            found.read(list(found.packed.values()), torch.device("cuda", 3))
    assert begun == {("BF16", 3, False), ("F32", 3, False)}
