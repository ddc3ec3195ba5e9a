"""Modules that hold packed weights and decode them just in time: see docs/reference/packed-weights.md."""

from tpde.frameworks import require_torch

require_torch("`tpde.nn`")

from tpde.nn.kernels import set_kernels  # noqa: E402
from tpde.nn.modules import PackedModule  # noqa: E402
from tpde.nn.named_deltas import add_deltas  # noqa: E402
from tpde.nn.pack_model import pack_module, plain_state_dict, unpack_module  # noqa: E402
from tpde.nn.replace import finish, packed_modules, replace_parameter, supports  # noqa: E402
from tpde.nn.routing import route_experts  # noqa: E402
from tpde.nn.slot import ExpertSource  # noqa: E402
from tpde.weights.pack_tensor import pack_tensor  # noqa: E402
from tpde.weights.packed_tensor import PackedTensor  # noqa: E402
from tpde.weights.parameter import PackedParameter  # noqa: E402
from tpde.weights.resident import Resident  # noqa: E402
from tpde.weights.span import Span  # noqa: E402

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
