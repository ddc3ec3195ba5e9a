"""Configurations and models without data, of a `config.json`: what transformers raises there is worded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from tpde.errors import InvalidInput
from tpde.integrations.transformers.folder import stored_dtype
from tpde.integrations.transformers.internals import on_meta


@contextmanager
def _worded(folder: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        path = folder / "config.json"
        hint = "mend it, or fetch it again"
        if "trust_remote_code" in str(error):
            hint = (
                "it needs code that comes with the model: if you trust it, call `tpde.from_pretrained` with "
                "`trust_remote_code=True` and an automatic class as `model_class`"
            )
        raise InvalidInput(
            f"transformers makes no model of `{path}` ({type(error).__name__}: {error})",
            hint=hint,
            where=str(path),
        ) from error


def config_of(folder: Path) -> Any:
    """The configuration of a model directory.

    Raises
    ------
    InvalidInput
        If transformers makes none of its `config.json`.
    """
    with _worded(folder):
        return AutoConfig.from_pretrained(folder)


def skeleton(folder: Path, kind: Any) -> tuple[Any, torch.dtype]:
    """A model on the `meta` device, and its dtype.

    Parameters
    ----------
    folder : Path
        A model directory.
    kind : type
        Its class, or an automatic one.

    Raises
    ------
    InvalidInput
        If transformers makes none of its `config.json`.
    Truncated, Corrupt, UnsupportedVersion
        If its first weight file is read for the dtype, and cannot be.
    """
    config = config_of(folder)
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else stored_dtype(folder)
    with _worded(folder):
        return on_meta(kind, config, dtype), dtype
