"""Rows of embeddings that transformers makes zero whenever it loads a plain model."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
from torch import nn

log = logging.getLogger("tpde")


@torch.no_grad()
def tell_of_rows(model: nn.Module, names: Iterable[str]) -> None:
    """Warn of padding rows that are zero in the plain model, and not in the packed one.

    Parameters
    ----------
    model : nn.Module
        Loaded.
    names : iterable of str
        Its packed parameters that transformers would have changed.
    """
    for name in names:
        module = model.get_submodule(name.rpartition(".")[0])
        if not isinstance(module, nn.Embedding) or module.padding_idx is None:
            continue
        row = torch.tensor([module.padding_idx], device=module.weight.device)
        if module(row).any():
            log.warning(
                "transformers makes row %d of `%s`, that of padding, zero whenever it loads the plain model; "
                "the packed one has what is in the file, so that outputs differ where there is padding. To "
                "have the same, pack what `save_pretrained` of the plain model writes",
                module.padding_idx,
                name,
            )
