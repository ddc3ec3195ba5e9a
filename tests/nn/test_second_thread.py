"""A thread inside another's block, a layer alone after another block: whose is the workspace?"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from support.models import assert_same_bits
from support.small import IDS, Block, Model, torch

from tpde.nn import PackedParameter, experts, group, pack_module, unpack_module


class Calling(Block):
    """Calls what a test gives it, within its forward pass."""

    def forward(self, x: Any) -> Any:
        within = self.__dict__.pop("within", None)
        if within is not None:
            within(x)
        return super().forward(x)


def pair() -> tuple[Any, Any]:
    torch.manual_seed(0)
    plain = Model(block=Calling).to(torch.bfloat16)
    return plain, pack_module(copy.deepcopy(plain), min_bytes=0)


def group_of(model: Any, block: int = 0) -> Any:
    return model.blocks[block].__dict__["tpde_forward"].group


def in_thread(work: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()), daemon=True)
    thread.start()
    thread.join(100)
    return found[0]


X = torch.randn(5, 64).to(torch.bfloat16)


@pytest.mark.parametrize("gradients", [False, True])
def test_a_second_thread_computes_with_copies_of_its_own(
    gradients: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it used of the workspace would be overwritten when the first one goes on."""
    plain, ours = pair()
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
    plain, ours = pair()
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
    plain, ours = pair()
    with torch.no_grad():
        ours.blocks[0](X)
        for block in (1, 0, 1, 0):
            assert_same_bits(ours.blocks[block].up(X), plain.blocks[block].up(X))


def test_a_workspace_in_use_is_not_released() -> None:
    plain, ours = pair()
    released: list[int] = []
    ours.blocks[1].__dict__["within"] = lambda x: released.append(group_of(ours, 1).release())
    with torch.no_grad():
        assert_same_bits(ours(IDS), plain(IDS))
    assert released == [0]
    assert group_of(ours, 1).release() > 0


def test_a_thread_waits_for_the_stream_that_used_the_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams without a GPU: what one waits for is noted."""
    waited: list[tuple[int, int]] = []

    class Stream:
        def __init__(self, handle: int) -> None:
            self.handle = handle

        def wait_stream(self, other: Stream) -> None:
            waited.append((self.handle, other.handle))

    space, now = group.Workspace(torch.device("cpu")), [Stream(1)]
    space._on_gpu = True
    monkeypatch.setattr(group, "stream_handle", lambda _: now[0].handle)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: now[0])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for handle in (1, 1, 2, 2, 1):
        now[0] = Stream(handle)
        space.order()
    assert waited == [(2, 1), (1, 2)]


def test_routers_may_name_no_expert() -> None:
    """Numbers beyond the last stand for experts of other devices, or none."""
    models = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    slot = SimpleNamespace(shape=(4, 8, 8))
    module: Any = SimpleNamespace(
        tpde_base=models.MixtralExperts,
        tpde_slots={"w": slot},
        config=SimpleNamespace(_experts_implementation="eager"),
    )
    index = torch.tensor([[0, 4], [2, 99], [-1, 2]])
    assert experts.chosen(module, (X, index), {}) == [0, 2, 3]
    assert experts.chosen(module, (X, index.float()), {}) is None
    module.config._experts_implementation = "a kernel"
    assert experts.chosen(module, (X, index), {}) is None


def test_hooks_of_others_save_what_is_not_in_the_workspace() -> None:
    plain, ours = pair()
    packed, unpacked = list[Any](), list[Any]()

    def pack(tensor: Any) -> Any:
        packed.append(tensor.shape)
        return tensor.clone()

    def unpack(tensor: Any) -> Any:
        unpacked.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        found = ours(IDS)
    assert packed
    found.float().square().sum().backward()
    assert len(unpacked) == len(packed)
    plain(IDS).float().square().sum().backward()
    assert_same_bits(ours.blocks[0].norm.weight.grad, plain.blocks[0].norm.weight.grad)


def test_an_unpacked_blocks_old_forward_decodes_nothing() -> None:
    plain, ours = pair()
    old = ours.blocks[0].forward
    unpack_module(ours)
    assert old.group is None
    with torch.no_grad():
        assert_same_bits(old(X), plain.blocks[0](X))


def test_a_copied_blocks_forward_is_one() -> None:
    _, ours = pair()
    block = copy.deepcopy(ours.blocks[0])
    assert block.__dict__["forward"] is block.__dict__["tpde_forward"]
    assert block.forward is not ours.blocks[0].forward
