"""The check of one step: its payloads, its tree, and what it stands on."""

from __future__ import annotations

from collections.abc import Callable

from tpde.errors import Corrupt, TpdeError
from tpde.files.problem import Problem
from tpde.format.delta_head import WITH_BASE, TensorEntry
from tpde.store.chain import StepFile
from tpde.store.tree_text import map_tensors, one_of, parse_tree

Entries = dict[str, TensorEntry]


def entries_of(it: StepFile) -> Entries:
    """A step's tensors by their names."""
    return {tensor.name: tensor for tensor in it.file.head.tensors}


def check_step(
    it: StepFile, known: dict[int, Entries], look: Callable[[int], Entries | None]
) -> list[Problem]:
    """What is wrong with a step's payloads, its tree, and what it stands on.

    Parameters
    ----------
    it : StepFile
        The step.
    known : dict of int to dict of str to TensorEntry
        The tensors of it and of earlier steps.
    look : callable
        Gives those of a step as it is now, or None: its number may have been given anew meanwhile.
    """
    problems, where = list[Problem](), it.file.name
    try:
        map_tensors(parse_tree(it.tree, where), lambda path, name: name, one_of(known[it.step]), where)
    except Corrupt as error:
        problems.append(Problem(where, None, None, str(error)))
    base: Entries | None = {}
    if it.base is not None:
        base = known.get(it.base)
        if base is None or not all(_stands_on(tensor, base) for tensor in known[it.step].values()):
            base = look(it.base) or base
    if base is None:
        problems.append(Problem(where, None, None, f"it stands on step {it.base}, which cannot be read"))
    for tensor in known[it.step].values():
        try:
            it.file.payload(tensor)
        except TpdeError as error:
            problems.append(Problem(where, tensor.name, None, str(error)))
        if base is not None and not _stands_on(tensor, base):
            message = f"`{where}`: step {it.base} is not what tensor `{tensor.name}` was made from"
            problems.append(Problem(where, tensor.name, None, message))
    return problems


def _stands_on(tensor: TensorEntry, base: Entries) -> bool:
    """Whether a tensor has no base, or these have it."""
    if tensor.codec not in WITH_BASE:
        return True
    under = base.get(tensor.name)
    return under is not None and under.target == tensor.base and under.spec == tensor.spec
