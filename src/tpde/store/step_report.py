"""What a step of a checkpoint store is, and what it takes."""

from __future__ import annotations

from dataclasses import dataclass

from tpde.store.chain import StepFile


@dataclass(frozen=True)
class StepReport:
    """A step of a store.

    Attributes
    ----------
    step : int
        Its number.
    base : int or None
        The step that it changes; None if it is a keyframe.
    state_bytes, file_bytes : int
        Size of its tensors, and of its file.
    tensors, changed : int
        How many tensors it has, and how many of them are not as in the base.
    """

    step: int
    base: int | None
    state_bytes: int
    file_bytes: int
    tensors: int
    changed: int


def report_step(it: StepFile) -> StepReport:
    """What there is to know of a step."""
    tensors = list(it.file.head.tensors)
    return StepReport(
        it.step,
        it.base,
        sum(t.spec.nbytes for t in tensors),
        it.file.size,
        len(tensors),
        sum(t.size > 0 for t in tensors),
    )
