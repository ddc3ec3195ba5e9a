"""What a plain parameter or buffer is under each delta of a model: it is small, and copies are kept."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from tpde.errors import InvalidInput, PackedWeight
from tpde.weights.parameter import PackedParameter


class Copies:
    """A plain parameter or buffer, in each of the states: small, or it would be packed.

    Parameters
    ----------
    module : nn.Module
        Which has it.
    leaf : str
        What the module calls it.
    name : str
        What the model calls it.
    values : mapping of str to torch.Tensor
        What deltas make of it, by their names. Now it is the base's.
    """

    def __init__(self, module: nn.Module, leaf: str, name: str, values: Mapping[str, Tensor]) -> None:
        self._module, self._leaf, self.name = module, leaf, name
        own = self.tensor().detach()
        self._base = own.clone()
        self._values = {key: value.to(own.device) for key, value in values.items()}
        self._names: tuple[str | None, ...] = (None,)  # that it may be under: one, unless interrupted
        self._note(None)

    def tensor(self) -> Tensor:
        """It, as the model has it.

        Raises
        ------
        PackedWeight
            If it is there no longer.
        """
        found: Tensor | None = self._module._parameters.get(self._leaf)
        found = self._module._buffers.get(self._leaf) if found is None else found
        if found is None or isinstance(found, PackedParameter):
            raise PackedWeight(
                f"`{self.name}` is not where it was, and deltas change it",
                hint="load the model again, and leave it as it is",
                where=self.name,
            )
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of all copies."""
        return sum(it.numel() * it.element_size() for it in (self._base, *self._values.values()))

    def value(self, name: str | None) -> Tensor:
        """What it is under a name."""
        return self._base if name is None else self._values.get(name, self._base)

    def require_like(self, other: Copies, names: Sequence[str]) -> None:
        """Refuse to be tied to another one, and not to be the same.

        Raises
        ------
        InvalidInput
            Naming both.
        """
        if self.tensor() is other.tensor() and not all(
            _same_bits(self.value(it), other.value(it)) for it in names
        ):
            raise InvalidInput(
                f"`{self.name}` and `{other.name}` are one weight of the model, and two in a delta",
                hint="untie them in the base first",
                where=other.name,
            )

    def check(self, *, own: bool = False) -> None:
        """Refuse to replace values that are nobody's but the caller's.

        Parameters
        ----------
        own : bool
            Refuse another tensor than the one that was seen last, too, whatever its values.

        Raises
        ------
        PackedWeight
            If it was changed since it was set.
        """
        now = self.tensor()
        if own and self._seen() is not now:
            raise PackedWeight(
                f"`{self.name}` is another tensor than when `use` was called, and would be overwritten",
                hint="call `use` again; parameters of your own go with one delta at a time",
                where=self.name,
            )
        same = self._seen() is now and (now.is_inference() or now._version == self._version)
        if (not same or len(self._names) > 1) and not any(
            _same_bits(now, self.value(it)) for it in self._names
        ):
            raise PackedWeight(
                f"`{self.name}` was changed since its delta was put to use, and would be lost",
                hint="unpack the model with `tpde.unpack_module(model)` to train it",
                where=self.name,
            )

    def set(self, name: str | None) -> None:
        """Make it what it is under a name."""
        now = self.tensor()
        known = len(self._names) == 1 and self.value(name) is self.value(self._names[0])
        self._names = (*self._names, name)  # until it is done: Ctrl-C may leave it before or after
        if not known:
            with torch.inference_mode(now.is_inference()), torch.no_grad():
                now.copy_(self.value(name))
        self._note(name)

    def note(self) -> None:
        """Take it as it is now for what was set."""
        if len(self._names) == 1:
            self._note(self._names[0])

    def _note(self, name: str | None) -> None:
        now = self.tensor()
        self._names, self._seen = (name,), weakref.ref(now)
        self._version = 0 if now.is_inference() else now._version


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.dtype is not b.dtype or a.shape != b.shape:
        return False
    x, y = (it.detach().contiguous().view(-1).view(torch.uint8).cpu() for it in (a, b))
    return torch.equal(x, y)
