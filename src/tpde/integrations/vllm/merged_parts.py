"""Matrices that vLLM merges from several tensors: all of these have to come."""

from __future__ import annotations

from typing import Any

from tpde.integrations.vllm import internals, refusals

_QKV = "q", "k", "v"


def check(layer: Any, name: str) -> None:
    """See whether all parts of a linear layer's parameters came, of which any did.

    What is there for a missing one is what was in memory before. vLLM, for which a parameter that got a part
    is loaded, runs with that. Loaders that take a whole parameter name no parts.

    Raises
    ------
    InvalidInput
        Naming a part that did not.
    """
    came: dict[str, set[Any]] = {}
    for parameter, given in internals.loads_of(layer):
        part = given.get("loaded_shard_id")
        came.setdefault(parameter, set()).update(part if isinstance(part, tuple) else (part,))
    for parts in came.values():
        if None in parts:
            continue
        sizes = getattr(layer, "output_sizes", ())
        names = _QKV if parts & {*_QKV} else range(len(sizes))
        # A projection for attention to another sequence has no queries.
        missing = [it for it, size in zip(names, sizes, strict=False) if size and it not in parts]
        if missing:
            raise refusals.no_part(name, f"its part `{missing[0]}`")


def check_experts(layer: Any, parameter: str, parts: int, name: str) -> None:
    """See whether as many tensors came for a parameter of experts as there are experts, times its parts.

    Of experts of other devices, vLLM brings more. One tensor of three dimensions is for all of them.

    Raises
    ------
    InvalidInput
        If fewer came.
    """
    loads = [given for it, given in internals.loads_of(layer) if it == parameter]
    if not all("expert_id" in it and it["loaded_weight"].dim() == 2 for it in loads):
        return
    came = {(it["expert_id"], it["shard_id"]) for it in loads}
    number = len(layer.get_parameter(parameter)) * parts
    if loads and len(came) < number:
        raise refusals.no_part(name, f"{number - len(came)} of {number} tensors of experts")
