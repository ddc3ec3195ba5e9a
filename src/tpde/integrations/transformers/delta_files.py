"""Deltas of a model's files, as states of the model that is loaded from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tpde.errors import InvalidInput, NotJson
from tpde.files.documents import parse_object
from tpde.format.delta_head import OtherEntry
from tpde.integrations.transformers.internals import tied_weights
from tpde.integrations.transformers.weight_map import WeightMap, WeightSource
from tpde.loading.checkpoint_files import Checkpoint
from tpde.nn.named_deltas import require_known
from tpde.weights.changed import Variant
from tpde.weights.delta_sources import Delta, DeltaLike, entries_of, values_of, variants_of
from tpde.weights.packed_tensor import PackedTensor
from tpde.weights.source import Source

# Of a configuration: where it comes from, how it is stored, and what only generation and losses go by.
_NO_WEIGHTS = {
    *(
        "_name_or_path",
        "transformers_version",
        "quantization_config",
        "dtype",
        "torch_dtype",
        "architectures",
    ),
    *("use_cache", "bos_token_id", "eos_token_id", "pad_token_id"),
}


class States(NamedTuple):
    """What deltas make of a model's weights: see `tpde.nn.attached_deltas.attach`."""

    names: list[str]
    variants: dict[Source, dict[str, Variant]]
    plain: dict[str, dict[str, Tensor]]


def read_states(
    deltas: Mapping[str, DeltaLike],
    model: Any,
    checkpoint: Checkpoint,
    weights: WeightMap,
    parts: Mapping[str, PackedTensor],
    expected: Callable[[str], torch.dtype],
    base: str,
) -> States:
    """Read deltas of a checkpoint, and check them against it.

    Parameters
    ----------
    deltas : mapping of str to bytes or path-like
        By the names that `use` takes.
    model : PreTrainedModel
        Which is being loaded.
    checkpoint : Checkpoint
        Its files.
    weights : WeightMap
        What becomes of their tensors.
    parts : mapping of str to PackedTensor
        Its packed weights, by their names in it.
    expected : callable
        What dtype it has a tensor in, by its name in it.
    base : str
        What errors call the checkpoint.

    Raises
    ------
    MissingBase
        If the checkpoint is not what a delta was made from: the tensor is named.
    InvalidInput
        If the configuration is another in a delta, or it is no delta.
    PackedWeight, Truncated, Corrupt, UnsupportedVersion
        As `tpde.nn.add_deltas`.
    """
    with ExitStack() as files:
        opened = {name: files.enter_context(closing(Delta(it))) for name, it in deltas.items()}
        for delta in opened.values():
            require_known(delta, {**checkpoint.packed, **checkpoint.plain}, base)
            _require_config(model, delta)
        tied = _tied_names(model, weights, parts)
        variants: dict[Source, dict[str, Variant]] = {}
        for source in {it for packed in parts.values() for it in packed.sources}:
            names = tied.get(source.name, [source.name])
            entries = entries_of(names, source.header.spec, opened, base)
            variants[source] = variants_of(source, entries, opened, base)
        plain: dict[str, dict[str, Tensor]] = {}
        for it in (*weights.plain, *(found for found, _ in weights.decoded)):
            for name, tensors in _plain(it, model, checkpoint, opened, expected(it.target), base).items():
                plain.setdefault(name, {}).update(tensors)
    return States(list(deltas), variants, plain)


def _tied_names(model: Any, weights: WeightMap, parts: Mapping[str, PackedTensor]) -> dict[str, list[str]]:
    """By the name of each tensor that is there once, all that the files have of it."""
    found: dict[str, list[str]] = {}
    for target, source in tied_weights(model).items():
        if target in weights.runs and source in weights.runs and parts.get(target) is parts.get(source):
            for mine, theirs in zip(weights.runs[source].parts, weights.runs[target].parts, strict=True):
                found.setdefault(mine.name, [mine.name]).append(theirs.name)
    return found


def _plain(
    source: WeightSource,
    model: Any,
    checkpoint: Checkpoint,
    deltas: Mapping[str, Delta],
    dtype: torch.dtype,
    base: str,
) -> dict[str, dict[str, Tensor]]:
    """What deltas make of tensors that are plain in the model, by their names in it."""
    names = [it for names in source.names.values() for it in names]
    if not any(name in delta.entries for name in names for delta in deltas.values()):
        return {}
    cpu = torch.device("cpu")
    old: dict[str, Tensor] = {}
    new: dict[str, dict[str, Tensor]] = {}
    for name in names:
        spec = checkpoint.packed[name].spec if name in checkpoint.packed else checkpoint.plain[name]
        entries = entries_of([name], spec, deltas, base)
        if name in checkpoint.packed:
            old[name] = checkpoint.decode([checkpoint.packed[name].run], cpu)[0]
        else:
            old[name] = checkpoint.plain_tensor(name, cpu)
        for key, value in values_of(old[name], entries, deltas, base).items():
            new.setdefault(key, {})[name] = value
    made: dict[str, dict[str, Tensor]] = {}
    for key, values in new.items():
        taken = {name: it.to(dtype) for name, it in (old | values).items()}
        for name, tensor in source.convert(model, taken.__getitem__).items():
            made.setdefault(name, {})[key] = tensor
    return made


def _require_config(model: Any, delta: Delta) -> None:
    """Refuse the delta of a model that computes otherwise: only weights are another's under it.

    Raises
    ------
    InvalidInput
        Naming what differs.
    """
    entry = next((it for it in delta.file.head.others if it.name == "config.json" and it.size), None)
    if entry is None:
        return
    mine = model.config.to_dict()
    theirs = type(model.config).from_dict(_json(delta, entry)).to_dict()
    keys = sorted(
        key for key in (mine.keys() | theirs.keys()) - _NO_WEIGHTS if mine.get(key) != theirs.get(key)
    )
    if keys:
        listed = ", ".join(f"`{key}`" for key in keys[:8])
        raise InvalidInput(
            f"`config.json` of `{delta.name}` differs in {listed}, and the model is built by its base's",
            hint="load it as a model of its own: write it with `tpde patch`",
            where="config.json",
            found=[theirs.get(key) for key in keys[:8]],
            needed=[mine.get(key) for key in keys[:8]],
        )


def _json(delta: Delta, entry: OtherEntry) -> dict[str, Any]:
    where = Path(f"{delta.name}: config.json")
    try:
        return parse_object(delta.file.other(entry).decode(), where)
    except UnicodeDecodeError as error:
        raise NotJson(f"`{where}` is not JSON ({error})", hint="fetch it again") from None
