"""Comparing what models return, bit by bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch


class Differs(AssertionError):
    """Two things that should have the same bits do not; the text is one line."""


def tensors(
    thing: Any, path: str = "", seen: frozenset[int] = frozenset()
) -> Iterator[tuple[str, torch.Tensor]]:
    """Walk through whatever a model returns: tuples, dicts, dataclasses, caches."""
    if isinstance(thing, torch.Tensor):
        yield path, thing
        return
    if id(thing) in seen or isinstance(thing, (str, bytes, int, float, type, torch.nn.Module, torch.dtype)):
        return
    seen = seen | {id(thing)}
    parts: Iterator[tuple[Any, Any]]
    if isinstance(thing, Mapping):
        parts = iter(thing.items())
    elif isinstance(thing, (list, tuple)):
        parts = enumerate(thing)  # type: ignore[assignment]
    elif dataclasses.is_dataclass(thing) or hasattr(thing, "__dict__"):
        parts = iter(vars(thing).items())
    else:
        return
    for key, value in parts:
        yield from tensors(value, f"{path}.{key}" if path else str(key), seen)


def kept(thing: Any) -> dict[str, torch.Tensor]:
    """Copy the tensors of what a model returned, by their paths."""
    return {path: tensor.detach().clone() for path, tensor in tensors(thing)}


def same(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Compare two tensors as integers.

    Raises
    ------
    Differs
        With the number of words that differ, the first place, and both words.
    """
    if found.dtype != expected.dtype or found.shape != expected.shape:
        raise Differs(f"{what}: {_kind(found)}, expected {_kind(expected)}")
    a, b = (t.detach().cpu().contiguous().reshape(-1) for t in (found, expected))
    size = expected.element_size()
    words = (a.view(torch.uint8) != b.view(torch.uint8)).reshape(-1, size).any(1)
    wrong = words.nonzero()
    if wrong.numel():
        at = int(wrong[0])
        raise Differs(
            f"{what}: {wrong.numel()} of {a.numel()} words differ, the first at {at}: "
            f"{a[at].item()!r}, expected {b[at].item()!r}"
        )


def same_all(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], what: str = "") -> None:
    """Compare what `kept` gave of two models.

    Raises
    ------
    Differs
        If paths or bits differ.
    """
    missing, more = expected.keys() - found.keys(), found.keys() - expected.keys()
    if missing or more:
        raise Differs(f"{what} tensors missing {sorted(missing)[:3]}, more {sorted(more)[:3]}".strip())
    for path, tensor in expected.items():
        same(found[path], tensor, f"{what} {path}".strip())


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
