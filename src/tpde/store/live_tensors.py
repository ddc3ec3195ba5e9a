"""Live tensors by name: those of a module or a state dict, whose bytes are plain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from tpde.codec.native import Bytes
from tpde.errors import InvalidInput
from tpde.files.given_tensors import refuse_without_bytes
from tpde.files.packed_header import checked_metadata
from tpde.format.container import TensorSpec
from tpde.frameworks import refuse_expanded, torch_bytes, torch_spec
from tpde.store.states import MemoryState

if TYPE_CHECKING:
    import torch

    Live = torch.nn.Module | Mapping[str, torch.Tensor]


class LiveTensors(NamedTuple):
    """Live tensors by name, and what they are."""

    tensors: dict[str, torch.Tensor]
    specs: dict[str, TensorSpec]

    def read(self, name: str) -> Bytes:
        """The bytes of a tensor."""
        return torch_bytes(self.tensors[name])

    def state(self, like: MemoryState | None = None) -> MemoryState:
        """They as a state. `like` is one that may be of the same names, dtypes and shapes."""
        if like is not None and like.is_of(self.specs):
            return like.of(self.read)
        return MemoryState(self.specs, self.read)


def plain_tensors(state: Live, what: str) -> LiveTensors:
    """The tensors of a module or a state dict; none of them packed."""
    import torch

    found: Any = state.state_dict(keep_vars=True) if isinstance(state, torch.nn.Module) else state
    if not isinstance(found, Mapping):
        raise InvalidInput(
            f"{what} is a {type(found).__name__}", hint="pass a module, or a mapping of names to tensors"
        )
    checked_metadata(found, None)
    specs = {}
    for name, tensor in found.items():
        specs[name] = spec = torch_spec(name, tensor)
        if not _has_bytes(tensor):
            raise InvalidInput(
                f"`{name}` is a {type(tensor).__name__}, which has no plain bytes in memory",
                hint="call `tpde.unpack_module(model)` first if it is packed",
                where=name,
            )
        refuse_without_bytes(name, tensor)
        refuse_expanded(name, spec.nbytes, tensor.untyped_storage().nbytes())
    return LiveTensors(dict(found), specs)


def _has_bytes(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one of PyTorch's own: subclasses may hold anything."""
    import torch

    return type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
