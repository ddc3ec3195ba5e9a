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

from tpde.errors import InvalidInput, PackedWeight
from tpde.nn import PackedParameter, finish, pack_module, routing, unpack_module, workspace


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

    space, now = workspace.Workspace(torch.device("cpu", 0)), [Stream(1)]
    space._on_gpu = True
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: now[0].handle, raising=False)
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
    assert routing.chosen(module, (X, index), {}) == [0, 2, 3]
    assert routing.chosen(module, (X, index.float()), {}) is None
    module.config._experts_implementation = "a kernel"
    assert routing.chosen(module, (X, index), {}) is None


class Chooses:
    """As transformers' modules of experts are called."""

    __module__ = "transformers.models.some.modeling_some"

    def forward(self, hidden: Any, router_indices: Any = None, weights: Any = None) -> None:
        """Nothing."""


def routed(kind: Any = Chooses, **config: Any) -> Any:
    slots = {"bias": SimpleNamespace(shape=(4, 8)), "w": SimpleNamespace(shape=(4, 8, 8))}
    return SimpleNamespace(tpde_base=kind, tpde_slots=slots, config=SimpleNamespace(**config))


def test_the_choice_is_found_wherever_it_is_given() -> None:
    index = torch.tensor([[3, 1], [1, 1]])
    for args, kwargs in (((X, index), {}), ((X, index, X), {}), ((X,), {"router_indices": index})):
        assert routing.chosen(routed(), args, kwargs) == [1, 3]
        assert routing.needed(routed(), args, kwargs) == [1, 3]
    assert routing.chosen(routed(), (), {"hidden": X, "router_indices": index.int()}) == [1, 3]
    assert routing.needed(routed(), (X, torch.empty(0, 2, dtype=torch.int64)), {}) == []


@pytest.mark.parametrize("implementation", [None, "eager", "batched_mm", "grouped_mm"])
def test_implementations_that_look_experts_up(implementation: str | None) -> None:
    module = routed(_experts_implementation=implementation)
    assert routing.chosen(module, (X, torch.tensor([2])), {}) == [2]


def test_all_experts_are_needed_where_the_choice_is_not_known(caplog: pytest.LogCaptureFixture) -> None:
    """A mask of booleans is none, nor are weights; it is said once of a class."""
    known: Any = type("Known", (Chooses,), {"__module__": Chooses.__module__})
    theirs = type("Theirs", (Chooses,), {"__module__": "somebody.else"})
    plain = type("Plain", (), {"__module__": Chooses.__module__, "forward": lambda self, hidden: None})
    for kind in (theirs, plain):
        assert not routing.routes(kind)
        assert routing.chosen(routed(kind), (X, torch.tensor([2])), {}) is None
    assert routing.routes(known)
    with caplog.at_level("WARNING", "tpde"):
        for index in (torch.tensor([True, False]), torch.tensor([1.0]), None, [2], 2):
            assert routing.chosen(routed(known), (X, index), {}) is None
            assert routing.needed(routed(known), (X, index), {}) == [0, 1, 2, 3]
        assert routing.needed(routed(known), (X,), {}) == [0, 1, 2, 3]
        assert routing.needed(routed(theirs), (X, torch.tensor([2])), {}) == [0, 1, 2, 3]
    told = [it.message for it in caplog.records]
    assert len(told) == 2
    assert "`Known`" in told[0]
    assert "`Theirs`" in told[1]


def test_fused_weights_are_of_one_number_of_experts() -> None:
    module = routed()
    assert [slot.shape for slot in routing.fused(module)] == [(4, 8, 8)]
    source: Any = object()
    routing.route_experts(module, source)
    assert module.tpde_slots["w"].experts is source
    assert not hasattr(module.tpde_slots["bias"], "experts")
    module.tpde_slots["other"] = SimpleNamespace(shape=(5, 8, 8))
    for slots in (module.tpde_slots, {"bias": module.tpde_slots["bias"]}, {}):
        with pytest.raises(InvalidInput, match="one number, the same for all"):
            routing.route_experts(SimpleNamespace(tpde_slots=slots), source)  # type: ignore[arg-type]


def test_sparse_tensors_are_kept_for_the_backward_pass() -> None:
    class Sparse(Block):
        def forward(self, x: Any) -> Any:
            return torch.sparse.mm(torch.eye(14).to_sparse(), super().forward(x).reshape(14, 64))

    torch.manual_seed(0)
    plain = torch.nn.ModuleList([Sparse(64)])
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.copy_(parameter.bfloat16())
    ours = pack_module(copy.deepcopy(plain), min_bytes=0)
    x = torch.randn(14, 64)
    for model in (plain, ours):
        model[0](x).square().sum().backward()
    assert_same_bits(ours[0].up.bias.grad, plain[0].up.bias.grad)


class Reads(Block):
    """Does something with a piece of its weight for which autograd keeps it."""

    work: Any = None

    def forward(self, x: Any) -> Any:
        return super().forward(x) + self.work(x, self.down.weight)


@pytest.mark.parametrize(
    "work",
    [
        lambda x, w: x * w[:, 3],
        lambda x, w: x * w[-1:, -64:],
        lambda x, w: x @ w[:, ::3],
        lambda x, w: x @ w.t()[128:].contiguous(),
        lambda x, w: x * w.view(-1)[-64:],
        lambda x, w: x * w.view(torch.int32).view(torch.bfloat16)[:, 64:128].sum(0).view(64)[0],
        lambda x, w: x @ w.float()[:, :64].bfloat16(),
        lambda x, w: x * w[5:5].sum(),
    ],
)
def test_pieces_of_weights_are_kept_for_the_backward_pass(work: Any) -> None:
    torch.manual_seed(0)
    plain = torch.nn.ModuleList([Reads(64)]).to(torch.bfloat16)
    plain[0].down.weight.requires_grad_(False)
    ours = pack_module(copy.deepcopy(plain), min_bytes=0)
    grads = []
    for model in (plain, ours):
        model[0].work = work
        x = X.clone().requires_grad_()
        model[0](x).float().square().sum().backward()
        grads += [x.grad, model[0].up.bias.grad]
    assert_same_bits(grads[2:], grads[:2])


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


class Fused(torch.nn.Module):
    """Experts, of whose weight something is kept for the backward pass."""

    work: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(4, 96, 64), requires_grad=False)

    def forward(self, x: Any) -> Any:
        return self.work(x, self.w)


class Fetches:
    """Decodes all experts, or leaves zeros, and notes which were wanted."""

    zeros = False

    def __init__(self, slot: Any) -> None:
        self.slot, self.wanted = slot, list[Any]()

    def fetch(self, numbers: Any, out: Any) -> None:
        self.wanted.append(list(numbers))
        self.slot.decode_into(out[self.slot.offset :])
        if self.zeros:
            out[self.slot.offset : self.slot.offset + self.slot.nbytes] = 0


@pytest.mark.parametrize(
    ("work", "most"),  # bytes that are decoded again
    [
        (lambda x, w: x @ w[2].t(), 96 * 128),
        (lambda x, w: x * w[3, 95], 128),
        (lambda x, w: x * w[0, ::5][1], 128),
        (lambda x, w: x @ w[1:3].transpose(0, 1)[7].t(), 100 * 128),
        (lambda x, w: x * w[1, :, 3][:64], 64 * 128),
        (lambda x, w: x @ w.view(384, 64).t(), 384 * 128),
        (lambda x, w: x * w[3, 95, 63], 2),
        (lambda x, w: x * w.view(-1)[8129:8193], 128),  # the last one is the first of a chunk
    ],
)
@pytest.mark.filterwarnings("ignore:which experts")
def test_of_experts_only_pieces_are_decoded_again(
    work: Any, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    plain = Fused().to(torch.bfloat16)
    ours = pack_module(copy.deepcopy(plain), min_bytes=0)
    slot = ours.tpde_slots["w"]
    source = Fetches(slot)
    routing.route_experts(ours, source)
    finish(ours)
    asked: list[int] = []
    span = type(slot.packed).span
    monkeypatch.setattr(
        type(slot.packed), "span", lambda self, a, b: (asked.append(b - a), span(self, a, b))[1]
    )
    grads = []
    for model in (plain, ours):
        model.work = work
        x = X.clone().requires_grad_()
        model(x).float().square().sum().backward()
        grads.append(x.grad)
    assert_same_bits(grads[1], grads[0])
    assert source.wanted == [[0, 1, 2, 3]]
    assert asked
    assert max(asked) <= most
    assert not ours.tpde_group().workspace.some


def test_the_rest_of_a_routed_block_is_decoded_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts are fetched when they are wanted, again for each call, and are there only then."""

    class Mixed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.experts = torch.nn.Linear(64, 64), Fused()

        def forward(self, x: Any) -> Any:
            return self.experts(self.experts(self.up(x)))

    torch.manual_seed(0)
    plain = torch.nn.ModuleList([Mixed().to(torch.bfloat16)]).requires_grad_(False)
    ours = pack_module(copy.deepcopy(plain), min_bytes=0)
    slot = ours[0].experts.tpde_slots["w"]
    source = Fetches(slot)
    routing.route_experts(ours[0].experts, source)
    finish(ours)
    for model in (plain, ours):
        model[0].experts.work = lambda x, w: x @ w[2, :64]
    decoded: list[Any] = []
    into = type(slot.packed).decode_into
    monkeypatch.setattr(
        type(slot.packed), "decode_into", lambda self, out: (decoded.append(self), into(self, out))[1]
    )
    with torch.no_grad():
        assert_same_bits(ours[0](X), plain[0](X))
        assert source.wanted == [[0, 1, 2, 3]] * 2
        assert decoded == [slot.packed] * 2, "by the source, and by nobody else"
        one = ours[0].__dict__["tpde_forward"].group
        flat = one.materialize(torch.empty(0))  # compiled code has all of them
        assert_same_bits(slot.in_buffer(flat), plain[0].experts.w)
        up = ours[0].up.tpde_slots["weight"]
        assert_same_bits(up.in_buffer(flat), plain[0].up.weight)

        def touch(x: Any, w: Any) -> Any:
            ours[0].up.weight.detach().mul_(1)
            return x

        ours[0].experts.work, source.zeros = touch, True
        with pytest.raises(PackedWeight, match="`0` is packed"):  # experts that are not there are no change
            ours[0](X)


def test_experts_that_are_read_by_others_are_all_there() -> None:
    """By a block, which has not called them yet, or has."""

    class Reads(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.experts = torch.nn.Linear(64, 64), Fused()

        def forward(self, x: Any) -> Any:
            first = self.up(x) @ self.experts.w[1, :64]
            self.experts(x)
            return first + x @ self.experts.w[3, :64]

    torch.manual_seed(0)
    plain = torch.nn.ModuleList([Reads().to(torch.bfloat16)]).requires_grad_(False)
    ours = pack_module(copy.deepcopy(plain), min_bytes=0)
    source = Fetches(ours[0].experts.tpde_slots["w"])
    source.zeros = True
    routing.route_experts(ours[0].experts, source)
    finish(ours)
    for model in (plain, ours):
        model[0].experts.work = lambda x, w: x
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients):
            assert_same_bits(ours[0](X), plain[0](X))
