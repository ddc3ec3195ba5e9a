"""Decoded weights as modules' attributes give them in a forward pass: to be read, not changed.

A change would be lost when the weight is decoded next, and the model would go on with other values than the
plain one. So it is refused. PyTorch computes with these as with ordinary tensors: nothing is called in
between, and what is computed, views included, is ordinary.
"""

from __future__ import annotations

from typing import NoReturn, SupportsIndex

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tpde.weights.readonly import HARMLESS, ReadOnly, changes_first, refuse_change


class Lent(Tensor):
    """A decoded weight that is another's memory.

    Attributes
    ----------
    tpde_name : str
        Of the weight.
    """

    tpde_name: str
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def data(self) -> Tensor:
        """The same memory, of which autograd and versions know nothing: read-only, too."""
        return ReadOnly.of(super().detach(), self.tpde_name)

    @data.setter
    def data(self, value: object) -> None:
        raise refuse_change(self.tpde_name, "data =")

    def detach(self) -> Lent:
        """The same memory, which arrays are mostly made of: not to be changed, either."""
        return lend(super().detach(), self.tpde_name)

    def numpy(self, *, force: bool = False) -> npt.NDArray[np.generic[object]]:
        """The memory as a read-only array."""
        array = super().numpy(force=force)
        array.flags.writeable = False
        return array

    def __deepcopy__(self, memo: dict[int, object]) -> Tensor:
        """A copy is an ordinary tensor."""
        return self.detach().clone()

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[object, ...]:
        """What is saved is an ordinary tensor."""
        made: str | tuple[object, ...] = self.detach().clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
        return made


def _refusing(name: str) -> object:
    def refuse(self: Lent, *_: object, **__: object) -> NoReturn:
        raise refuse_change(self.tpde_name, name)

    return refuse


for _name in dir(Tensor):
    _method = getattr(Tensor, _name)
    if callable(_method) and changes_first(_method) and _method not in HARMLESS:
        setattr(Lent, _name, _refusing(_name))


def lend(weight: Tensor, name: str) -> Lent:
    """The same memory in a tensor of its own, which says the same of gradients, and refuses to be changed."""
    with torch.inference_mode(False), torch.no_grad():
        made = weight.as_subclass(Lent)
    made.tpde_name = name
    return made
