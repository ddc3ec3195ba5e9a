"""Which packed tensors of a checkpoint make up which parameters of a model.

transformers renames a checkpoint's tensors and converts some on their way into a model. Its own rules are
asked, in its own order: this follows `core_model_loading.convert_and_load_state_dict_in_model`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from tpde.errors import InvalidInput
from tpde.integrations.transformers.internals import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    dtype_plan,
    ignored_keys,
    rename_source_key,
    tied_weights,
)
from tpde.loading.assignment import misshapen
from tpde.loading.checkpoint_files import Checkpoint, Stored
from tpde.loading.runs import Run
from tpde.nn import supports
from tpde.nn.unpackable import kept_plain

# Once parameters, now made by the models themselves; transformers passes over them in silence, too.
_BUFFERS = (r"rotary_emb\.inv_freq", r"(^|\.)position_ids$")


class WeightSource(NamedTuple):
    """Tensors of the checkpoint that become one or several of the model.

    Attributes
    ----------
    target : str
        The first name in the model.
    converter : WeightConverter or None
        What turns them into it; None if they are only renamed.
    names : dict of str to list of str
        Names in the checkpoint by the converter's patterns.
    """

    target: str
    converter: Any
    names: dict[str, list[str]]

    def runs(self, model: nn.Module, checkpoint: Checkpoint) -> dict[str, Run[Stored]] | None:
        """What they become, as runs; None if that takes whole plain tensors."""
        try:
            return self.convert(model, lambda name: checkpoint.packed[name].run)
        except Exception:  # a plain tensor among them, or a conversion that moves bytes within rows
            return None

    def stored(self, checkpoint: Checkpoint) -> list[str]:
        """Names of those that are packed."""
        return [n for names in self.names.values() for n in names if n in checkpoint.packed]

    def convert(self, model: nn.Module, take: Callable[[str], Any]) -> dict[str, Any]:
        """What they become, by names in the model; `take` gives a tensor of the checkpoint."""
        if self.converter is None:
            (name,) = (n for names in self.names.values() for n in names)
            return {self.target: take(name)}
        converter = copy.deepcopy(self.converter)
        for pattern, names in self.names.items():
            for name in names:
                converter.add_tensor(self.target, name, pattern, lambda name=name: take(name))
        made = converter.convert(self.target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


class WeightMap(NamedTuple):
    """What becomes of a checkpoint's packed tensors.

    Attributes
    ----------
    runs : dict of str to Run
        Parameters that stay packed, by their names in the model, as runs of `Stored`.
    decoded : list of (WeightSource, str)
        What must be decoded, and why.
    unexpected : list of str
        Packed tensors that the model has no place for.
    plain : list of WeightSource
        What is stored plain, all of it.
    """

    runs: dict[str, Run[Stored]]
    decoded: list[tuple[WeightSource, str]]
    unexpected: list[str]
    plain: list[WeightSource]

    def halves(self, checkpoint: Checkpoint) -> list[str]:
        """First names in the model of what is decoded because only some of it is packed."""
        return [
            source.target
            for source, _ in self.decoded
            if len(source.stored(checkpoint)) < sum(map(len, source.names.values()))
        ]

    def of_plain(self) -> list[str]:
        """Parameters that are packed as they come: transformers sees tensors in the files."""
        return [name for name, run in self.runs.items() if any(part.is_plain for part in run.parts)]


def _sources(
    model: Any, checkpoint: Checkpoint, conversions: Sequence[Any]
) -> tuple[dict[str, WeightSource], list[str]]:
    renamings = [it for it in conversions if isinstance(it, WeightRenaming)]
    converters = [it for it in conversions if isinstance(it, WeightConverter)]
    by_pattern = {pattern: it for it in converters for pattern in it.source_patterns}
    prefix, state = model.base_model_prefix, model.state_dict()
    sources: dict[str, WeightSource] = {}
    unexpected = []
    try:
        names = sorted([*checkpoint.packed, *checkpoint.plain], key=dot_natural_key)
    except ValueError as error:
        raise InvalidInput(
            f"a tensor has a name that transformers cannot sort ({error})", hint="fetch the files again"
        ) from None
    for name in names:
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            target, pattern = rename_source_key(name, [], [], base_model_prefix=prefix, meta_state_dict=state)
        if target not in state:
            unexpected.append(name)
            continue
        converter = None if pattern is None else by_pattern[pattern]
        found = sources.setdefault(target, WeightSource(target, converter, {}))
        found.names.setdefault(name if pattern is None else pattern, []).append(name)
    known = [*ignored_keys(model), *_BUFFERS]
    return sources, [
        name
        for name in unexpected
        if name in checkpoint.packed and not any(re.search(pattern, name) for pattern in known)
    ]


def expected_dtypes(model: Any, dtype: torch.dtype) -> Callable[[str], torch.dtype]:
    """What dtype transformers gives each tensor of a model's state dict."""
    keep = dtype_plan(model, dtype)
    rules = [(re.compile(glob.replace("*", ".*")), kept) for glob, kept in keep.items()]
    state = model.state_dict()

    def expected(name: str) -> torch.dtype:
        for rule, kept in rules:
            if rule.search(name):
                return kept
        found: torch.dtype = state[name].dtype if name in state else dtype
        return found

    return expected


def _refusal(
    model: nn.Module, name: str, made: Any, expected: torch.dtype, *, is_packed: bool = True
) -> str | None:
    """Why a parameter cannot hold a run, or None; `is_packed` as of `Checkpoint`."""
    path, _, leaf = name.rpartition(".")
    try:
        module = model.get_submodule(path)
    except AttributeError:
        return "has no place in the model under its converted name"
    parameter = module._parameters.get(leaf)
    held = module._buffers.get(leaf) if parameter is None else parameter
    if held is not None and made.shape != held.shape:  # before anything of that shape is decoded
        if not is_packed:  # transformers, which loads it, may be told to leave it out
            return f"has another shape than the model's, such as {list(made.shape)} for {list(held.shape)}"
        also = ", or unpack it and pass `ignore_mismatched_sizes=True`"
        raise misshapen(name, made.shape, held.shape, also)
    if parameter is None or not supports(module, leaf):
        return f"belongs to a {type(module).__name__}, which cannot hold packed weights"
    if made.dtype is not expected:
        return f"is stored as {made.dtype} and loaded as {expected}"
    return None if made.whole else "is cut by transformers into weights that are not packed on their own"


def map_weights(
    model: Any, checkpoint: Checkpoint, conversions: Sequence[Any], dtype: torch.dtype
) -> WeightMap:
    """Decide for every packed tensor of a checkpoint.

    Parameters
    ----------
    model : PreTrainedModel
        On the `meta` device.
    checkpoint : Checkpoint
        Its files.
    conversions : sequence of WeightTransform
        transformers' for the model.
    dtype : torch.dtype
        That the model was made with.

    Raises
    ------
    InvalidInput
        If a packed tensor has another shape than the model's.
    """
    sources, unexpected = _sources(model, checkpoint, conversions)
    expected = expected_dtypes(model, dtype)
    runs: dict[str, Run[Stored]] = {}
    origin: dict[str, WeightSource] = {}
    decoded: list[tuple[WeightSource, str]] = []
    plain: list[WeightSource] = []
    kept = kept_plain(model)

    for source in sources.values():
        stored = source.stored(checkpoint)
        if not stored:
            plain.append(source)
            continue
        made = source.runs(model, checkpoint)
        if made is None:
            decoded.append((source, "is converted by transformers in a way that needs the plain weight"))
            continue
        reasons = [
            _refusal(model, name, run, expected(name), is_packed=checkpoint.is_packed)
            for name, run in made.items()
        ]
        reasons += [kept[name] for name in made if name in kept]
        reason = next((reason for reason in reasons if reason is not None), None)
        if reason is None:
            runs.update(made)
            origin.update(dict.fromkeys(made, source))
        else:
            decoded.append((source, reason))
    _loosen_ties(model, runs, origin, decoded, sources)
    return WeightMap(runs, decoded, unexpected, plain)


def _loosen_ties(
    model: Any,
    runs: dict[str, Run[Stored]],
    origin: Mapping[str, WeightSource],
    decoded: list[tuple[WeightSource, str]],
    there: Container[str],
) -> None:
    """Decode what is tied to a parameter that cannot be packed, or that is `there` and is not."""
    for target, tied in tied_weights(model).items():
        for name, other in ((target, tied), (tied, target)):
            if name not in runs or other in runs:
                continue
            path, _, leaf = other.rpartition(".")
            if not supports(model.get_submodule(path), leaf):
                reason = f"is tied to `{other}`, which cannot hold packed weights"
            elif other in there:
                reason = f"is tied to `{other}`, which is plain in the files"
            else:
                continue
            source = origin[name]
            for key in [key for key, it in origin.items() if it is source]:
                runs.pop(key, None)
            decoded.append((source, reason))


def same_bytes(a: Run[Stored], b: Run[Stored]) -> bool:
    """Whether two runs of `Stored` hold the same bytes, by the hashes in the files."""
    if len(a.parts) != len(b.parts):
        return False
    pairs = zip(a.parts, b.parts, strict=True)
    return all(x.spec == y.spec and x.digest == y.digest for x, y in pairs)
