"""A model without its weights, and what of its files becomes what: enough to plan with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tpde.integrations.transformers.folder import require_files, weight_files
from tpde.integrations.transformers.internals import conversion_mapping
from tpde.integrations.transformers.load_model import model_class_of
from tpde.integrations.transformers.skeleton import skeleton
from tpde.integrations.transformers.weight_map import WeightMap, map_weights
from tpde.loading.checkpoint_files import Checkpoint


@contextmanager
def opened_shape(folder: Path, *, pack: bool = False) -> Iterator[tuple[Any, Checkpoint, WeightMap]]:
    """A packed model on the `meta` device, its files, and which of their tensors make up its parameters.

    Nothing but the files' headers is read.

    Parameters
    ----------
    folder : Path
        A packed model directory.
    pack : bool
        It may be plain: its weights then count as packed as they would be when they come.

    Raises
    ------
    InvalidInput, NotPacked, Truncated, Corrupt, UnsupportedVersion
        If it cannot be loaded.
    """
    kind = model_class_of(folder)
    require_files(folder)
    model, dtype = skeleton(folder, kind)
    with Checkpoint(weight_files(folder), pack=pack) as checkpoint:
        yield model, checkpoint, map_weights(model, checkpoint, conversion_mapping(model), dtype)
