"""Deltas of live tensors on the GPU: the CPU's bytes, and every fault that the CPU finds."""

from __future__ import annotations

import numpy as np
import pytest
from support.device_delta_contents import DeltaContents
from support.device_delta_faults import DeltaFaults
from support.device_deltas import moved, same, words_of
from support.gpu import needs_cuda, torch

import tpde
from tpde.codec.delta_planner import SAMPLE_BYTES

pytestmark = needs_cuda


class TestOnTheGpu(DeltaContents, DeltaFaults):
    place = "cuda"
    sizes = (1, 7, 8, 255, 257, 65535, 65536, 65537, 200_003, 1_000_003)

    def test_memory_beside_the_tensors_is_small(self) -> None:
        words = words_of("BF16", 1 << 25)
        old = {"w": self.tensor(words, "BF16")}
        new = {"w": self.tensor(moved(words, "BF16", 0.005, False), "BF16")}
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        made = tpde.make_delta(old, new)
        making = torch.cuda.max_memory_allocated() - held
        torch.cuda.reset_peak_memory_stats()
        tpde.apply_delta(old, made)
        applying = torch.cuda.max_memory_allocated() - held
        assert making < words.size * 0.08 + 2 * SAMPLE_BYTES
        assert applying < words.size * 0.06
        assert same(old, new)

    def test_row_4_of_the_origin_reconstruction_from_a_sparse_delta(self) -> None:
        """1024 x 4096 fp32 weights, a tenth changed."""
        base = words_of("F32", 1024 * 4096).view(np.float32)
        target, draw = base.copy(), np.random.default_rng(4)
        at = draw.random(base.size) < 0.1
        target[at] += (0.01 * draw.standard_normal(int(at.sum()))).astype(np.float32)
        old = {"w": self.tensor(base.view(np.uint8), "F32")}
        new = {"w": self.tensor(target.view(np.uint8), "F32")}
        self.apply(old, new, self.make(old, new))

    def test_a_module_and_a_stream_of_its_own(self) -> None:
        model = torch.nn.Linear(512, 512, device="cuda", dtype=torch.bfloat16)
        old = {name: it.detach().clone() for name, it in model.state_dict().items()}
        with torch.no_grad():
            model.weight.view(-1)[::300] *= 1.01
        new = {name: it.detach().clone() for name, it in model.state_dict().items()}
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            made = tpde.make_delta(old, model)
            model.load_state_dict(old)
            assert tpde.apply_delta(model, made) == 1
            torch.cuda.current_stream().synchronize()
        assert same(model.state_dict(), new)

    @pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
    def test_tensors_of_a_second_device(self) -> None:
        old, new = self.state(0.01, False, (70_000,))
        split = {name: it.to("cuda:1") if i % 2 else it for i, (name, it) in enumerate(old.items())}
        target = {name: new[name].to(it.device) for name, it in split.items()}
        self.apply(split, target, self.make(split, target))
