"""Who packs tensors of a GPU, and how what is packed there gets into files; no GPU is needed for it."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch

from tpde.errors import MissingDependency
from tpde.files import gpu_packing
from tpde.files.writer import PackedWriter
from tpde.frameworks import torch_spec
from tpde.torch import save, save_file
from tpde.weights.pack_tensor import pack_tensor, pack_tensors


def weights(rows: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(rows)
    return (0.02 * torch.randn((rows, 256), generator=draw)).bfloat16()


class There:
    """A GPU that packs what it is given as the CPU does, or fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
        self.batches: list[list[str]] = []
        self._error = error
        monkeypatch.setattr(gpu_packing, "is_there", lambda tensor: tensor.is_floating_point())
        monkeypatch.setattr(gpu_packing, "torch_spec", lambda name, tensor: name)
        monkeypatch.setattr(gpu_packing, "_pack", self._pack)

    def _pack(self, batch: Any, codec: str) -> list[torch.Tensor | None]:
        if self._error is not None:
            raise self._error
        self.batches.append([name for name, _ in batch])
        made = []
        for _, tensor in batch:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(gpu_packing, "is_there", lambda tensor: False)
                packed = pack_tensor(tensor, "w")
            made.append(None if packed is None else packed.sources[0].blob)
        return made


def test_tensors_of_the_cpu_are_left_to_it() -> None:
    given = [(str(n), weights(n)) for n in (8, 16, 4)]
    found = list(gpu_packing.packed_there(given, "prefix"))
    assert [(it.name, it.blob) for it in found] == [(name, None) for name, _ in given]
    assert all(it.tensor is tensor for it, (_, tensor) in zip(found, given, strict=True))


def test_batches_have_so_many_bytes_and_keep_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    there = There(monkeypatch)
    monkeypatch.setattr(gpu_packing, "BATCH_BYTES", 5 * 1024 * 512)
    sizes = {"a": 2048, "b": 2048, "c": 2048, "large": 8192, "d": 64, "noise": 0, "e": 64}
    given = {name: weights(rows) for name, rows in sizes.items() if rows}
    given["noise"] = torch.arange(4096)  # which is no tensor of floats, and passes
    order = [name for name in sizes if name in given]
    found = list(gpu_packing.packed_there(((name, given[name]) for name in order), "prefix"))
    assert [it.name for it in found] == order
    assert [it.name for it in found if it.blob is None] == ["noise"]
    assert there.batches == [["a", "b"], ["c"], ["large"], ["d", "e"]]


def test_no_batch_is_held_while_the_next_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    There(monkeypatch)
    monkeypatch.setattr(gpu_packing, "BATCH_BYTES", 3 * 64 * 512)
    alive: list[Any] = []

    def given() -> Any:
        import gc
        import weakref

        for number in range(9):
            gc.collect()
            assert sum(it() is not None for it in alive) <= 4
            tensor = weights(64) + number
            alive.append(weakref.ref(tensor))
            yield str(number), tensor

    count = 0
    for it in gpu_packing.packed_there(given(), "prefix"):
        assert it.blob is not None
        count += 1
        del it
    assert count == 9


@pytest.mark.parametrize(
    "error", [MissingDependency("no NVRTC"), torch.cuda.OutOfMemoryError("out of memory\nand more")]
)
def test_the_cpu_packs_what_the_gpu_cannot(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given = {str(rows): weights(rows) for rows in (64, 32)}
    expected = [pack_tensor(it, name) for name, it in given.items()]
    There(monkeypatch, error)
    with caplog.at_level(logging.INFO, "tpde"):
        found = list(pack_tensors(given.items()))
    for one, other in zip(found, expected, strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one.sources[0].blob, other.sources[0].blob)
    (line,) = [it.getMessage() for it in caplog.records]
    assert line.startswith("`64` and 1 more of cpu: packed on the CPU (")
    assert "\n" not in line


def test_files_are_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    given = {
        "model.layers.0.down_proj.weight": weights(700),
        "model.layers.0.norm.weight": torch.ones(256),
        "ids": torch.arange(3000),
        "model.layers.1.down_proj.weight": weights(2100),
        "lm_head.weight": weights(33),
        "tiny": torch.ones(3),
    }
    expected = save(given, {"a": "b"})
    there = There(monkeypatch)
    assert save(given, {"a": "b"}) == expected
    assert there.batches
    save_file(given, tmp_path / "it.safetensors", {"a": "b"})
    assert (tmp_path / "it.safetensors").read_bytes() == expected


def test_a_blob_is_written_whole_and_in_its_turn(tmp_path: Any) -> None:
    packed = pack_tensor(weights(64), "w")
    assert packed is not None
    blob = packed.sources[0].blob.numpy()
    writer = PackedWriter(tmp_path / "it.safetensors", {it: torch_spec(it, weights(64)) for it in "vw"})
    writer.write("v", np.zeros(7, np.uint8))
    with pytest.raises(ValueError, match="complete before `w` begins"):
        writer.write_blob("w", blob)
    writer.abort()
    assert not list(tmp_path.iterdir())
