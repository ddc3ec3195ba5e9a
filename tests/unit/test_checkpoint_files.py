"""Files of a checkpoint: which are weights, what is read of them and where to, and that none stays open."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")

from support.card import DEVICE  # noqa: E402
from support.contents import fill  # noqa: E402
from support.craft import file_of, prefix_blob  # noqa: E402
from support.files import pack_bytes, safetensors_bytes  # noqa: E402
from support.open_files import open_files  # noqa: E402
from support.pretended import OnHost  # noqa: E402

from tpde.errors import Corrupt, NotPacked, OutOfMemory  # noqa: E402
from tpde.format.container import TensorSpec  # noqa: E402
from tpde.loading.checkpoint_files import Checkpoint  # noqa: E402
from tpde.loading.feeds import Feeds  # noqa: E402

CPU = torch.device("cpu")
SPEC = TensorSpec("BF16", (64, 128))


def _write(tmp_path: Path, *parts: dict[str, Any]) -> list[Path]:
    paths = [tmp_path / f"{i}.safetensors" for i in range(len(parts))]
    for path, tensors in zip(paths, parts, strict=True):
        path.write_bytes(pack_bytes(safetensors_bytes(tensors)))
    return paths


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_a_checkpoint_that_is_refused_leaves_nothing_open(tmp_path: Path) -> None:
    weight, bias = (SPEC, fill("normal", SPEC)), (TensorSpec("U8", (3,)), b"abc")
    for other in ({"w": weight}, {"b": bias}):
        paths = _write(tmp_path, {"w": weight, "b": bias}, other)
        with pytest.raises(Corrupt, match="is in another file too") as caught:
            Checkpoint(paths)
        assert open_files(tmp_path) == 0
        assert caught.value.where == str(paths[1])
    with Checkpoint(paths[:1]) as found:
        assert open_files(tmp_path) == 1
        assert (list(found.packed), list(found.plain)) == (["w"], ["b"])
    assert open_files(tmp_path) == 0


def test_a_blob_of_another_shape_is_no_part_of_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(file_of(prefix_blob()))
    with Checkpoint([tmp_path / "x"]) as found:
        stored = found.packed["x"]
        (opened,) = found.read([stored], torch.device("cpu"))
        assert opened.shape == (3, 500)
        stored.spec = TensorSpec("BF16", (500, 3))
        with pytest.raises(Corrupt, match=r"is BF16 \[3, 500\], but BF16 \[500, 3\]") as caught:
            found.read([stored], torch.device("cpu"))
        assert caught.value.tensor == "x"


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_feeds_that_cannot_be_opened_are_closed(tmp_path: Path) -> None:
    """At once: whoever has the error may keep it, and with it all that was opened."""
    closed: list[str] = []

    def refuse(*_: Any) -> None:
        raise OutOfMemory("no buffers")

    memory = SimpleNamespace(close=lambda: closed.append("memory"))
    machine: Any = SimpleNamespace(memory=lambda *_: memory, disk=refuse)
    weight = (SPEC, fill("normal", SPEC))
    with Checkpoint(_write(tmp_path, {"a": weight}, {"b": weight})) as found:
        host, disk = [found.packed["a"]], [found.packed["b"]]
        plan: Any = SimpleNamespace(staging=1 << 20, piece=1 << 20)
        with pytest.raises(OutOfMemory, match="no buffers") as caught:
            Feeds(torch.device("cpu"), plan, host, disk, machine)
        assert closed == ["memory"]
        assert open_files(tmp_path) == 2, "the checkpoint's own"
        assert caught.value.message == "no buffers"


# ---- a checkpoint's tensors ----


def test_files_that_are_no_weights(tmp_path: Path) -> None:
    for name, hint in (("model.bin", "make a plain model of it"), ("model.safetensors", "fetch it again")):
        (tmp_path / name).write_bytes(b"\x80\x02}q\x00." * 100)
        with pytest.raises(NotPacked) as caught:
            Checkpoint([tmp_path / name])
        assert hint in str(caught.value.hint)
        assert caught.value.where == str(tmp_path / name)


@pytest.mark.parametrize("plain_first", [True, False])
def test_one_packed_file_makes_a_checkpoint_packed(plain_first: bool, tmp_path: Path) -> None:
    paths = _write(tmp_path, {"w": (SPEC, fill("normal", SPEC))})
    (tmp_path / "plain").write_bytes(safetensors_bytes({"b": (TensorSpec("U8", (3,)), b"abc")}))
    paths.insert(0 if plain_first else 1, tmp_path / "plain")
    with Checkpoint(paths) as found:
        assert found.is_packed
        assert found.plain_tensor("b", torch.device("cpu")).tolist() == [97, 98, 99]
    with Checkpoint([tmp_path / "plain"]) as found:
        assert not found.is_packed


class Noted(Checkpoint):
    """Notes what is read, and where to; reads it to the CPU."""

    def __init__(self, paths: list[Path]) -> None:
        super().__init__(paths)
        self.reads: list[tuple[list[str], Any]] = []

    def read(self, stored: Any, device: Any) -> Any:
        self.reads.append(([it.name for it in stored], device))
        return super().read(stored, torch.device("cpu"))


def test_large_tensors_are_decoded_on_the_gpu_that_they_go_to(tmp_path: Path) -> None:
    """Small ones by a processor, without a blob's way to the device."""
    small, large = (TensorSpec("BF16", (rows, 1024)) for rows in (512, 513))
    data = {name: fill("normal", spec) for name, spec in (("small", small), ("large", large))}
    paths = _write(tmp_path, {"small": (small, data["small"]), "large": (large, data["large"])})
    with Noted(paths) as found, OnHost():
        for name, device, reads in (("large", DEVICE, 1), ("small", DEVICE, 0), ("large", CPU, 0)):
            run = found.packed[name].run
            (made,) = found.decode([run], device)
            assert made.view(torch.uint8).numpy().tobytes() == data[name]
            assert found.reads == [([name], DEVICE)] * reads
            (cast,) = found.decode([run], device, torch.float64)
            assert torch.equal(cast, made.double())
            found.reads.clear()


def test_each_device_is_read_to_once(tmp_path: Path) -> None:
    names = ["a", "b", "c"]
    with Noted(_write(tmp_path, {it: (SPEC, fill("normal", SPEC)) for it in names})) as found:
        runs = {it: found.packed[it].run for it in names} | {"again": found.packed["a"].run}
        made = found.open(runs, {"a": DEVICE, "b": CPU, "c": DEVICE, "again": DEVICE})
        assert found.reads == [(["a", "c"], DEVICE), (["b"], CPU)]
    assert list(made) == list(runs)
    assert made["a"].sources[0] is made["again"].sources[0]
