"""Modules that hold packed weights and decode them just in time: see docs/reference/packed-weights.md."""

from tpde.nn.api import pack_module, plain_state_dict, unpack_module
from tpde.nn.deltas import add_deltas
from tpde.nn.experts import ExpertSource, route_experts
from tpde.nn.kernels import set_kernels
from tpde.nn.modules import PackedModule
from tpde.nn.replace import finish, packed_modules, replace_parameter, supports
from tpde.weights.pack import pack_tensor
from tpde.weights.parameter import PackedParameter
from tpde.weights.resident import Resident
from tpde.weights.span import Span
from tpde.weights.tensor import PackedTensor

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
