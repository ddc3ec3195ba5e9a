"""A packed weight as the rest of PyTorch sees it: a parameter.

It has the plain weight's shape, dtype and device; reading these decodes nothing. Whatever computes with it
gets a decoded copy. It cannot be changed, but for another packed weight that is copied to it, or values that
it has already.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map

from tpde.errors import InvalidInput, PackedWeight
from tpde.weights import product
from tpde.weights.frozen import CONTIGUOUS, as_looked_up, as_weight, formatted
from tpde.weights.readonly import changes_first, function_name, guarded, refuse_change
from tpde.weights.tensor import PackedTensor, rebuild_tensor
from tpde.weights.transforms import transformed, untransformed

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class PackedParameter(nn.Parameter):
    """A parameter whose value is a packed weight.

    Its own `requires_grad` is false: it cannot be trained. What the plain weight says is kept, since PyTorch
    chooses kernels by it; setting it to false is allowed, as freezing a plain weight is.

    Parameters
    ----------
    packed : PackedTensor
        The weight. Another `PackedParameter` gives its own.
    requires_grad : bool
        What the plain weight says.
    memory_format : torch.memory_format
        Of the plain weight. What is packed is contiguous, and put in another one when it is decoded.

    Raises
    ------
    PackedWeight
        If `packed` is an ordinary tensor.

    Attributes
    ----------
    packed : PackedTensor
        The weight at rest.
    plain_requires_grad : bool
        What the plain weight says.
    memory_format : torch.memory_format
        Of the plain weight.

    Examples
    --------
    >>> parameter = PackedParameter(packed)  # doctest: +SKIP
    >>> parameter.shape, parameter.dtype  # decodes nothing  # doctest: +SKIP
    (torch.Size([4096, 4096]), torch.bfloat16)
    >>> x @ parameter.t()  # decodes  # doctest: +SKIP
    """

    packed: PackedTensor
    plain_requires_grad: bool
    memory_format: torch.memory_format

    def __new__(
        cls, packed: Any, requires_grad: bool = False, memory_format: torch.memory_format = CONTIGUOUS
    ) -> PackedParameter:
        """A parameter for a packed weight."""
        if isinstance(packed, PackedParameter):  # accelerate makes parameters anew
            memory_format = packed.memory_format
            requires_grad, packed = requires_grad or packed.plain_requires_grad, packed.packed
        if not isinstance(packed, PackedTensor):
            raise PackedWeight(
                f"a packed parameter holds a packed weight, not a {type(packed).__name__}",
                hint="call `tpde.unpack_module(module)` first to give it other values",
            )
        strides = None
        if memory_format is not CONTIGUOUS:
            strides = torch.empty(packed.shape, device="meta").to(memory_format=memory_format).stride()
        made: PackedParameter = torch.Tensor._make_wrapper_subclass(
            cls, packed.shape, strides, dtype=packed.dtype, device=packed.device, requires_grad=False
        )
        made.packed, made.plain_requires_grad = packed, requires_grad
        made.memory_format = memory_format
        return made

    # ---- what it holds ----

    def plain(self, room: int = 0) -> Tensor:
        """The weight decoded, in memory of its own, which says of gradients what the plain one says.

        Parameters
        ----------
        room : int
            Bytes of that memory, at least.

        Raises
        ------
        Corrupt
            Naming tensor and chunk.
        PackedWeight
            If it is larger than any buffer.
        """
        with untransformed():
            flat = self.packed.decoded(room).view(-1).view(torch.uint8)
            weight = as_weight(flat, self.packed.dtype, self.packed.shape, self.plain_requires_grad)
            return formatted(weight, self.memory_format)

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of a matrix, as `embedding` looks them up."""
        return as_looked_up(self.packed.rows(ids), self.plain_requires_grad)

    def takes(self, values: Tensor) -> bool:
        """Whether `values` can be copied here: another packed weight, or what this one holds already.

        Raises
        ------
        InvalidInput, PackedWeight
            If it is a packed weight that is not alike: see `PackedTensor.check_load`.
        """
        if isinstance(values, PackedParameter):
            if values.packed is not self.packed:
                self.packed.check_load(values.packed)
            return True
        if not isinstance(values, Tensor) or values.is_meta or values.shape != self.shape:
            return False
        mine, word = self.packed.decoded().view(-1), _INTEGERS[self.packed.dtype.itemsize]
        theirs = values.detach().to(mine.device, mine.dtype).contiguous().view(-1)
        return torch.equal(mine.view(word), theirs.view(word))

    def sync(self) -> None:
        """Say where the weight is, after it was moved."""
        with torch._C.DisableTorchFunctionSubclass():
            moved = PackedParameter(self.packed, memory_format=self.memory_format)
            if super().device != self.packed.device or super().stride() != moved.stride():
                torch.Tensor.data.__set__(self, moved)  # type: ignore[attr-defined]

    def _use_count(self) -> int:
        """Refuse to be swapped: `torch.utils.swap_tensors` asks both tensors for it first."""
        raise PackedWeight(
            f"`{self.packed.name}` is packed, and cannot be swapped for another tensor",
            hint="call `tpde.unpack_module(module)` first",
        )

    def _typed_storage(self) -> NoReturn:  # which `__torch_function__` is not asked for
        raise _no_memory(self.packed.name, "_typed_storage")

    # ---- copying ----

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedParameter:
        found = memo.get(id(self))
        if found is None:
            packed = memo.get(id(self.packed)) or self.packed.__deepcopy__(memo)
            found = memo[id(self)] = PackedParameter(packed, self.plain_requires_grad, self.memory_format)
        return cast(PackedParameter, found)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return rebuild_parameter, (self.packed, self.plain_requires_grad, str(self.memory_format))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        ratio = self.packed.packed_bytes / max(self.packed.nbytes, 1)
        return (
            f"PackedParameter({list(self.packed.shape)}, {self.packed.dtype}, device={self.packed.device}, "
            f"packed={ratio:.3f})"
        )

    # ---- computing ----

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer what needs no values, refuse what changes them, and compute the rest from a decoded copy."""
        kwargs = kwargs or {}
        if func in _ASKS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        special = _SPECIAL.get(func)
        if special is not None and (func in _OTHERS_FIRST or (args and isinstance(args[0], cls))):
            return special(func, *args, **kwargs)
        return _compute(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """The same for code in C++, which does not ask `__torch_function__`."""
        kwargs = kwargs or {}
        if func is torch.ops.aten.detach.default:
            return PackedParameter(args[0].packed, memory_format=args[0].memory_format)
        if func is torch.ops.aten.copy_.default and isinstance(args[0], cls):
            return _copy(func, *args)
        for place, argument in enumerate(func._schema.arguments):
            written = argument.alias_info is not None and argument.alias_info.is_write
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            for it in value if isinstance(value, (tuple, list)) else (value,):
                if written and isinstance(it, cls):
                    raise refuse_change(it.packed.name, func._schema.name)
                if isinstance(it, cls) and func._schema.name == "aten::set_":
                    raise _no_memory(it.packed.name, "set_")
        return func(*tree_map(_decoded, args), **tree_map(_decoded, kwargs))


class _Address(int):
    """Where the plain bytes of a packed weight would be: nowhere.

    Libraries tell weights apart by their addresses, and some then read from there. This one is equal to no
    other weight's, and refuses to be looked at as a number.
    """

    tpde_name: str

    @classmethod
    def of(cls, packed: PackedTensor) -> _Address:
        made = cls(0)
        made.tpde_name = packed.name
        made._packed = packed  # type: ignore[attr-defined]
        return made

    def __hash__(self) -> int:
        return hash((_Address, id(self._packed)))  # type: ignore[attr-defined]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, _Address):
            return self._packed is other._packed  # type: ignore[attr-defined]
        raise _no_bytes(self.tpde_name)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def _refuse(self, *_: Any) -> NoReturn:
        raise _no_bytes(self.tpde_name)

    __int__ = __bool__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mod__ = __and__ = _refuse


def _no_bytes(name: str) -> PackedWeight:
    return PackedWeight(
        f"`{name}` is packed, and has no plain bytes in memory to read",
        hint="save packed weights with `tpde.torch.save_file` or `torch.save`, plain ones as "
        "`tpde.nn.plain_state_dict(model)` gives them; of a transformers model, pack all, not a part, for "
        "`save_pretrained`",
    )


def _decoded(value: Any) -> Any:
    return value.plain() if isinstance(value, PackedParameter) else value


def _compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function on decoded copies."""
    first = next(iter((*args, *kwargs.values())), None)  # some pass all they got by name
    if isinstance(first, PackedParameter) and changes_first(func):
        raise refuse_change(first.packed.name, function_name(func))
    if isinstance(kwargs.get("out"), PackedParameter):
        raise refuse_change(kwargs["out"].packed.name, function_name(func))
    copies: dict[int, tuple[str, Tensor, int]] = {}

    def decoded(value: Any) -> Any:
        if not isinstance(value, PackedParameter):
            return value
        if id(value) not in copies:
            copy = value.plain()
            copies[id(value)] = value.packed.name, copy, copy._version
        return copies[id(value)][1]

    result = func(*tree_map(decoded, args), **tree_map(decoded, kwargs))
    for name, copy, version in copies.values():
        if copy._version != version:
            raise refuse_change(name, function_name(func))
    return guarded(result, {copy.untyped_storage().data_ptr(): name for name, copy, _ in copies.values()})


def _embedding(
    func: Any,
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Rows, as looked up: the others are not decoded."""
    if (
        isinstance(weight, PackedParameter)
        and max_norm is None
        and len(weight.packed.parts) == 1
        and len(weight.packed.shape) == 2
        and not transformed()
    ):
        return weight.rows(input)
    return _compute(func, (input, weight, padding_idx, max_norm, *args), kwargs)


def _linear(func: Any, input: Any, weight: Any, bias: Any = None) -> Any:
    """A product, of a weight that is multiplied as it is without decoding it."""
    if isinstance(weight, PackedParameter) and weight.packed.multiplies:
        made = product.linear(weight.packed, input, bias, weight.plain_requires_grad)
        if made is not None:
            return made
    return _compute(func, (input, weight, bias), {})


def _same(func: Any, weight: PackedParameter, *args: Any, **kwargs: Any) -> PackedParameter:
    """The weight itself."""
    return weight


def _detach(func: Any, weight: PackedParameter) -> PackedParameter:
    """The same weight in another parameter, which was never to be trained."""
    return PackedParameter(weight.packed, memory_format=weight.memory_format)


def _freeze(func: Any, weight: PackedParameter, requires_grad: bool = True) -> PackedParameter:
    """Refuse to train it; note that the plain one would be frozen."""
    if requires_grad:
        raise PackedWeight(
            f"`{weight.packed.name}` is packed, and cannot be trained",
            hint="call `tpde.unpack_module(module)` first, or train an adapter",
        )
    if weight.plain_requires_grad:
        weight.plain_requires_grad = False
        weight.packed.tell_frozen()
    return weight


def _set_data(func: Any, weight: PackedParameter, value: Any) -> None:
    """Take what it has already, and nothing else."""
    if not (isinstance(value, PackedParameter) and value.packed is weight.packed):
        raise refuse_change(weight.packed.name, "data =")


def _copy(func: Any, target: Tensor, values: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy to a packed weight what is packed, or what it holds already; from one, what it decodes to."""
    if not isinstance(target, PackedParameter):
        return target.copy_(_decoded(values), non_blocking)
    packed = target.packed
    if target.takes(values):
        if isinstance(values, PackedParameter) and values.packed is not packed:
            packed.load(values.packed)
            target.sync()
        return target
    raise PackedWeight(
        f"`{packed.name}` is packed, and other values would be copied to it",
        hint="call `tpde.unpack_module(module)` first, or copy a packed weight",
    )


def _to(func: Any, weight: PackedParameter, *args: Any, **kwargs: Any) -> Tensor:
    """Elsewhere, the weight stays packed; in another dtype, it is an ordinary tensor."""
    copies = kwargs.pop("copy", False)
    with torch._C.DisableTorchFunctionSubclass():
        device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
    if memory_format not in (None, torch.preserve_format, weight.memory_format):
        return weight.plain().to(device=device, dtype=dtype, memory_format=memory_format)
    return _moved(weight, device, dtype, copies)


def _moved(
    weight: PackedParameter, device: torch.device | None, dtype: torch.dtype | None, copies: bool = False
) -> Tensor:
    packed = weight.packed
    if dtype is not None and dtype != packed.dtype:
        return weight.plain().to(device=device, dtype=dtype)
    there = device is None or device == packed.device or (device.type == "cuda" and device.index is None)
    if there and device is not None and device.type != packed.device.type:
        there = False
    if there and not copies:
        return weight
    made = packed.clone()
    if not there:
        made.apply(lambda blob: blob.to(device))
    return PackedParameter(made, weight.plain_requires_grad, weight.memory_format)


def _cpu(func: Any, weight: PackedParameter, **kwargs: Any) -> Tensor:
    return _moved(weight, torch.device("cpu"), None)


def _cuda(func: Any, weight: PackedParameter, device: Any = None, *args: Any, **kwargs: Any) -> Tensor:
    there = torch.device("cuda", torch.cuda.current_device()) if device is None else torch.device(device)
    return _moved(weight, there, None)


def _type(func: Any, weight: PackedParameter, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
    if dtype is None:
        return f"torch.{'cuda.' if weight.device.type == 'cuda' else ''}{_TYPES[weight.dtype]}"
    return _compute(func, (weight, dtype, *args), kwargs)


_TYPES = {
    torch.float32: "FloatTensor",
    torch.float64: "DoubleTensor",
    torch.float16: "HalfTensor",
    torch.bfloat16: "BFloat16Tensor",
}


def _share(func: Any, weight: PackedParameter) -> PackedParameter:
    """The blobs in shared memory."""
    weight.packed.apply(lambda blob: blob.share_memory_())  # type: ignore[no-untyped-call]
    return weight


def _is_shared(func: Any, weight: PackedParameter) -> bool:
    return all(source.memory.untyped_storage().is_shared() for source in weight.packed.sources)


class _Storage:
    """Memory of a packed weight: tells weights apart, and says where it is and how much, but is not read.

    It is that of the first blob.
    """

    def __init__(self, packed: PackedTensor) -> None:
        self._packed, self._blob = packed, packed.sources[0].memory.untyped_storage()

    def __getattr__(self, name: str) -> Any:
        if name in _OF_STORAGES:
            return getattr(self._blob, name)
        if name.startswith("_") or not hasattr(self._blob, name):
            raise AttributeError(f"the memory of a packed weight has no `{name}`")
        raise _no_bytes(self._packed.name)

    def __len__(self) -> int:
        return len(self._blob)

    def __getitem__(self, index: Any) -> NoReturn:
        raise _no_bytes(self._packed.name)

    def __iter__(self) -> NoReturn:
        raise _no_bytes(self._packed.name)


_OF_STORAGES = {
    *("_cdata", "_weak_ref", "data_ptr", "device", "dtype", "get_device", "is_cuda", "is_hpu", "is_sparse"),
    *("is_pinned", "is_shared", "nbytes", "resizable", "size", "element_size", "type", "filename"),
}


def _storage(func: Any, weight: PackedParameter) -> Any:
    return _Storage(weight.packed)


def _no_memory(name: str, how: str) -> PackedWeight:
    """The error for giving others the memory of a copy: what they wrote to it would be lost."""
    return PackedWeight(
        f"`{name}` is packed, and `{how}` would give others the memory of a copy",
        hint="call it on `weight.detach().clone()`",
    )


def _refuse_memory(func: Any, weight: PackedParameter, *args: Any, **kwargs: Any) -> NoReturn:
    raise _no_memory(weight.packed.name, function_name(func))


def _data_ptr(func: Any, weight: PackedParameter) -> int:
    return _Address.of(weight.packed)


def _new(func: Any, weight: PackedParameter, *args: Any, **kwargs: Any) -> Any:
    """A tensor like it, without its values."""
    return func(torch.empty(0, dtype=weight.dtype, device=weight.device), *args, **kwargs)


def _empty_like(func: Any, weight: PackedParameter, **kwargs: Any) -> Tensor:
    """Memory like its plain value's."""
    kwargs.pop("memory_format", None)
    facts: dict[str, Any] = {"dtype": weight.dtype, "device": weight.device, **kwargs}
    return torch.empty(weight.shape, **facts)


_T = torch.Tensor
_PROPERTIES = (
    *("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad", "grad_fn", "names"),
    *("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_sparse_csr", "is_quantized", "is_nested", "is_xpu"),
    *("is_mkldnn", "is_mps", "is_ipu", "is_mtia", "is_maia", "is_vulkan", "is_xla", "itemsize", "nbytes"),
    *(
        "_version",
        "output_nr",
        "retains_grad",
        "_backward_hooks",
        "_base",
        "_grad",
        "_post_accumulate_grad_hooks",
    ),
)
_METHODS = (
    *("size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "storage_offset"),
    *("is_contiguous", "is_floating_point", "is_complex", "is_signed", "get_device", "has_names", "__len__"),
    *("is_inference", "is_conj", "is_neg", "is_same_size", "__hash__", "register_hook", "retain_grad"),
    *(
        "register_post_accumulate_grad_hook",
        "is_pinned",
        "dim_order",
        "_is_view",
        "__format__",
        "is_distributed",
    ),
)
# What is answered without values.
_ASKS: set[Any] = {
    *(getattr(_T, name).__get__ for name in _PROPERTIES if hasattr(_T, name)),
    *(getattr(_T, name) for name in _METHODS if hasattr(_T, name)),
    *(torch.is_floating_point, torch.is_complex, torch.is_signed, torch.numel, torch.is_same_size),
    *(torch.is_inference, torch.is_conj, torch.is_neg, torch.get_device),
    _T.grad.__set__,  # type: ignore[union-attr]
}
_SPECIAL: dict[Any, Callable[..., Any]] = {
    functional.embedding: _embedding,
    functional.linear: _linear,
    _T.detach: _detach,
    torch.detach: _detach,
    _T.data.__get__: _detach,  # type: ignore[attr-defined]
    _T.data.__set__: _set_data,  # type: ignore[attr-defined]
    _T.requires_grad_: _freeze,
    _T.requires_grad.__set__: _freeze,  # type: ignore[attr-defined]
    _T.detach_: _same,
    _T.contiguous: _same,
    _T.copy_: _copy,
    _T.to: _to,
    _T.cpu: _cpu,
    _T.cuda: _cuda,
    _T.type: _type,
    _T.share_memory_: _share,
    _T.is_shared: _is_shared,
    _T.untyped_storage: _storage,
    _T.storage: _refuse_memory,
    _T.__dlpack__: _refuse_memory,
    _T.data_ptr: _data_ptr,
    torch.empty_like: _empty_like,
    **{getattr(_T, f"new_{name}"): _new for name in ("empty", "zeros", "ones", "full", "tensor")},
    **{
        getattr(_T, name): functools.partial(
            lambda dtype, func, weight, **_: _moved(weight, None, dtype), dtype
        )
        for name, dtype in (
            ("float", torch.float32),
            ("double", torch.float64),
            ("half", torch.float16),
            ("bfloat16", torch.bfloat16),
        )
    },
}


_OTHERS_FIRST = {
    functional.embedding,
    functional.linear,
    _T.copy_,
}  # whose first argument may be another tensor


# Formats by their names, each with the number of dimensions that it is for; 0 is any.
_FORMATS = {
    str(it): (it, rank)
    for it, rank in ((CONTIGUOUS, 0), (torch.channels_last, 4), (torch.channels_last_3d, 5))
}


def rebuild_parameter(packed: PackedTensor, requires_grad: bool, memory_format: str) -> PackedParameter:
    """A packed parameter from what `pickle` kept of it.

    Raises
    ------
    InvalidInput
        If it is no packed weight, or names a memory format that such a weight cannot have.
    """
    if not isinstance(packed, PackedTensor):
        raise InvalidInput(f"what was pickled is no packed weight, but a {type(packed).__name__}")
    known = _FORMATS.get(memory_format) if isinstance(memory_format, str) else None
    if known is None or known[1] not in (0, len(packed.shape)):
        raise InvalidInput(
            f"`{packed.name}` of shape {list(packed.shape)} was pickled with {str(memory_format)[:200]!r}, "
            "which is no memory format of such a weight",
            hint="fetch it again",
        )
    return PackedParameter(packed, requires_grad, known[0])


# What `torch.load(weights_only=True)` may call: both check what they are given.
torch.serialization.add_safe_globals([rebuild_parameter, rebuild_tensor])
