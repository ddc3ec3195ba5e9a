"""Who packs tensors of a GPU, and how what is packed there gets into files; no GPU is needed for it."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.backends import MadeBackend
from support.emulated import cpu_backend, on_cpu  # noqa: F401

from tpde.cuda.backend import launching_on
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


def test_tensors_of_the_cpu_are_left_to_it() -> None:
    given = [(str(n), weights(n)) for n in (8, 16, 4)]
    found = list(gpu_packing.packed_there(given, "prefix"))
    assert [(it.name, it.blob) for it in found] == [(name, None) for name, _ in given]
    assert all(it.tensor is tensor for it, (_, tensor) in zip(found, given, strict=True))


def batches(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[list[str]]:
    """Names of tensors that are packed side by side: they come out before the next one is asked for."""
    found: list[list[str]] = [[]]

    def given() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            found.append([])
            yield name, tensor

    for it in gpu_packing.packed_there(given(), "prefix"):
        found[-1].append(it.name)
    return [names for names in found if names]


def test_batches_have_so_many_bytes_and_keep_the_order() -> None:
    """With what their samples and tables take: 1 MiB of words, and 1.25 MiB."""
    mib = {"a": 125.75, "b": 125.75, "c": 125.75, "d": 126, "large": 300, "e": 0.5, "ids": 1, "f": 0.5}
    given = [(name, torch.empty(int(size * (1 << 19)), dtype=torch.bfloat16)) for name, size in mib.items()]
    assert batches(given) == [["a", "b"], ["c"], ["d"], ["large"], ["e", "ids", "f"]]


def test_no_batch_is_held_while_the_next_is_asked_for() -> None:
    alive: list[Any] = []

    def given() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(9):
            gc.collect()
            assert sum(it() is not None for it in alive) <= 4
            tensor = torch.empty(80 << 20, dtype=torch.uint8)
            alive.append(weakref.ref(tensor))
            yield str(number), tensor

    assert batches(given()) == [["0", "1", "2"], ["3", "4", "5"], ["6", "7", "8"]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("words", [1024, 16384, 65536, 1 << 20])
def test_small_tensors_bring_samples_and_tables(words: int, dtype: torch.dtype) -> None:
    """Which are more than they are themselves: a batch of those would take many times its bytes."""
    tensor = (0.02 * torch.randn(words)).to(dtype)
    encoder = PackEncoder(0, torch_spec("w", tensor), 0, spread=False)
    chosen = encoder.choose(torch_bytes(tensor)[: encoder.sample_bytes], "prefix")
    scratch = 0 if chosen is None else chosen.scratch_bytes
    together = len(batches(("w", tensor) for _ in range(210))[0])
    assert 10 < together < 210
    assert together * (0.98 * tensor.nbytes + encoder.sample_bytes + scratch) <= 256 << 20


@pytest.mark.parametrize(
    "error", [MissingDependency("no NVRTC"), torch.cuda.OutOfMemoryError("out of memory\nand more")]
)
def test_the_cpu_packs_what_the_gpu_cannot(
    error: Exception, launch_on: Callable[[Any], Any], caplog: pytest.LogCaptureFixture
) -> None:
    given = {str(rows): weights(rows) for rows in (64, 32)}
    expected = [pack_tensor(it, name) for name, it in given.items()]

    def kernel(*_: Any, **__: Any) -> Any:
        raise error

    launch_on(MadeBackend(kernel, kind="cpu"))
    with caplog.at_level(logging.INFO, "tpde"):
        found = list(pack_tensors(given.items()))
    for one, other in zip(found, expected, strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one.sources[0].blob, other.sources[0].blob)
    (line,) = [it.getMessage() for it in caplog.records]
    assert line.startswith("`64` and 1 more of cpu: packed on the CPU (")
    assert "\n" not in line


def packed_names(given: dict[str, torch.Tensor]) -> set[str]:
    """What kernels pack."""
    return {it.name for it in gpu_packing.packed_there(given.items(), "prefix") if it.blob is not None}


def test_files_are_the_same(tmp_path: Path) -> None:
    given = {
        "model.layers.0.down_proj.weight": weights(70),
        "model.layers.0.norm.weight": torch.ones(256),
        "ids": torch.arange(3000),
        "model.layers.1.down_proj.weight": weights(210),
        "lm_head.weight": weights(33),
        "tiny": torch.ones(3),
    }
    expected = save(given, {"a": "b"})
    with launching_on(cpu_backend()):
        assert {name for name in given if name.endswith("proj.weight")} <= packed_names(given)
        assert save(given, {"a": "b"}) == expected
        save_file(given, tmp_path / "it.safetensors", {"a": "b"})
    assert (tmp_path / "it.safetensors").read_bytes() == expected


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


def test_the_kernels_make_the_files_of_the_cpu() -> None:
    given = kinds()
    with launching_on(cpu_backend()):
        there, made = packed_names(given), save(given)
    assert {"wide", "part", "odd", "parameter", "half", "double"} <= there
    assert not {"conjugate", "negative", "zeros", "nearly", "one", "none"} & there
    assert made == save(given)
    for name, it in load(made).items():
        assert it.shape == given[name].shape
        assert torch.equal(torch_bytes_of(it), torch_bytes_of(given[name]))


def torch_bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(torch_bytes(tensor).copy())


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("inference", [False, True])
def test_the_kernels_make_the_weights_of_the_cpu(inference: bool, alone: bool) -> None:
    given = {name: it for name, it in kinds().items() if it.is_floating_point() and it.numel()}
    with launching_on(cpu_backend()), torch.inference_mode(inference):
        assert {"wide", "half"} <= packed_names(given)
        calls = [[pair] for pair in given.items()] if alone else [list(given.items())]
        found = dict(zip(given, (it for call in calls for it in pack_tensors(call)), strict=True))
    for name, it in given.items():
        expected, packed = pack_tensor(it, name), found[name]
        assert (packed is None) == (expected is None)
        if packed is not None and expected is not None:
            assert torch.equal(packed.sources[0].blob, expected.sources[0].blob)
            assert not packed.sources[0].blob.is_inference(), "gradients may flow through what it decodes to"


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_as_many_threads_choose_codes_as_were_asked_for(
    threads: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pools: list[int] = []
    real = ThreadPoolExecutor.__init__

    def noted(pool: ThreadPoolExecutor, count: int, name: str = "", *rest: Any) -> None:
        if name == "tpde-choose":
            pools.append(count)
        real(pool, count, name, *rest)

    monkeypatch.setattr(ThreadPoolExecutor, "__init__", noted)
    given = {name: weights(64) for name in "abcd"}
    assert all(pack_tensors(given.items(), threads))
    save_file(given, tmp_path / "it.safetensors", threads=threads)
    pack_module(torch.nn.Sequential(*(torch.nn.Linear(64, 256) for _ in range(4))), threads=threads)
    assert pools == [threads] * 3


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("threads", [0, -1, 2.0])
def test_a_number_of_threads_that_cannot_be_is_refused(threads: Any) -> None:
    """Also where none would have worked."""
    for model in (torch.nn.Linear(64, 256), torch.nn.ReLU()):
        with pytest.raises(InvalidArgument, match="threads"):
            pack_module(model, threads=threads)


def test_words_that_are_gone_are_not_read(launch_on: Callable[[Any], Any]) -> None:
    """As those of modules that are sharded elsewhere: an address of 0 would end the process's work there."""
    launch_on(MadeBackend(kind="cpu"))
    tensor = weights(64)
    assert gpu_packing.is_there(tensor)
    assert not gpu_packing.is_there(tensor.T)
    tensor.untyped_storage().resize_(0)
    assert not gpu_packing.is_there(tensor)


def test_a_blob_is_written_whole_and_in_its_turn(tmp_path: Path) -> None:
    packed = pack_tensor(weights(64), "w")
    assert packed is not None
    blob = packed.sources[0].blob.numpy()
    writer = FileWriter(tmp_path / "it.safetensors", {it: torch_spec(it, weights(64)) for it in "vw"})
    writer.write("v", np.zeros(7, np.uint8))
    with pytest.raises(ValueError, match="complete it before `w` begins"):
        writer.write_blob("w", blob)
    writer.abort()
    assert not list(tmp_path.iterdir())
