"""Memory that a packed weight does not have: what stands for its address and its storage.

Libraries tell weights apart by these, and some then read from there: that is refused.
"""

from __future__ import annotations

from typing import NoReturn

from tpde.errors import PackedWeight
from tpde.weights.packed_tensor import PackedTensor


class Address(int):
    """Where the plain bytes of a packed weight would be: nowhere.

    Libraries tell weights apart by their addresses, and some then read from there. This one is equal to no
    other weight's, and refuses to be looked at as a number.
    """

    tpde_name: str

    @classmethod
    def of(cls, packed: PackedTensor) -> Address:
        """That of a packed weight."""
        made = cls(0)
        made.tpde_name = packed.name
        made._packed = packed  # type: ignore[attr-defined]
        return made

    def __hash__(self) -> int:
        return hash((Address, id(self._packed)))  # type: ignore[attr-defined]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Address):
            return self._packed is other._packed  # type: ignore[attr-defined]
        raise no_bytes(self.tpde_name)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def _refuse(self, *_: object) -> NoReturn:
        raise no_bytes(self.tpde_name)

    __int__ = __bool__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mod__ = __and__ = _refuse


def no_bytes(name: str) -> PackedWeight:
    """The error for reading plain bytes that are nowhere."""
    return PackedWeight(
        f"`{name}` is packed, and has no plain bytes in memory to read",
        hint="save packed weights with `tpde.torch.save_file` or `torch.save`, plain ones as "
        "`tpde.nn.plain_state_dict(model)` gives them; of a transformers model, pack all, not a part, for "
        "`save_pretrained`; of an adapter on embeddings or the head, pass it `save_embedding_layers=False`; "
        "load files with `tpde.torch.load_model`",
    )


class Storage:
    """Memory of a packed weight: tells weights apart, and says where it is and how much, but is not read.

    It is that of the first blob.
    """

    def __init__(self, packed: PackedTensor) -> None:
        self._packed, self._blob = packed, packed.sources[0].memory.untyped_storage()

    def __getattr__(self, name: str) -> object:
        if name in _OF_STORAGES:
            return getattr(self._blob, name)
        if name.startswith("_") or not hasattr(self._blob, name):
            raise AttributeError(f"the memory of a packed weight has no `{name}`")
        raise no_bytes(self._packed.name)

    def __len__(self) -> int:
        return len(self._blob)

    def __getitem__(self, index: object) -> NoReturn:
        raise no_bytes(self._packed.name)

    def __iter__(self) -> NoReturn:
        raise no_bytes(self._packed.name)


_OF_STORAGES = {
    *("_cdata", "_weak_ref", "data_ptr", "device", "dtype", "get_device", "is_cuda", "is_hpu", "is_sparse"),
    *("is_pinned", "is_shared", "nbytes", "resizable", "size", "element_size", "type", "filename"),
}


def no_memory(name: str, how: str) -> PackedWeight:
    """The error for giving others the memory of a copy: what they wrote to it would be lost."""
    return PackedWeight(
        f"`{name}` is packed, and `{how}` would give others the memory of a copy",
        hint="call it on `weight.detach().clone()`",
    )
