"""Garbage collection while models are loaded, and after they are dropped."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import checkpoint
from support.garbage import alive, uncollected
from support.models import outputs, torch

import tpde

pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("error", [None, OSError("nothing there")])
def test_no_pass_over_all_objects(error: OSError | None, enabled: bool, tmp_path: Path) -> None:
    """Garbage is not collected while a model is loaded, and then again as before, whatever happened."""
    pair = checkpoint(tmp_path, "llama")
    seen = []

    class Kind:
        @staticmethod
        def from_pretrained(*args: Any, **options: Any) -> Any:
            seen.append(gc.isenabled())
            if error is not None:
                raise error
            return pair.kind.from_pretrained(*args, **options)

    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with nullcontext() if error is None else pytest.raises(OSError, match="nothing there"):
            tpde.from_pretrained(pair.packed, model_class=Kind)
        assert (seen, gc.isenabled()) == ([False], enabled)
    finally:
        (gc.enable if before else gc.disable)()


@pytest.mark.parametrize("hooks", [False, True])
def test_before_the_next_load_garbage_is_collected_where_accelerate_has_put_hooks(
    hooks: bool, tmp_path: Path
) -> None:
    """They are in cycles with the model: nobody is told when it is dropped."""
    hooked = pytest.importorskip("accelerate.hooks", reason="needs accelerate")
    pair = checkpoint(tmp_path, "llama")

    class Cycle:
        def __init__(self) -> None:
            self.own = self

    class Kind:
        @staticmethod
        def from_pretrained(*args: Any, **options: Any) -> Any:
            made = pair.kind.from_pretrained(*args, **options)
            return hooked.add_hook_to_module(made, hooked.ModelHook()) if hooks else made

    thresholds = gc.get_threshold()
    gc.set_threshold(1 << 30)  # by itself, it begins no more
    try:
        tpde.from_pretrained(pair.packed, model_class=pair.kind)  # what other tests have left is collected
        tpde.from_pretrained(pair.packed, model_class=Kind)
        gone = weakref.ref(Cycle())
        tpde.from_pretrained(pair.packed, model_class=pair.kind)
        assert (gone() is None) == hooks
    finally:
        gc.set_threshold(*thresholds)


def test_a_model_that_is_dropped_is_freed_at_once(tmp_path: Path) -> None:
    pair = checkpoint(tmp_path, "llama")
    model = tpde.from_pretrained(pair.packed)
    with torch.no_grad():
        outputs("llama", model, 2)
    refs = [weakref.ref(it) for it in (*model.modules(), *model.buffers())]
    with uncollected():
        del model
        assert alive(refs) == []
