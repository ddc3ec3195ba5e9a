"""Windows of an earlier release are decoded, and the same matrices give the same bytes again."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from tpde.codec import windows
from tpde.codec import windows_reference as reference

HERE = Path(__file__).resolve().parent
LIST: dict[str, dict[str, str]] = json.loads((HERE / "windows.json").read_text())


def _make() -> ModuleType:
    spec = importlib.util.spec_from_file_location("golden_make_windows", HERE / "make_windows.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MAKE = _make()


@pytest.mark.parametrize("name", MAKE.MATRICES)
def test_golden_windows_are_read_and_made_again(name: str) -> None:
    blob, words = MAKE.path_of(name).read_bytes(), MAKE.matrix(name)
    assert hashlib.sha256(blob).hexdigest() == LIST[name]["blob"], "the golden file itself was changed"
    assert hashlib.sha256(words.tobytes()).hexdigest() == LIST[name]["words"]
    windows.validate(blob)
    assert np.array_equal(windows.decode(blob), words)
    assert np.array_equal(reference.decode(blob), words)
    for threads in (1, 3):
        assert windows.encode(words, threads).tobytes() == blob
    assert reference.encode(words) == blob


def test_both_flags_are_among_them() -> None:
    assert {windows.validate(MAKE.path_of(name).read_bytes()).flags for name in MAKE.MATRICES} == {0, 1}
    assert sum(MAKE.path_of(name).stat().st_size for name in MAKE.MATRICES) < 40_000
