"""What no reader would take is refused before a good file is replaced."""

from __future__ import annotations

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
