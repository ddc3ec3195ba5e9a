"""`tpde.PackedWriter`: what it takes for a tensor, and for a part of one."""

from __future__ import annotations

import copy
import importlib.util
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch")

import tpde  # noqa: E402
from tpde.errors import InvalidArgument, InvalidInput, UnknownTensor, UnsupportedDtype  # noqa: E402

ROWS, COLUMNS = 64, 512
WEIGHT = (0.02 * torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(3))).to(torch.bfloat16)
BITS = WEIGHT.view(torch.uint8).numpy().reshape(-1)
PIECES: dict[str, Any] = {
    "tensors": WEIGHT,
    "tensors of bytes": WEIGHT.view(torch.uint8),
    "turned tensors": WEIGHT.T.contiguous().T,
    "what requires gradients": torch.nn.Parameter(WEIGHT),
    "bytes": BITS.reshape(ROWS, -1),
    "words": WEIGHT.view(torch.int16).numpy().view(np.uint16),
    "words of the other end": WEIGHT.view(torch.int16).numpy().view(np.uint16).astype(">u2"),
    "turned words": np.asfortranarray(WEIGHT.view(torch.int16).numpy().view(np.uint16)),
}


@pytest.mark.parametrize("announced", ["spec", "tensor"])
@pytest.mark.parametrize("kind", PIECES)
def test_parts_of_all_kinds_give_the_same_file(kind: str, announced: str, tmp_path: Path) -> None:
    spec: Any = tpde.TensorSpec("BF16", (ROWS, COLUMNS)) if announced == "spec" else WEIGHT
    with tpde.PackedWriter(tmp_path / "out", {"weight": spec}, metadata={"a": "b"}) as writer:
        for begin in range(0, ROWS, 24):
            writer.write("weight", PIECES[kind][begin : begin + 24])
    tpde.torch.save_file({"weight": WEIGHT}, tmp_path / "saved", {"a": "b"})
    assert (tmp_path / "out").read_bytes() == (tmp_path / "saved").read_bytes()


def test_bytes_are_taken_as_they_are(tmp_path: Path) -> None:
    with tpde.PackedWriter(tmp_path / "out", {"weight": WEIGHT}) as writer:
        writer.write("weight", bytes(BITS[:1001]))  # which end inside a word
        writer.write("weight", memoryview(BITS)[1001:])
    with tpde.safe_open(tmp_path / "out") as file:
        assert torch.equal(file.get_tensor("weight").view(torch.int16), WEIGHT.view(torch.int16))


@pytest.mark.parametrize(
    "piece",
    [
        WEIGHT.float(),
        WEIGHT.half(),
        WEIGHT.view(torch.int16),
        np.zeros(4, np.float16),
        np.zeros(4, np.float32),
        np.zeros(4, np.uint32),
        np.zeros(4, np.int16),
    ],
    ids=lambda it: str(it.dtype),
)
def test_other_dtypes_are_refused(piece: Any, tmp_path: Path) -> None:
    """Their bits would be taken for those of other numbers."""
    writer = tpde.PackedWriter(tmp_path / "out", {"weight": WEIGHT})
    with pytest.raises(InvalidArgument, match=r"`weight` was announced as BF16, and is given") as caught:
        writer.write("weight", piece)
    assert (caught.value.where, caught.value.needed) == ("weight", "BF16")
    writer.write("weight", WEIGHT)  # nothing of the other was written
    writer.close()
    tpde.torch.save_file({"weight": WEIGHT}, tmp_path / "saved")
    assert (tmp_path / "out").read_bytes() == (tmp_path / "saved").read_bytes()


@pytest.mark.parametrize(
    ("piece", "words"),
    [([1, 2], "given a list"), (3, "given a int"), (memoryview(bytes(16))[::2], "a view with gaps")],
)
def test_what_is_no_bytes_is_refused(piece: Any, words: str, tmp_path: Path) -> None:
    writer = tpde.PackedWriter(tmp_path / "out", {"a": np.zeros(8, np.uint8)})
    with pytest.raises(InvalidArgument, match=words) as caught:
        writer.write("a", piece)
    assert caught.value.where == "a"
    writer.write("a", memoryview(bytes(8)))
    writer.close()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("given_up", [False, True])
def test_closing_again_does_nothing(threads: int, given_up: bool, tmp_path: Path) -> None:
    path = tmp_path / "out"
    with tpde.PackedWriter(path, {"weight": WEIGHT}, threads=threads) as writer:
        writer.write("weight", WEIGHT)
        if given_up:
            writer.abort()
        for _ in range(2):
            writer.close()
        assert path.exists() is not given_up
        with pytest.raises(InvalidArgument, match="complete, or was given up"):
            writer.write("weight", WEIGHT)
    writer.abort()
    assert [*tmp_path.iterdir()] == ([] if given_up else [path])


def test_what_is_announced(tmp_path: Path) -> None:
    arrays = {
        "a": np.arange(6, dtype=np.int64).reshape(2, 3),
        "b": np.float32(2.5),
        "c": torch.tensor([True]),
    }
    with tpde.PackedWriter(tmp_path / "out", arrays) as writer:
        writer.write("c", arrays["c"])
        writer.write("a", arrays["a"])
        writer.write("b", np.asarray(arrays["b"]))
    found = tpde.torch.load_file(tmp_path / "out")
    assert found["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (found["b"].shape, found["b"].item(), found["c"].tolist()) == (torch.Size([]), 2.5, [True])
    for wrong, error in (
        ("BF16", InvalidInput),
        (np.array(["a"]), UnsupportedDtype),
        (torch.zeros(3, device="meta"), InvalidInput),
    ):
        with pytest.raises(error):
            tpde.PackedWriter(tmp_path / "other", {"x": wrong})
    assert [it.name for it in tmp_path.iterdir()] == ["out"]


def test_tensors_that_were_not_announced(tmp_path: Path) -> None:
    writer = tpde.PackedWriter(tmp_path / "out", {"weight": WEIGHT})
    for call in (
        lambda: writer.write("other", WEIGHT),
        lambda: writer.plan("other", b""),
        lambda: writer.sample_ranges("other"),
    ):
        with pytest.raises(UnknownTensor, match="`other` was not announced"):
            call()
    writer.abort()
    assert not list(tmp_path.iterdir())


def test_a_sample_decides(tmp_path: Path) -> None:
    """Of a tensor whose first bytes are not typical."""
    rows = torch.cat([torch.randint(-(2**15), 2**15, (256, 8192), dtype=torch.int16)] * 2)
    odd = rows.view(torch.bfloat16).clone()
    odd[64:] = (0.02 * torch.randn(448, 8192)).to(torch.bfloat16)
    data = odd.view(torch.uint8).reshape(-1)
    sizes = []
    for planned in (False, True):
        with tpde.PackedWriter(tmp_path / f"{planned}", {"w": odd}) as writer:
            if planned:
                sample = torch.cat([data[begin:end] for begin, end in writer.sample_ranges("w")])
                assert writer.plan("w", sample.numpy())
            for begin in range(0, 512, 32):
                writer.write("w", odd[begin : begin + 32])
        sizes.append((tmp_path / f"{planned}").stat().st_size)
    assert sizes[1] < 0.8 * odd.nbytes
    assert sizes[1] < sizes[0]


def test_what_can_be_no_sample_is_refused(tmp_path: Path) -> None:
    constant = torch.full((1 << 20,), 0.5)
    with tpde.PackedWriter(tmp_path / "out", {"w": constant, "few": WEIGHT[:1, :1]}) as writer:
        needed = sum(end - begin for begin, end in writer.sample_ranges("w"))
        for name, size in (("w", 0), ("w", 64), ("w", needed - 1), ("w", needed + 1), ("few", 1)):
            with pytest.raises(
                InvalidArgument, match=rf"`{name}` has \d+ bytes, {size} were given"
            ) as caught:
                writer.plan(name, bytes(size))
            assert caught.value.where == name
        for part in (constant[:5], constant[5:]):
            writer.write("w", part)
            with pytest.raises(InvalidArgument, match="`w` comes when some of the tensor is written"):
                writer.plan("w", bytes(needed))
        assert not writer.plan("few", bytes(WEIGHT[:1, :1].nbytes))
        writer.write("few", WEIGHT[:1, :1])
    assert (tmp_path / "out").stat().st_size < constant.nbytes // 100
    assert torch.equal(tpde.torch.load_file(tmp_path / "out")["w"], constant)


def test_masked_arrays_are_refused(tmp_path: Path) -> None:
    masked = np.ma.MaskedArray([1.0, 2.0], [False, True])
    with tpde.PackedWriter(tmp_path / "y", {"w": masked}) as writer:
        for call in (
            lambda: tpde.numpy.save_file({"w": masked}, tmp_path / "x"),
            lambda: tpde.numpy.save({"w": masked}),
            lambda: writer.write("w", masked),
        ):
            with pytest.raises(InvalidInput, match=r"`w` is a masked array.*`\.filled\(\)`") as caught:
                call()
            assert caught.value.where == "w"
        writer.write("w", masked.filled(0))
    assert not (tmp_path / "x").exists()
    assert tpde.numpy.load_file(tmp_path / "y")["w"].tolist() == [1.0, 0.0]


@pytest.mark.parametrize("ends", ["closed", "aborted", "failed"])
def test_the_current_folder_may_change(ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    (first / "in").mkdir(parents=True)
    second.mkdir()
    monkeypatch.chdir(first)
    writer = tpde.PackedWriter("in/../out", {"weight": WEIGHT})
    monkeypatch.chdir(second)
    if ends == "failed":
        with pytest.raises(InvalidArgument, match="not complete"):
            writer.close()
    else:
        writer.write("weight", WEIGHT)
        writer.close() if ends == "closed" else writer.abort()
    assert not list(second.iterdir())
    assert sorted(it.name for it in first.iterdir()) == (["in", "out"] if ends == "closed" else ["in"])


@pytest.mark.parametrize(
    "path",
    [None, b"x", 3, io.BytesIO(), "", "a\0b", Path("a\0b"), "x" * 300, "\ud800", "s3://a/b"],
    ids=[
        "none",
        "bytes",
        "number",
        "file",
        "empty",
        "zero",
        "path with a zero",
        "long",
        "half a character",
        "url",
    ],
)
def test_what_is_no_path_is_refused(path: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = (
        "a path is needed, and a .* is given; pass a text|the path .* can name nothing|`s3://a/b` is a URL"
    )
    calls: list[Callable[[], Any]] = [
        lambda: tpde.CheckpointStore(path),
        lambda: tpde.CheckpointStore("none").export(1, path),
        lambda: tpde.PackedWriter(path, {"weight": WEIGHT}),
        lambda: tpde.torch.save_file({"weight": WEIGHT}, path),
        lambda: tpde.numpy.save_file({"bits": BITS}, path),
    ]
    if not isinstance(path, bytes):  # those of a file
        calls += [lambda: tpde.safe_open(path), lambda: tpde.torch.load_file(path)]
    calls += [
        lambda: tpde.inspect(path),
        lambda: tpde.verify(path),
        lambda: tpde.verify(__file__, against=path if path is not None else 5),  # type: ignore[arg-type]
        lambda: tpde.unpack(path, "out"),
        lambda: tpde.unpack(__file__, path),
        lambda: tpde.pack(__file__, path if path != "" else 5),  # type: ignore[arg-type]
        lambda: tpde.diff(path, __file__, "out"),
        lambda: tpde.diff(__file__, path, "out"),
        lambda: tpde.diff(__file__, __file__, path),
        lambda: tpde.patch(path, __file__, "out"),
        lambda: tpde.patch(__file__, path, "out"),
        lambda: tpde.patch(__file__, __file__, path),
    ]
    if importlib.util.find_spec("transformers") is not None:
        calls.append(lambda: tpde.from_pretrained(path))
    for call in calls:
        with pytest.raises(InvalidInput, match=words):
            call()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("key", ["tpde", "tpde.source", "tpde.plain", "tpde.mine"])
def test_metadata_of_the_format_is_refused(key: str, tmp_path: Path) -> None:
    metadata, path = {"mine": "a", key: "1"}, tmp_path / "x"
    calls: list[Callable[[], Any]] = [
        lambda: tpde.PackedWriter(path, {"weight": WEIGHT}, metadata=metadata),
        lambda: tpde.torch.save_file({"weight": WEIGHT}, path, metadata),
        lambda: tpde.torch.save({"weight": WEIGHT}, metadata),
        lambda: tpde.torch.save_model(torch.nn.Linear(2, 2), path, metadata),
        lambda: tpde.numpy.save_file({"bits": BITS}, path, metadata),
        lambda: tpde.numpy.save({"bits": BITS}, metadata),
    ]
    for call in calls:
        with pytest.raises(InvalidArgument, match=f"the metadata has the key `{key}`") as caught:
            call()
        assert caught.value.where == key
    assert not path.exists()
    tpde.torch.save_file({"weight": WEIGHT}, path, {"tpdes": "1", "a.tpde": "2"})
    with tpde.safe_open(path) as file:
        assert file.metadata() == {"tpdes": "1", "a.tpde": "2"}


def test_its_surface() -> None:
    names = {it for it in dir(tpde.PackedWriter) if not it.startswith("_")}
    assert names == {"abort", "close", "plan", "sample_ranges", "write"}


@pytest.mark.parametrize("tensors", [None, ["weight"], 5])
def test_tensors_are_a_mapping(tensors: Any, tmp_path: Path) -> None:
    for call in (
        lambda: tpde.PackedWriter(tmp_path / "x", tensors),
        lambda: tpde.torch.save(tensors),
        lambda: tpde.torch.save_file(tensors, tmp_path / "x"),
        lambda: tpde.numpy.save(tensors),
        lambda: tpde.numpy.save_file(tensors, tmp_path / "x"),
    ):
        with pytest.raises(InvalidInput, match=f"`tensors` is a {type(tensors).__name__}; pass a mapping"):
            call()
    assert not list(tmp_path.iterdir())


def test_a_writer_stays_where_it_is(tmp_path: Path) -> None:
    with tpde.PackedWriter(tmp_path / "x", {"weight": WEIGHT}) as writer:
        for copied in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(InvalidInput, match="in the process that made it"):
                copied(writer)
        for name in (["weight"], 5):
            with pytest.raises(InvalidInput, match="was not announced"):
                writer.write(name, WEIGHT)  # type: ignore[arg-type]
        writer.write("weight", WEIGHT)
