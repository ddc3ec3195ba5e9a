"""Modules that hold packed weights and decode them just in time: see docs/reference/packed-weights.md."""

from tpde.nn.kernels import set_kernels
from tpde.nn.modules import PackedModule
from tpde.nn.named_deltas import add_deltas
from tpde.nn.pack_model import pack_module, plain_state_dict, unpack_module
from tpde.nn.replace import finish, packed_modules, replace_parameter, supports
from tpde.nn.routing import route_experts
from tpde.nn.slot import ExpertSource
from tpde.weights.pack_tensor import pack_tensor
from tpde.weights.packed_tensor import PackedTensor
from tpde.weights.parameter import PackedParameter
from tpde.weights.resident import Resident
from tpde.weights.span import Span

__all__ = [
    "ExpertSource",
    "PackedModule",
    "PackedParameter",
    "PackedTensor",
    "Resident",
    "Span",
    "add_deltas",
    "finish",
    "pack_module",
    "pack_tensor",
    "packed_modules",
    "plain_state_dict",
    "replace_parameter",
    "route_experts",
    "set_kernels",
    "supports",
    "unpack_module",
]
