"""What flows have in common: models, a step of training, the verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from tpde.errors import InvalidInput, PackedWeight, TpdeError, UnsupportedDevice, UnsupportedDtype

from ..architecture import ids
from ..bits import Differs, kept, same_all
from ..case import Case, PlainFails, agreed, one_line, seeded
from ..shrink import Absent, Unbuilt

Pack = Callable[[Any], Any]
Bits = dict[str, torch.Tensor]
Flow = Callable[[Pack], Bits]
_REFUSALS = (InvalidInput, PackedWeight, UnsupportedDevice, UnsupportedDtype)  # damage is none


class Made:
    """Makes models of an architecture in a dtype; the same weights each time."""

    def __init__(self, name: str = "llama", dtype: str = "bf16") -> None:
        from ..architectures import ARCHITECTURES

        self.case = Case(ARCHITECTURES[name], dtype)

    def __call__(self) -> Any:
        """Make a plain one."""
        return self.case.plain()

    def outputs(self, model: Any) -> Bits:
        """Give what a forward pass returns."""
        return self.case.forward(model)


def as_plain(model: Any) -> Any:
    """The `pack` of plain models: do nothing."""
    return model


def verdict(flow: Flow) -> tuple[str, str]:
    """Run a flow with plain models and with packed ones.

    Returns
    -------
    status : str
        `ok`, `refused` by an error of tpde that names what it is about, `fail`, `plain` if plain models
        cannot do it either, or `absent` if what it needs is not installed.
    reason : str
        One line.
    """
    try:
        expected = agreed(lambda: flow(as_plain))
    except PlainFails as error:
        return "plain", str(error)
    except Absent as error:
        return "absent", str(error)
    except Unbuilt as error:
        return "fail", str(error)
    try:
        found = flow(Case.pack)
    except TpdeError as error:
        says = one_line(error)
        return ("refused" if isinstance(error, _REFUSALS) and "`" in says else "fail"), says
    except Exception as error:
        return "fail", one_line(error)
    try:
        same_all(found, expected)
    except Differs as error:
        return "fail", str(error)
    return "ok", ""


def trained(model: Any, steps: int = 2, given: Callable[[], dict[str, Any]] | None = None) -> Bits:
    """Train what can be trained for some steps; give the losses, and the gradients of each step."""
    seeded()
    model.train()
    optimizer = torch.optim.SGD([it for it in model.parameters() if it.requires_grad], lr=0.05)
    bits: Bits = {}
    for step in range(steps):
        tokens = ids(length=8)
        out = model(**(given() if given else {"input_ids": tokens, "labels": tokens}))
        loss = out.loss if getattr(out, "loss", None) is not None else _sum(out)
        loss.backward()
        bits[f"step {step} loss"] = loss.detach().clone()
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter.grad is not None:
                bits[f"step {step} {name}"] = parameter.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
    return bits


def _sum(out: Any) -> torch.Tensor:
    return torch.stack([it.float().square().sum() for it in out.values() if torch.is_tensor(it)]).sum()


def atomic(made: Made, pack: Pack, act: Callable[[Any], Any]) -> Bits:
    """Do something to a model that may be refused; refused, the model must be as before.

    Raises
    ------
    Differs
        If it was refused after something was changed.
    """
    model = pack(made())
    before = made.outputs(model)
    try:
        out = act(model)
    except TpdeError as error:
        try:
            same_all(made.outputs(model), before)
        except Exception as changed:
            raise Differs(f"refused ({one_line(error)}), but changed: {one_line(changed)}") from error
        raise
    return kept(out) if isinstance(out, dict) else made.outputs(model if out is None else out)


def said(what: str, facts: Iterable[Any]) -> Bits:
    """Give facts that are no tensors, so that those that are missing or more are named."""
    return {f"{what} {fact}": torch.empty(0) for fact in facts}
