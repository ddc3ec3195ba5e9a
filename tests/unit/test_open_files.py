"""Whatever becomes of a call, it closes the files that it has opened, and leaves none to be collected."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import spoilt

import tpde
from tpde.errors import AlreadyPacked, Corrupt, InvalidDestination, InvalidInput, NotPacked, TpdeError
from tpde.files.copying import copy_file, sha256
from tpde.files.inputs import open_source
from tpde.files.inspection import inspect
from tpde.files.packed_state import is_packed, packed_names
from tpde.files.reader import PackedFile
from tpde.format.constants import MANIFEST
from tpde.io.sources import FileSource


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FileSource]]:
    """Hold on to every file that is opened for reading: none is closed by being forgotten."""
    found: list[FileSource] = []
    real = FileSource.__init__

    def noting(self: FileSource, path: Any) -> None:
        real(self, path)
        found.append(self)

    monkeypatch.setattr(FileSource, "__init__", noting)
    yield found
    for it in found:
        it.close()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give files and models, plain, packed and damaged."""
    folder = tmp_path_factory.mktemp("there")
    for name, data in {"plain": spoilt.PLAIN, "packed": spoilt.PACKED}.items():
        (folder / f"{name}.safetensors").write_bytes(data)
    for way in ("damaged", "newer", "another hash", "cut in the data"):
        spoilt.write(folder / f"{way}.safetensors", way)
    model = folder / "model"
    (model / "sub").mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (model / "a.safetensors").write_bytes(spoilt.PLAIN)
    (model / "sub" / "b.safetensors").write_bytes(spoilt.PLAIN)
    tpde.pack(model, folder / "model packed")
    shutil.copytree(folder / "model packed", folder / "model damaged")
    shutil.copy(folder / "damaged.safetensors", folder / "model damaged" / "sub" / "b.safetensors")
    shutil.copytree(folder / "model packed", folder / "model resaved")
    (folder / "model resaved" / MANIFEST).unlink()
    (folder / "no weights.safetensors").write_bytes(b"no weights at all")
    return folder


@pytest.fixture
def there(made: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Stand where these are, and remove what comes of them."""
    monkeypatch.chdir(made)
    before = set(made.iterdir())
    yield made
    for path in set(made.iterdir()) - before:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def interrupt(*_: Any, **__: Any) -> None:
    """Stand for Ctrl-C."""
    raise KeyboardInterrupt


PLAIN, PACKED = "plain.safetensors", "packed.safetensors"
CALLS: dict[str, tuple[type[BaseException] | None, Callable[[], object]]] = {
    "pack": (None, lambda: tpde.pack(PLAIN, "out")),
    "pack what is packed": (AlreadyPacked, lambda: tpde.pack(PACKED, "out")),
    "pack what is no weights": (TpdeError, lambda: tpde.pack("no weights.safetensors", "out")),
    "pack into nowhere": (InvalidDestination, lambda: tpde.pack(PLAIN, "none/out")),
    "pack and be interrupted": (KeyboardInterrupt, lambda: tpde.pack(PLAIN, "out", progress=interrupt)),
    "pack a model": (None, lambda: tpde.pack("model", "out")),
    "pack a model, interrupted": (
        KeyboardInterrupt,
        lambda: tpde.pack("model", "out", progress=interrupt),
    ),
    "pack a packed model": (AlreadyPacked, lambda: tpde.pack("model resaved", "out")),
    "unpack": (None, lambda: tpde.unpack(PACKED, "out")),
    "unpack what is plain": (NotPacked, lambda: tpde.unpack(PLAIN, "out")),
    "unpack what is damaged": (Corrupt, lambda: tpde.unpack("damaged.safetensors", "out")),
    "unpack another version": (TpdeError, lambda: tpde.unpack("newer.safetensors", "out")),
    "unpack and be interrupted": (
        KeyboardInterrupt,
        lambda: tpde.unpack(PACKED, "out", progress=interrupt),
    ),
    "unpack a model": (None, lambda: tpde.unpack("model packed", "out")),
    "unpack a damaged model": (Corrupt, lambda: tpde.unpack("model damaged", "out")),
    "unpack a resaved model": (None, lambda: tpde.unpack("model resaved", "out")),
    "verify": (None, lambda: tpde.verify(PACKED)),
    "verify against": (None, lambda: tpde.verify(PACKED, against=PLAIN)),
    "verify what is plain": (NotPacked, lambda: tpde.verify(PLAIN)),
    "verify what is damaged": (None, lambda: tpde.verify("damaged.safetensors", against=PLAIN)),
    "verify what cannot be opened": (None, lambda: tpde.verify("another hash.safetensors")),
    "verify against what is packed": (AlreadyPacked, lambda: tpde.verify(PACKED, against=PACKED)),
    "verify against what is cut": (
        TpdeError,
        lambda: tpde.verify(PACKED, against="cut in the data.safetensors"),
    ),
    "verify and be interrupted": (
        KeyboardInterrupt,
        lambda: tpde.verify(PACKED, against=PLAIN, progress=interrupt),
    ),
    "verify a model": (None, lambda: tpde.verify("model packed", against="model")),
    "verify a damaged model": (None, lambda: tpde.verify("model damaged", against="model")),
    "verify a resaved model": (None, lambda: tpde.verify("model resaved")),
    "inspect": (None, lambda: inspect(PACKED)),
    "inspect a model": (None, lambda: inspect("model packed")),
    "inspect what is cut": (TpdeError, lambda: inspect("cut in the data.safetensors")),
    "copy": (None, lambda: copy_file(Path(PLAIN), Path("out"))),
    "copy over something": (FileExistsError, lambda: copy_file(Path(PLAIN), Path(PACKED))),
    "hash": (None, lambda: sha256(Path(PLAIN))),
    "hash what is not there": (InvalidInput, lambda: sha256(Path("nothing"))),
    "is it packed": (None, lambda: is_packed(Path(PACKED))),
    "what is packed": (None, lambda: packed_names(Path(PACKED))),
    "open what is refused": (Corrupt, lambda: PackedFile("another hash.safetensors")),
    "open a source that is packed": (AlreadyPacked, lambda: open_source(Path(PACKED))),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_file_is_closed(name: str, there: Path, opened: list[FileSource]) -> None:
    error, call = CALLS[name]
    opened.clear()
    with contextlib.nullcontext() if error is None else pytest.raises(error):
        call()
    assert opened or error in (InvalidInput, InvalidDestination, FileExistsError)
    assert [it.name for it in opened if it.fileno() != -1] == []


@pytest.mark.parametrize("name", [PLAIN, "model"])
def test_a_source_is_closed_when_packing_it_fails(
    name: str, there: Path, opened: list[FileSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is being read, as for its header, its hash, or to be packed."""
    real, left = os.preadv, 0

    def interrupted(*given: Any) -> int:
        nonlocal left
        left -= 1
        if not left:
            raise KeyboardInterrupt
        return real(*given)

    monkeypatch.setattr(os, "preadv", interrupted)
    for number in range(1, 100):
        left = number
        opened.clear()
        with contextlib.suppress(KeyboardInterrupt):
            tpde.pack(name, "out", threads=1)
        assert opened
        assert all(it.fileno() == -1 for it in opened)
        assert Path("out").exists() == (left > 0)
        if left > 0:
            break
    assert 5 < number < 99


@pytest.mark.parametrize("kind", ["good", "code", "no state dict", "old"])
def test_state_dicts_are_closed(kind: str, there: Path, opened: list[FileSource]) -> None:
    torch = pytest.importorskip("torch")
    value = {
        "good": {"w": torch.ones(3000)},
        "old": {"w": torch.ones(3000)},
        "code": torch.nn.Linear(1, 1),
        "no state dict": [1],
    }[kind]
    torch.save(value, "x.pt", _use_new_zipfile_serialization=kind != "old")
    with contextlib.nullcontext() if kind in ("good", "old") else pytest.raises(InvalidInput):
        tpde.pack("x.pt", "out")
    assert opened
    assert all(it.fileno() == -1 for it in opened)
