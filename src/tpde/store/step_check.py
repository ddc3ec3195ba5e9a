"""The check of one step: its payloads, its tree, and what it stands on."""

from __future__ import annotations

from tpde.errors import Corrupt, TpdeError
from tpde.files.problem import Problem
from tpde.format.delta_head import WITH_BASE, TensorEntry
from tpde.store.chain import StepFile
from tpde.store.tree_text import map_tensors, one_of, parse_tree


def check_step(it: StepFile, known: dict[int, dict[str, TensorEntry]]) -> list[Problem]:
    """What is wrong with a step's payloads, its tree, and what it stands on."""
    problems, where = list[Problem](), it.file.name
    try:
        map_tensors(parse_tree(it.tree, where), lambda path, name: name, one_of(known[it.step]), where)
    except Corrupt as error:
        problems.append(Problem(where, None, None, str(error)))
    base = known.get(it.base) if it.base is not None else {}
    if base is None:
        problems.append(Problem(where, None, None, f"it stands on step {it.base}, which cannot be read"))
    for tensor in known[it.step].values():
        try:
            it.file.payload(tensor)
        except TpdeError as error:
            problems.append(Problem(where, tensor.name, None, str(error)))
        if tensor.codec in WITH_BASE and base is not None:
            under = base.get(tensor.name)
            if under is None or under.target != tensor.base or under.spec != tensor.spec:
                message = f"`{where}`: step {it.base} is not what tensor `{tensor.name}` was made from"
                problems.append(Problem(where, tensor.name, None, message))
    return problems
