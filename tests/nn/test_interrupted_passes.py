"""Ctrl-C at any moment of a forward pass: the workspace is free afterwards, and whole."""

from __future__ import annotations

import copy
import dis
import functools
import itertools
import sys
from types import CodeType, FrameType
from typing import Any

import pytest
from support.models import assert_same_bits
from support.small import IDS, Model, torch
from support.workspaces import is_free

import tpde.nn
from tpde.nn import pack_module, packed_modules

FILES = {f"{tpde.nn.__path__[0]}/{name}.py" for name in ("group", "modules", "saved", "scope", "workspace")}


@functools.cache
def moments(code: CodeType) -> set[int]:
    """Where CPython looks for signals: after calls, and where loops go back."""
    found = itertools.pairwise(dis.get_instructions(code))
    return {after.offset for it, after in found if it.opname.startswith(("CALL", "JUMP_BACK"))}


class Interrupt:
    """Raises at one of the moments, and counts them."""

    def __init__(self, at: int) -> None:
        self.at, self.seen = at, 0

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename not in FILES:
            return None
        frame.f_trace_opcodes = True
        if event == "call" or (event == "opcode" and frame.f_lasti in moments(frame.f_code)):
            self.seen += 1
            if self.seen == self.at:
                raise KeyboardInterrupt
        return self


def interrupted(work: Any, at: int) -> bool:
    """Whether there is such a moment."""
    sys.settrace(Interrupt(at))
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("fresh", [False, True], ids=["reserved", "to be reserved"])
def test_the_next_pass_is_whole(fresh: bool, gradients: bool) -> None:
    torch.manual_seed(0)
    plain = Model(blocks=1).to(torch.bfloat16)
    ours = pack_module(copy.deepcopy(plain), min_bytes=0)
    spaces = {it.tpde_group().workspace for name, it in packed_modules(ours) if name != "embed"}
    at = 0
    with torch.set_grad_enabled(gradients):
        expected = plain(IDS)
        while True:
            at += 1
            for space in spaces if fresh else ():
                space.release()
            if not interrupted(lambda: ours(IDS), at):
                break
            for space in spaces:
                assert (space.depth, space.thread, space.group, space.filled) == (0, 0, None, None), at
                assert is_free(space.lock), at
            assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None, at
            assert_same_bits(ours(IDS), expected)
    assert at > 50
