"""Saves in the background when the interpreter ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tpde import CheckpointStore

pytest.importorskip("torch", reason="checkpoints hold PyTorch's tensors")


@pytest.mark.parametrize("every", [1, 16])
@pytest.mark.parametrize("at_exit", [False, True])
def test_a_save_in_the_background_outlives_the_script(tmp_path: Path, every: int, at_exit: bool) -> None:
    script = f"""
import atexit
import torch
from tpde import CheckpointStore

state = {{f"{{i}}.weight": torch.randn(1000, 1000).mul(0.02).bfloat16() for i in range(8)}}
state["ids"] = torch.randint(0, 50, (1000, 1000))
store = CheckpointStore({str(tmp_path / "store")!r}, keyframe_every={every}, threads=2)
store.save(1, state)
for it in state.values():
    it.view(-1)[::37] += 1
call = {at_exit} and atexit.register or (lambda save, *args, **options: save(*args, **options))
call(store.save, 2, state, background=True)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    store = CheckpointStore(tmp_path / "store")
    assert store.steps == (1, 2)
    assert store.load(2).keys() == store.load(1).keys()


def test_what_fails_at_the_interpreters_end_is_logged(tmp_path: Path) -> None:
    script = f"""
import atexit, logging
from tpde import CheckpointStore

store = CheckpointStore({str(tmp_path / "store")!r})
store.save(1, {{"x": 1}})
(store.directory / "step-00000001.tpde").write_bytes(b"damaged")

class Asks(logging.Handler):
    def emit(self, record):
        try:
            store.wait()
        except RuntimeError as error:
            print(error)

def last():
    store.save(2, {{"x": 2}}, background=True)
    try:
        store.close()
    except Exception as error:
        print(type(error).__name__)

logging.getLogger("tpde").addHandler(Asks())
atexit.register(last)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout == "the thread that saves step 2 cannot wait for itself\nTruncated\n"
