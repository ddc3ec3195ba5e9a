"""Who packs tensors of a GPU, and how what is packed there gets into files; no GPU is needed for it."""

from __future__ import annotations

import contextlib
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from support.emulated import on_cpu  # noqa: F401

from tpde.cuda.encode import PackEncoder
from tpde.errors import InvalidArgument, MissingDependency
from tpde.files import gpu_packing
from tpde.files.file_writer import FileWriter
from tpde.frameworks import torch_bytes, torch_spec
from tpde.nn import pack_module
from tpde.torch import load, save, save_file
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

    def _pack(self, batch: Any, codec: str, threads: int) -> list[torch.Tensor | None]:
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
    monkeypatch.setattr(gpu_packing, "_takes", lambda tensor: tensor.nbytes)
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
    monkeypatch.setattr(gpu_packing, "_takes", lambda tensor: tensor.nbytes)
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("words", [1024, 16384, 65536, 1 << 20])
def test_small_tensors_bring_samples_and_tables(words: int, dtype: torch.dtype) -> None:
    """Which are more than they are themselves: a batch of those would take many times its bytes."""
    tensor = (0.02 * torch.randn(words)).to(dtype)
    encoder = PackEncoder(0, torch_spec("w", tensor), 0, spread=False)
    chosen = encoder.choose(torch_bytes(tensor)[: encoder.sample_bytes], "prefix")
    scratch = 0 if chosen is None else chosen.scratch_bytes
    assert tensor.nbytes + encoder.sample_bytes + scratch <= gpu_packing._takes(tensor) + 0.02 * tensor.nbytes


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


@pytest.fixture
def on_host(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> list[str]:  # noqa: F811
    """The CPU counts as a GPU, and runs the kernels; gives the names of what is packed there."""
    found: list[str] = []

    def beside(device: torch.device, launch: Any) -> Any:
        launch(0)
        return lambda: None

    def noted(*given: Any) -> Any:
        batch, made = given[0], pack(*given)
        found.extend(name for (name, _), blob in zip(batch, made, strict=True) if blob is not None)
        return made

    pack = gpu_packing._pack_or_not
    monkeypatch.setattr(gpu_packing, "_KIND", "cpu")
    monkeypatch.setattr(gpu_packing, "_pack_or_not", noted)
    monkeypatch.setattr(gpu_packing, "_stream_of", lambda device: 0)
    monkeypatch.setattr(gpu_packing, "_beside", beside)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return found


def kinds() -> dict[str, torch.Tensor]:
    """Tensors of all sorts, contiguous."""
    draw = torch.Generator().manual_seed(0)
    wide = (0.02 * torch.randn((3, 70, 256), generator=draw)).bfloat16()
    waves = torch.randn(3000, generator=draw, dtype=torch.complex64)
    return {
        "wide": wide,
        "part": wide.clone()[1],
        "odd": wide.clone().view(-1)[3:-9],
        "parameter": torch.nn.Parameter(0.02 * torch.randn(5000, generator=draw)),
        "half": (0.02 * torch.randn(20000, generator=draw)).half(),
        "double": torch.randn(3000, generator=draw, dtype=torch.float64),
        "ids": torch.arange(3000),
        "mask": torch.rand(9000, generator=draw) < 0.1,
        "noise": torch.randint(0, 256, (5000,), generator=draw, dtype=torch.uint8),
        "waves": waves,
        "conjugate": waves.clone().conj(),
        "negative": torch._neg_view(torch.randn(3000, generator=draw)),
        "zeros": torch.full((5000,), -0.0),
        "nearly": torch.cat([torch.ones(9000), torch.randn(3000, generator=draw)]),
        "one": torch.tensor(-0.0),
        "none": torch.empty(0, 7),
    }


@pytest.mark.parametrize("limit", [1, 256 << 20])
def test_the_kernels_make_the_files_of_the_cpu(
    limit: int, on_host: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_packing, "BATCH_BYTES", limit)
    given = kinds()
    made = save(given)
    assert {"wide", "part", "odd", "parameter", "half", "double"} <= set(on_host)
    assert not {"conjugate", "negative", "zeros", "nearly", "one", "none"} & set(on_host)
    monkeypatch.undo()
    assert made == save(given)
    for name, it in load(made).items():
        assert it.shape == given[name].shape
        assert torch.equal(torch_bytes_of(it), torch_bytes_of(given[name]))


def torch_bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(torch_bytes(tensor).copy())


@pytest.mark.parametrize("inference", [False, True])
def test_the_kernels_make_the_weights_of_the_cpu(
    inference: bool, on_host: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {name: it for name, it in kinds().items() if it.is_floating_point() and it.numel()}
    with torch.inference_mode(inference):
        found = dict(zip(given, pack_tensors(given.items()), strict=True))
    assert {"wide", "half"} <= set(on_host)
    monkeypatch.undo()
    for name, it in given.items():
        expected, packed = pack_tensor(it, name), found[name]
        assert (packed is None) == (expected is None)
        if packed is not None and expected is not None:
            assert torch.equal(packed.sources[0].blob, expected.sources[0].blob)
            assert not packed.sources[0].blob.is_inference(), "gradients may flow through what it decodes to"


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_as_many_threads_choose_codes_as_were_asked_for(
    threads: int, on_host: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    pools: list[int] = []

    class Pool(ThreadPoolExecutor):
        def __init__(self, count: int, name: str) -> None:
            pools.append(count)
            super().__init__(count, name)

    monkeypatch.setattr(gpu_packing, "ThreadPoolExecutor", Pool)
    given = {name: weights(64) for name in "abcd"}
    assert all(pack_tensors(given.items(), threads))
    save_file(given, tmp_path / "it.safetensors", threads=threads)
    pack_module(torch.nn.Sequential(*(torch.nn.Linear(64, 256) for _ in range(4))), threads=threads)
    assert pools == [threads] * 3


@pytest.mark.parametrize("threads", [0, -1, 2.0])
def test_a_number_of_threads_that_cannot_be_is_refused(threads: Any, on_host: list[str]) -> None:
    """Also where none would have worked."""
    for model in (torch.nn.Linear(64, 256), torch.nn.ReLU()):
        with pytest.raises(InvalidArgument, match="threads"):
            pack_module(model, threads=threads)


def test_words_that_are_gone_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of modules that are sharded elsewhere: an address of 0 would end the process's work there."""
    monkeypatch.setattr(gpu_packing, "_KIND", "cpu")
    tensor = weights(64)
    assert gpu_packing.is_there(tensor)
    assert not gpu_packing.is_there(tensor.T)
    tensor.untyped_storage().resize_(0)
    assert not gpu_packing.is_there(tensor)


def test_a_blob_is_written_whole_and_in_its_turn(tmp_path: Any) -> None:
    packed = pack_tensor(weights(64), "w")
    assert packed is not None
    blob = packed.sources[0].blob.numpy()
    writer = FileWriter(tmp_path / "it.safetensors", {it: torch_spec(it, weights(64)) for it in "vw"})
    writer.write("v", np.zeros(7, np.uint8))
    with pytest.raises(ValueError, match="complete it before `w` begins"):
        writer.write_blob("w", blob)
    writer.abort()
    assert not list(tmp_path.iterdir())
