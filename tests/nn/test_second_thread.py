"""A thread inside another's block, a layer alone after another block: whose is the workspace?"""

from __future__ import annotations

import threading
from typing import Any

import pytest
from support.models import assert_same_bits
from support.small import IDS, X, torch
from support.workspaces import WITHIN, group_of, in_thread, is_free, made

from tpde.nn import PackedParameter
from tpde.nn.scope import Scope


def open_scope(group: Any) -> Scope:
    scope = Scope(group)
    scope.enter()
    return scope


@pytest.mark.parametrize("gradients", [False, True])
def test_a_second_thread_computes_with_copies_of_its_own(
    gradients: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it used of the workspace would be overwritten when the first one goes on."""
    plain, ours = made()
    linear, used = torch.nn.functional.linear, dict[int, list[int]]()

    def noted(x: Any, weight: Any, bias: Any = None) -> Any:
        if not isinstance(weight, PackedParameter):
            used.setdefault(threading.get_ident(), []).append(weight.data_ptr())
        return linear(x, weight, bias)

    space, results = group_of(ours).workspace, []

    def second() -> Any:
        with torch.set_grad_enabled(gradients):  # which each thread has its own
            return threading.get_ident(), ours.blocks[0].up(X)

    def within(x: Any) -> None:
        results.append(in_thread(second))

    ours.blocks[0].__dict__["within"] = within
    monkeypatch.setattr(torch.nn.functional, "linear", noted)
    with torch.no_grad():
        ours(IDS)
        ((thread, result),) = results
        assert_same_bits(result, plain.blocks[0].up(X))
    inside = {ident: [space.start <= at < space.end for at in places] for ident, places in used.items()}
    assert inside[threading.get_ident()].count(True) >= 6
    assert inside[thread] == [False]
    assert not space.beside, "it may use the workspace the next time"


def test_what_a_second_thread_reads_stays_as_it_is() -> None:
    plain, ours = made()
    found: list[Any] = []

    def within(x: Any) -> None:
        found.append(in_thread(lambda: (ours.blocks[0].up.weight, group_of(ours).tile_room())))

    ours.blocks[0].__dict__["within"] = within
    with torch.no_grad():
        ours(IDS)
        ((weight, room),) = found
        assert_same_bits(weight.detach().clone(), plain.blocks[0].up.weight)
    assert isinstance(weight, PackedParameter)
    assert room is None, "the first thread's tiles are there"


def test_layers_called_alone_find_nothing_of_other_blocks() -> None:
    plain, ours = made()
    with torch.no_grad():
        ours.blocks[0](X)
        for block in (1, 0, 1, 0):
            assert_same_bits(ours.blocks[block].up(X), plain.blocks[block].up(X))


def test_a_thread_beside_stays_so_until_its_outermost_scope_ends() -> None:
    _, ours = made()
    one, other = group_of(ours), group_of(ours, 1)
    seen: list[Any] = []

    def second() -> None:
        outer = open_scope(one)
        inner = open_scope(other)
        seen.append((outer.outermost, inner.outermost, one.beside, other.beside))
        inner.close()
        seen.append(one.beside)
        outer.close()
        seen.append(one.beside)

    def within(x: Any) -> None:
        in_thread(torch.no_grad()(second))
        seen.append(one.beside)

    ours.blocks[2].__dict__["within"] = within
    with torch.no_grad():
        ours(IDS)
    assert seen == [(False, False, True, True), True, False, False]


def test_the_one_that_waits_does_not_count_as_beside() -> None:
    _, ours = made()
    one, opened, done = group_of(ours), threading.Event(), threading.Event()
    seen: list[bool] = []

    def second() -> None:
        scope = open_scope(one)
        opened.set()
        assert done.wait(WITHIN)
        scope.close()

    def within(x: Any) -> None:
        thread = threading.Thread(target=second, daemon=True)
        thread.start()
        assert opened.wait(WITHIN)
        seen.append(one.beside)
        done.set()
        thread.join(WITHIN)

    ours.blocks[2].__dict__["within"] = within
    ours(IDS)
    assert seen == [False]


@pytest.mark.parametrize("inside", [False, True])
def test_scopes_within_scopes_are_not_outermost(inside: bool) -> None:
    _, ours = made()
    one, other = group_of(ours), group_of(ours, 1)
    outer = open_scope(one)
    inner = open_scope(one if inside else other)
    assert (outer.outermost, inner.outermost) == (True, False)
    assert (one.workspace.depth, one.workspace.group) == (2, one)
    inner.close()
    assert (one.workspace.depth, one.workspace.group) == (1, one)
    assert not is_free(one.workspace.lock)
    outer.close()
    assert is_free(one.workspace.lock)


@pytest.mark.parametrize("gradients", [False, True])
def test_a_block_within_another_leaves_its_weights_where_they_are(gradients: bool) -> None:
    plain, ours = made()
    for model in (plain, ours):
        model.blocks[0].__dict__["within"] = model.blocks[1]
    with torch.set_grad_enabled(gradients):
        assert_same_bits(ours(IDS), plain(IDS))
