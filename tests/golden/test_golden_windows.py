"""Windows of an earlier release are decoded, and the same matrices give the same bytes again."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from golden import make_windows as golden
from tpde.codec import window_plan, windows, windows_encoder_reference
from tpde.codec import windows_reference as reference

HERE = Path(__file__).resolve().parent
LIST: dict[str, dict[str, str]] = json.loads((HERE / "windows.json").read_text())


@pytest.mark.parametrize("name", golden.MATRICES)
def test_golden_windows_are_read_and_made_again(name: str) -> None:
    blob, words = golden.path_of(name).read_bytes(), golden.matrix(name)
    assert hashlib.sha256(blob).hexdigest() == LIST[name]["blob"], "the golden file itself was changed"
    assert hashlib.sha256(words.tobytes()).hexdigest() == LIST[name]["words"]
    windows.validate(blob)
    assert np.array_equal(windows.decode(blob), words)
    assert np.array_equal(reference.decode(blob), words)
    for threads in (1, 3):
        assert window_plan.encode(words, threads).tobytes() == blob
    assert windows_encoder_reference.encode(words) == blob


def test_both_flags_are_among_them() -> None:
    assert {windows.validate(golden.path_of(name).read_bytes()).flags for name in golden.MATRICES} == {0, 1}
    assert sum(golden.path_of(name).stat().st_size for name in golden.MATRICES) < 40_000
