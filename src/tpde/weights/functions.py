"""What PyTorch's functions do with packed weights: answered, refused, or computed from a decoded copy."""

from __future__ import annotations

import functools
from typing import NoReturn, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import functional
from torch.utils._pytree import tree_map

from tpde.errors import PackedWeight
from tpde.weights import moves, product, queries
from tpde.weights.packed_memory import Address, Storage, no_memory
from tpde.weights.packed_tensor import PackedTensor
from tpde.weights.queries import QUERIES
from tpde.weights.readonly import Function, ReadOnly, changes_first, function_name, guarded, refuse_change
from tpde.weights.transforms import transformed

T = TypeVar("T")


class Operator(Function[object], Protocol):
    """What `__torch_dispatch__` gets."""

    _schema: torch._C.FunctionSchema


class Packed(nn.Parameter):
    """A packed parameter, as functions take it: `tpde.weights.parameter.PackedParameter` is one."""

    packed: PackedTensor
    plain_requires_grad: bool
    memory_format: torch.memory_format

    def plain(self, room: int = 0) -> Tensor:
        """The weight decoded, in memory of its own."""
        raise NotImplementedError

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of a matrix, decoded."""
        raise NotImplementedError

    def like(self, packed: PackedTensor) -> Packed:
        """Another packed weight, in a parameter that says the same of gradients and memory format."""
        raise NotImplementedError

    def detached(self) -> Packed:
        """The same weight in another parameter, which was never to be trained."""
        raise NotImplementedError

    def takes(self, values: Tensor) -> bool:
        """Whether `values` can be copied here."""
        raise NotImplementedError

    def sync(self) -> None:
        """Say where the weight is, after it was moved."""
        raise NotImplementedError


def call(func: Function[object], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """Call a function of PyTorch, of whose arguments some are packed."""
    if func in QUERIES:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if is_compiling():  # a layer that was given the weight after that was packed
        torch._dynamo.graph_break(
            msg="packed weights of plain layers are decoded between programs: "
            "`tpde.pack_module(model)` packs these layers as well"
        )
        outside: Function[object] = torch.compiler.disable(_answer)  # type: ignore[no-untyped-call]
        return outside(func, args, kwargs)
    return _answer(func, args, kwargs)


def _answer(func: Function[object], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """Call a function outside of compiled programs."""
    special = _SPECIAL.get(func)
    if special is not None and (func in _OTHERS_FIRST or (args and isinstance(args[0], Packed))):
        return special(func, *args, **kwargs)
    return _compute(func, args, kwargs)


def dispatch(func: Operator, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """The same for an operator that code in C++ calls, which does not ask `__torch_function__`."""
    first = args[0] if args else None
    if func is torch.ops.aten.detach.default and isinstance(first, Packed):
        return first.detached()
    if func is torch.ops.aten.copy_.default and isinstance(first, Packed):
        return _SPECIAL[_T.copy_](func, *args)
    if func is torch.ops.aten.alias.default and isinstance(first, Packed):  # as `as_subclass` asks for
        return ReadOnly.of(first.plain(), first.packed.name)
    for place, argument in enumerate(func._schema.arguments):
        written = argument.alias_info is not None and argument.alias_info.is_write
        written |= place == 0 and func._schema.name in _RECEIVING
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        for it in value if isinstance(value, (tuple, list)) else (value,):
            if written and isinstance(it, Packed):
                raise refuse_change(it.packed.name, func._schema.name)
            if isinstance(it, Packed) and func._schema.name == "aten::set_":
                raise no_memory(it.packed.name, "set_")
    return func(*tree_map(_decoded, args), **tree_map(_decoded, kwargs))


# Operators between processes that write to their first argument, which their schemas do not say.
_RECEIVING = {
    "c10d::_allgather_base_",
    "c10d::_reduce_scatter_base_",
    "c10d::allgather_into_tensor_coalesced_",
    "c10d::allreduce_",
    "c10d::allreduce_coalesced_",
    "c10d::alltoall_",
    "c10d::alltoall_base_",
    "c10d::broadcast_",
    "c10d::recv_",
    "c10d::recv_any_source_",
    "c10d::reduce_",
    "c10d::reduce_scatter_",
    "c10d::reduce_scatter_tensor_coalesced_",
    "c10d::scatter_",
}


def _decoded(value: T) -> T | Tensor:
    return value.plain() if isinstance(value, Packed) else value


def _compute(func: Function[object], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """Run a function on decoded copies."""
    first = next(iter((*args, *kwargs.values())), None)  # some pass all they got by name
    for it in first if isinstance(first, (tuple, list)) else (first,):
        if isinstance(it, Packed) and changes_first(func):
            raise refuse_change(it.packed.name, function_name(func))
    out = kwargs.get("out")
    if isinstance(out, Packed):
        raise refuse_change(out.packed.name, function_name(func))
    copies: dict[int, tuple[Packed, Tensor, int]] = {}

    def decoded(value: object) -> object:
        if not isinstance(value, Packed):
            return value
        if id(value) not in copies:
            copy = value.plain()
            copies[id(value)] = value, copy, copy._version
        return copies[id(value)][1]

    result = func(*tree_map(decoded, args), **tree_map(decoded, kwargs))
    others = _received(func, result)
    for weight, copy, version in copies.values():
        if copy._version != version or (others and not weight.takes(copy)):
            raise refuse_change(weight.packed.name, function_name(func))
    names = {copy.untyped_storage().data_ptr(): it.packed.name for it, copy, _ in copies.values()}
    return guarded(result, names)


def _received(func: object, result: object) -> bool:
    """Whether a function between processes may have written to memory, uncounted; waits until it has."""
    own = str(getattr(func, "__module__", "")).startswith("torch.distributed.")
    if not own or function_name(func) in ("send", "isend"):
        return False
    wait = getattr(result, "wait", None)
    if wait is not None:
        wait()
    return True


def _embedding(
    func: Function[object],
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    *args: object,
    **kwargs: object,
) -> object:
    """Rows, as looked up: the others are not decoded. What is no lookup PyTorch refuses, in its own words."""
    if isinstance(weight, Packed) and max_norm is not None:
        raise refuse_change(weight.packed.name, "embedding(max_norm=...)")
    if (
        isinstance(input, Tensor)
        and isinstance(weight, Packed)
        and len(weight.packed.parts) == 1
        and len(weight.packed.shape) == 2
        and (padding_idx is None or -len(weight) <= padding_idx < len(weight))
        and not transformed()
    ):
        return weight.rows(input)
    return _compute(func, (input, weight, padding_idx, max_norm, *args), kwargs)


def _embedding_bag(func: Function[object], input: Tensor, weight: Tensor, **options: object) -> object:
    """Sums of rows, but for what normalizes these in the weight."""
    if isinstance(weight, Packed) and options.get("max_norm") is not None:
        raise refuse_change(weight.packed.name, "embedding_bag(max_norm=...)")
    return _compute(func, (input, weight), options)


def _linear(func: Function[object], input: Tensor, weight: Tensor, bias: Tensor | None = None) -> object:
    """A product, of a weight that is multiplied as it is without decoding it."""
    if isinstance(weight, Packed) and weight.packed.multiplies:
        made = product.linear(weight.packed, input, bias, weight.plain_requires_grad)
        if made is not None:
            return made
    return _compute(func, (input, weight, bias), {})


def _same(func: object, weight: Packed, *args: object, **kwargs: object) -> Packed:
    """The weight itself."""
    return weight


def _detach(func: object, weight: Packed) -> Packed:
    """The same weight in another parameter, which was never to be trained."""
    return weight.detached()


def _freeze(func: object, weight: Packed, requires_grad: bool = True) -> Packed:
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


def _set_data(func: object, weight: Packed, value: object) -> None:
    """Take what it has already, and nothing else."""
    if not (isinstance(value, Packed) and value.packed is weight.packed):
        raise refuse_change(weight.packed.name, "data =")


def _copy(func: object, target: Tensor, values: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy to a packed weight what is packed, or what it holds already; from one, what it decodes to."""
    if not isinstance(target, Packed):
        return target.copy_(_decoded(values), non_blocking)
    packed = target.packed
    if target.takes(values):
        if isinstance(values, Packed) and values.packed is not packed:
            packed.load(values.packed)
            target.sync()
        return target
    raise PackedWeight(
        f"`{packed.name}` is packed, and other values would be copied to it",
        hint="call `tpde.unpack_module(module)` first, or copy a packed weight",
    )


def _type(
    func: Function[object],
    weight: Packed,
    dtype: torch.dtype | str | None = None,
    *args: object,
    **kwargs: object,
) -> object:
    if dtype is None:
        return f"torch.{'cuda.' if weight.device.type == 'cuda' else ''}{queries.TYPES[weight.dtype]}"
    return _compute(func, (weight, dtype, *args), kwargs)


def _share(func: object, weight: Packed) -> Packed:
    """The blobs in shared memory."""
    weight.packed.apply(lambda blob: blob.share_memory_())  # type: ignore[no-untyped-call]
    return weight


def _is_shared(func: object, weight: Packed) -> bool:
    return all(source.memory.untyped_storage().is_shared() for source in weight.packed.sources)


def _storage(func: object, weight: Packed) -> Storage:
    return Storage(weight.packed)


def _refuse_memory(func: object, weight: Packed, *args: object, **kwargs: object) -> NoReturn:
    raise no_memory(weight.packed.name, function_name(func))


def _data_ptr(func: object, weight: Packed) -> int:
    return Address.of(weight.packed)


_T = torch.Tensor
# Each is called with what the function takes that it is for.
_SPECIAL = cast(
    dict[object, Function[object]],
    {
        functional.embedding: _embedding,
        functional.embedding_bag: _embedding_bag,
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
        _T.to: moves.to,
        _T.cpu: moves.cpu,
        _T.cuda: moves.cuda,
        _T.type: _type,
        _T.share_memory_: _share,
        _T.is_shared: _is_shared,
        _T.untyped_storage: _storage,
        _T.storage: _refuse_memory,
        _T.__dlpack__: _refuse_memory,
        _T.data_ptr: _data_ptr,
        torch.empty_like: queries.empty_like,
        **{getattr(_T, f"new_{name}"): queries.new for name in ("empty", "zeros", "ones", "full", "tensor")},
        **{
            getattr(_T, name): functools.partial(
                lambda dtype, func, weight, **_: moves.moved(weight, None, dtype), dtype
            )
            for name, dtype in (
                ("float", torch.float32),
                ("double", torch.float64),
                ("half", torch.float16),
                ("bfloat16", torch.bfloat16),
            )
        },
    },
)


_OTHERS_FIRST: set[object] = {
    functional.embedding,
    functional.embedding_bag,
    functional.linear,
    _T.copy_,
}  # whose first argument may be another tensor
