"""Packed tensors that a model must hold plain."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from tpde.errors import InvalidInput, TpdeError, printable
from tpde.integrations.transformers.weight_map import WeightMap, WeightSource
from tpde.loading.assignment import assign
from tpde.loading.checkpoint_files import Checkpoint, Stored
from tpde.loading.runs import Run
from tpde.nn import PackedTensor

log = logging.getLogger("tpde")

LOUD_BYTES = 1 << 20  # less than this, such as a few biases, is no loss worth a warning


def some(names: Sequence[str]) -> str:
    """A few names, and how many more there are."""
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(f"`{printable(name)}`" for name in names[:4]) + more


def load_plain(
    model: Any, source: WeightSource, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype
) -> list[str]:
    """Decode tensors, cast and convert them as transformers would, and put them into a model.

    Returns
    -------
    list of str
        Their names in the model.
    """

    def take(name: str) -> torch.Tensor:
        if name in checkpoint.packed:
            return checkpoint.decode([checkpoint.packed[name].run], device, dtype)[0]
        return checkpoint.plain_tensor(name, device).to(dtype)

    try:
        runs = source.runs(model, checkpoint)
        if runs is None:
            made = source.convert(model, take)
        else:  # of each blob, only what is wanted: what it is cut into is never there a second time
            made = dict(zip(runs, checkpoint.decode(list(runs.values()), device, dtype), strict=True))
    except (TpdeError, torch.cuda.OutOfMemoryError):
        raise
    except Exception as error:  # of transformers or torch, about tensors that do not go together
        raise InvalidInput(
            f"{some(list(chain(*source.names.values())))} cannot become `{source.target}` of the model "
            f"({type(error).__name__}: {error})",
            hint="fetch the model again",
        ) from error
    for name, tensor in made.items():
        assign(model, name, tensor)
    return list(made)


def keep_plain(model: Any, runs: Mapping[str, Run[Stored]], parts: dict[str, PackedTensor]) -> None:
    """Put weights into a model plain that were packed as they came and take no less: `tpde pack` does so.

    Parameters
    ----------
    model : PreTrainedModel
        Whose parameters they are.
    runs : mapping of str to Run
        Its packed parameters in the files.
    parts : dict of str to PackedTensor
        The same, read; these are taken out.
    """
    for name, run in runs.items():
        if any(it.is_plain for it in run.parts) and parts[name].packed_bytes >= run.nbytes:
            assign(model, name, parts.pop(name).decoded())


def report_decoded(weights: WeightMap, checkpoint: Checkpoint) -> int:
    """Log what is decoded, or left plain, a line for each reason; returns how many tensors that were."""
    reasons: dict[str, list[str]] = {}
    for source, reason in weights.decoded:
        reasons.setdefault(reason, []).extend(source.stored(checkpoint))
    for reason, names in reasons.items():
        nbytes = sum(checkpoint.packed[name].nbytes for name in names)
        log.log(
            logging.WARNING if nbytes >= LOUD_BYTES else logging.INFO,
            "%d of %d %s (%d bytes) %sstay plain in memory, because each %s: %s",
            len(names),
            len(checkpoint.packed),
            "packed tensors" if checkpoint.is_packed else "tensors",
            nbytes,
            "are decoded and " if checkpoint.is_packed else "",
            reason,
            some(names),
        )
    return sum(len(names) for names in reasons.values())
