"""Parts of a state's tensors are parts of what it reads, through chains of every codec."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.contents import rng

import tpde
from tpde.errors import Corrupt
from tpde.format.delta_head import CODECS
from tpde.store.comparer import HostComparer, Wanted
from tpde.store.delta_file import DeltaFile
from tpde.store.delta_state import DeltaState
from tpde.store.open_state import open_state

torch = pytest.importorskip("torch", reason="needs torch")
from tpde.torch import save_file  # noqa: E402

CHUNK = 65536
WORDS = 2 * CHUNK + 777
PARTS = [(0, 1), (1, 2), (2, 3), (0, 2), (1, 3), (0, 3)]


def _words(*seed: Any) -> np.ndarray:
    floats = (0.02 * rng("parts", *seed).standard_normal(WORDS)).astype(np.float32)
    return (floats.view(np.uint32) >> 16).astype(np.uint16)


def _state(step: int) -> dict[str, Any]:
    """Tensors that change from step to step in the ways of their names."""
    found = {name: _words() for name in ("same", "sparse", "dense", "full")}
    for i in range(step):
        later = rng("later", i)
        found["sparse"][later.choice(WORDS, 900, replace=False)] += 1
        found["dense"] += later.integers(0, 40, WORDS).astype(np.uint16)
        found["full"] = _words("full", i)
    tensors = {name: torch.from_numpy(it.view(np.int16)).view(torch.bfloat16) for name, it in found.items()}
    noise = rng("plain", step).integers(0, 256, WORDS).astype(np.uint8)
    return tensors | {"plain": torch.from_numpy(noise)}


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    """Give the last of a chain of deltas on a packed file."""
    save_file(_state(0), tmp_path / "0")
    for step in (1, 2, 3):
        save_file(_state(step), tmp_path / f"s{step}")
        tpde.diff(
            tmp_path / ("0" if step == 1 else f"{step - 1}"), tmp_path / f"s{step}", tmp_path / f"{step}"
        )
    return tmp_path / "3"


def test_parts_are_those_of_the_whole(chain: Path) -> None:
    state = open_state(chain)
    assert isinstance(state, DeltaState)
    assert {it.codec for it in state.file.head.tensors} == set(CODECS)
    for key, spec in state.specs.items():
        whole, size = state.read(key, 1), CHUNK * spec.nbytes // WORDS
        ranges = [(a * size, min(b * size, spec.nbytes)) for a, b in PARTS]
        for part, (begin, end) in zip(state.read_parts(key, ranges, 1), ranges, strict=True):
            assert np.array_equal(part, whole[begin:end]), key
    state.close()


def test_parts_of_damaged_chunks_are_refused(chain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = open_state(chain)
    assert isinstance(state, DeltaState)
    for it in state.file.head.tensors:
        if it.codec == "sparse":
            it.sizes = it.sizes + np.uint32(1 << 20)
            with pytest.raises(Corrupt, match=f"`{it.name}`"):
                state.read_parts(("", it.name), [(2 * CHUNK, 4 * CHUNK)], 1)
    state.close()


def test_what_a_sample_cannot_read_is_said_as_of_the_whole(chain: Path, tmp_path: Path) -> None:
    """Another base: not that chunks are damaged, which they are not."""
    save_file({name: it + 1 for name, it in _state(0).items()}, tmp_path / "other")
    (tmp_path / "0").unlink()
    (tmp_path / "other").rename(tmp_path / "0")
    with pytest.raises(tpde.MissingBase, match="is not what"):
        tpde.diff(chain, tmp_path / "s1", tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_a_sample_reads_its_chunks_alone(chain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, size = open_state(chain), 2 * CHUNK
    monkeypatch.setattr(DeltaFile, "target_of", lambda *_: pytest.fail("a whole tensor is made"))
    pairs = HostComparer(state, state, 1).chunks([Wanted(("", "sparse"), ("", "dense"), [(size, 2 * size)])])
    assert [(old.size, new.size) for old, new in pairs] == [(size, size)]
    state.close()
