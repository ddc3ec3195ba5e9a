"""What no reader would take is refused before a good file is replaced."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.craft import bounded

import tpde.numpy
from tpde.errors import InvalidInput
from tpde.files.file_writer import FileWriter
from tpde.files.thread_count import MAX_THREADS, check_threads
from tpde.format.container import TensorSpec
from tpde.format.container_writer import canonical_header
from tpde.io.sinks import BytesSink

torch = pytest.importorskip("torch")

import tpde.torch  # noqa: E402

CASES: dict[str, tuple[list[Any], Any]] = {
    "a number in the metadata": (["w"], {"epoch": 3}),
    "None in the metadata": (["w"], {"epoch": None}),
    "a number as a key": (["w"], {3: "epoch"}),
    "metadata that is a list": (["w"], ["epoch"]),
    "half a character in a key": (["w"], {"\ud800": "x"}),
    "half a character in a value": (["w"], {"x": "\udfff"}),
    "a tensor in the place of the metadata": (["w", "__metadata__"], None),
    "half a character in a name": (["w\ud83d"], None),
    "a number as a name": ([3], None),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_what_no_reader_takes_leaves_the_file_that_was_there(case: str, library: str, tmp_path: Path) -> None:
    names, metadata = CASES[case]
    module: Any = {"numpy": tpde.numpy, "torch": tpde.torch}[library]
    value = np.zeros(3, np.float32) if library == "numpy" else torch.zeros(3)
    path = tmp_path / "x.safetensors"
    module.save_file({"w": value}, path, metadata={"epoch": "2"})
    before = path.read_bytes()
    for save in (lambda *given: module.save_file(given[0], path, given[1]), module.save):
        with pytest.raises(InvalidInput, match=r"text|Unicode|metadata"):
            save({name: value + i for i, name in enumerate(names)}, metadata)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_header_of_other_tensors_is_refused() -> None:
    specs = {"a": TensorSpec("U8", (3,))}
    header = canonical_header({"b": TensorSpec("U8", (3,))}, {})
    for given in (header, header.replace(b"[3]", b"[4]"), b"{", canonical_header({}, {})):
        with pytest.raises(tpde.TpdeError):
            FileWriter(BytesSink(), specs, source_header=given)


@pytest.mark.parametrize("threads", [0, -1, 1 << 31, (1 << 32) + 1, True, 1.0, "2"])
def test_numbers_of_threads_that_cannot_be(threads: Any) -> None:
    with pytest.raises(ValueError, match="at least 1 is needed, and at most"):
        check_threads(threads)
    assert check_threads(MAX_THREADS) == MAX_THREADS


@pytest.mark.parametrize("shape", [(1 << 50,), (1 << 62,), (1 << 20, 1 << 20, 1 << 20)])
def test_expanded_tensors_are_refused_before_memory_is_asked_for(shape: tuple[int, ...]) -> None:
    with bounded(1), pytest.raises(InvalidInput, match="`w`"):
        tpde.numpy.save({"w": np.broadcast_to(np.zeros(1, np.uint8), shape)})
    with bounded(1), pytest.raises(InvalidInput, match="`w`"):
        tpde.torch.save({"w": torch.zeros(1, dtype=torch.uint8).expand(shape)})
    small = np.broadcast_to(np.arange(3, dtype=np.int32), (5, 3))
    assert np.array_equal(tpde.numpy.load(tpde.numpy.save({"w": small}))["w"], small)


class _Stand(torch.Tensor):
    """Holds another tensor, and no bytes."""

    @staticmethod
    def __new__(cls, inner: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


def _without_bytes(kind: str) -> Any:
    value = torch.ones(30)
    if kind == "fake":
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode():
            return torch.ones(30)
    if kind == "stand":
        return _Stand(value)
    value.untyped_storage().resize_(0 if kind == "freed" else 40)
    return value


def _written(value: Any, folder: Path) -> None:
    with tpde.PackedWriter(folder / "x.safetensors", {"w": TensorSpec("F32", (30,))}) as writer:
        writer.write("w", value)


def _stored(value: Any, folder: Path) -> None:
    with tpde.CheckpointStore(folder) as store:
        store.save(1, {"w": value})


WRITERS: dict[str, Callable[[Any, Path], object]] = {
    "save": lambda value, _: tpde.torch.save({"w": value}),
    "save_file": lambda value, folder: tpde.torch.save_file({"w": value}, folder / "x.safetensors"),
    "PackedWriter": _written,
    "CheckpointStore": _stored,
    "make_delta": lambda value, _: tpde.make_delta({"w": torch.ones(30)}, {"w": value}),
}


@pytest.mark.parametrize("kind", ["fake", "stand", "freed", "partly freed"])
@pytest.mark.parametrize("writer", WRITERS)
def test_tensors_without_bytes_are_refused(writer: str, kind: str, tmp_path: Path) -> None:
    match = "has no plain bytes in memory" if kind in ("fake", "stand") else "was freed: .* of 120 bytes"
    with pytest.raises(InvalidInput, match=match):
        WRITERS[writer](_without_bytes(kind), tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))


@pytest.mark.parametrize("writer", WRITERS)
def test_parts_of_tensors_have_their_bytes(writer: str, tmp_path: Path) -> None:
    WRITERS[writer](torch.arange(90.0)[60:], tmp_path)
    tpde.torch.save({"w": torch.empty(0, 3)})
    tpde.torch.save({"w": torch.ones(3).as_subclass(_Plain)})


class _Plain(torch.Tensor):
    """Has bytes, as any tensor of PyTorch's."""
