"""What recurrent layers take: state-space models and linear attention, run once on tensors without data.

Where their kernels are not installed, transformers computes with PyTorch alone what a chunk of tokens does to
another, and that is much larger than any layer's output: of a Falcon-H1 of 7 B parameters 3.2 MiB for each
token with transformers 5.17, 0.25 MiB with 5.23. It depends on the code, so the code is asked.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache

from tpde.nn.batch_rows import CACHES

log = logging.getLogger(__name__)

# With one of them, layers run in kernels, which keep to themselves what would be large.
KERNELS = ("mamba_ssm", "causal_conv1d", "fla")

PAIR = 2  # sequences: with one, what is put in another order is not copied
SHORT, LOOP = 2, 16  # tokens: the least that are computed in chunks, and as many as tell loops over tokens
# Tokens of passes. The last two tell what each costs, the others what a sequence does beside: chunks are of
# 64 to 256 tokens, and a token more than a chunk has makes two of it. One tells what grows by the square.
LOOPED, CHUNKED, LONG = (LOOP, 2 * LOOP), (65, 129, 257, 2049, 4097), 32768


class Scan(NamedTuple):
    """Bytes of what is computed in a recurrent layer, the largest of a model's.

    Attributes
    ----------
    token : int
        Of each token.
    pair : float
        Of each pair of tokens of a sequence.
    sequence : int
        Of each sequence: it is filled up to whole chunks.
    """

    token: int = 0
    pair: float = 0.0
    sequence: int = 0

    def most(self, other: Scan) -> Scan:
        """The larger of each."""
        pair, sequence = max(self.pair, other.pair), max(self.sequence, other.sequence)
        return Scan(max(self.token, other.token), pair, sequence)

    def bytes(self, max_tokens: int, max_batch: int) -> int:
        """Of at most so many tokens, in so many sequences, however these are divided."""
        return max_tokens * self.token + int(max_tokens * max_tokens * self.pair) + max_batch * self.sequence


class Recurrent(NamedTuple):
    """What a model's recurrent layers take.

    Attributes
    ----------
    scan : Scan
        While one of them computes.
    states : int
        Bytes that all of them keep of each sequence in a cache.
    """

    scan: Scan
    states: int


NONE = Recurrent(Scan(), 0)  # of models without such layers

_known: WeakKeyDictionary[nn.Module, dict[str, Recurrent]] = WeakKeyDictionary()


class _Peak(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the bytes that are alive after each operation, but for tensors that were there before.

    The largest counts twice: where it was, PyTorch's allocator puts a smaller tensor in a part of its memory,
    which is then too short for the largest one of the next layer. Of a Falcon-H1 of 7 B parameters it has
    6 GiB, and as much again did not do.
    """

    def __init__(self, before: Collection[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = self.largest = self.calls = 0
        self._before = {it.untyped_storage()._cdata for it in before}
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for it in tree_leaves(made):
            if isinstance(it, Tensor) and (storage := it.untyped_storage())._cdata not in self._before:
                self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()  # type: ignore[no-untyped-call]
        self._live = {key: it for key, it in self._live.items() if not it[0].expired()}  # type: ignore[no-untyped-call]
        sizes = [nbytes for _, nbytes in self._live.values()]
        self.largest = max(self.largest, *sizes, 0)
        self.peak = max(self.peak, sum(sizes) + self.largest)
        self.calls += 1
        return made


def recurrent_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Names and modules of a model's recurrent layers: those that convolve along tokens, and take a cache."""
    for path, module in model.named_modules():
        convolves = any(
            isinstance(it, nn.Conv1d) and it.groups == it.in_channels > 1 for it in module.children()
        )
        if convolves and _cache_name(type(module)) and _width(module):
            yield path, module


def recurrent_of(model: Any, only: Collection[str] | None = None) -> Recurrent:
    """What a model's recurrent layers take; of those that cannot be run so, nothing is known.

    Parameters
    ----------
    model : PreTrainedModel
        On the `meta` device.
    only : collection of str, optional
        Parameters of the layers that keep states on the device in question; by default all.
    """
    if model not in _known:
        _known[model] = dict(_measured_layers(model))
    scan, states = Scan(), 0
    for path, found in _known[model].items():
        scan = scan.most(found.scan)
        layer = model.get_submodule(path)
        if only is None or any(f"{path}.{name}" in only for name, _ in layer.named_parameters()):
            states += found.states
    return Recurrent(Scan() if _has_kernels() else scan, states)


def _measured_layers(model: Any) -> Iterator[tuple[str, Recurrent]]:
    """Each recurrent layer, and what it takes; of layers that are alike, one is run."""
    found: dict[Any, Recurrent] = {}
    for path, layer in recurrent_layers(model):
        kind = type(layer), tuple(it.shape for it in layer.parameters())
        if kind not in found:
            try:
                found[kind] = _measured(model, layer)
            except Exception as error:  # it wants more than layers of its kind do, or runs on no such device
                log.debug("what a `%s` takes is not known: %s", type(layer).__name__, error)
                found[kind] = NONE
        yield path, found[kind]


def _has_kernels() -> bool:
    return any(importlib.util.find_spec(name) is not None for name in KERNELS)


def _cache_name(kind: type[nn.Module]) -> str | None:
    """What a layer calls the cache that its forward pass takes, if it does."""
    names = inspect.signature(kind.forward).parameters
    return next((it for it in CACHES if it in names), None)


def _width(layer: nn.Module) -> int:
    """How wide the hidden states are that a layer takes."""
    return next((it.in_features for it in layer.children() if isinstance(it, nn.Linear)), 0)


def _measured(model: Any, layer: nn.Module) -> Recurrent:
    """What one layer takes of a sequence, by passes over two of several lengths."""
    known = [*layer.parameters(), *layer.buffers()]
    dtype = next(it.dtype for it in known if it.is_floating_point())

    def run(length: int) -> tuple[int, int, int]:
        cache = DynamicCache(config=model.config)
        with torch.device("meta"), torch.no_grad():
            states = torch.empty(PAIR, length, _width(layer), dtype=dtype)
            with _Peak([*known, states]) as mode:
                layer(states, **{str(_cache_name(type(layer))): cache})
        kept = [value for it in cache.layers for value in tree_leaves(list(vars(it).values()))]
        nbytes = sum(it.nbytes for it in kept if isinstance(it, Tensor))
        return -(-mode.peak // PAIR), nbytes // PAIR, mode.calls

    least, states, calls = run(SHORT)
    loops = run(LOOP)[2] - calls >= LOOP - SHORT
    passes = {length: run(length) for length in (LOOPED if loops else CHUNKED)}
    (low, before), (high, after) = list(passes.items())[-2:]
    token = -(-(after[0] - before[0]) // (high - low))
    sequence = max(least, *(peak - length * token for length, (peak, *_) in passes.items()))
    pair = 0.0
    if after[2] == before[2]:  # all chunks at once, not one after the other
        pair = max(run(LONG)[0] - sequence - LONG * token, 0) / LONG**2
    return Recurrent(Scan(token, pair, sequence), states)
