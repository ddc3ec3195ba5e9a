"""The workspace of a model: who has it, how large it is, and when its memory is another."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
from support.models import assert_same_bits
from support.small import IDS, Block, Model, torch
from torch import nn
from torch.nn import functional

from tpde.errors import InvalidInput, PackedWeight
from tpde.nn import PackedTensor, Resident, finish, pack_module, pack_tensor, replace_parameter, workspace
from tpde.nn.scope import Scope
from tpde.nn.workspace import Pool, Workspace
from tpde.weights.source import Source

WITHIN = 50  # seconds; what hangs fails
CPU = torch.device("cpu")
X = torch.randn(5, 64, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)


class Calling(Block):
    """Calls what a test gives it, within its forward pass."""

    def forward(self, x: Any) -> Any:
        within = self.__dict__.get("within")
        if within is not None:
            within(x)
        return super().forward(x)


def made(block: Any = Calling) -> tuple[Any, Any]:
    torch.manual_seed(0)
    plain = Model(block=block).to(torch.bfloat16)
    return plain, pack_module(copy.deepcopy(plain), min_bytes=0)


def group_of(model: Any, block: int = 0) -> Any:
    return model.blocks[block].__dict__["tpde_forward"].group


def in_thread(work: Callable[[], Any]) -> Any:
    """What a thread returns; it may hang, and nobody waits for it then."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()), daemon=True)
    thread.start()
    thread.join(WITHIN)
    return found[0]


def is_free(lock: Any) -> bool:
    """Whether another thread can take a lock."""

    def take() -> bool:
        taken = bool(lock.acquire(blocking=False))
        if taken:
            lock.release()
        return taken

    return bool(in_thread(take))


# ---- who has it ----


def fail(error: type[BaseException]) -> Callable[[Any], None]:
    def within(x: Any) -> None:
        raise error("theirs")

    return within


def nested(model: Any) -> None:
    model.blocks[0].__dict__["within"] = model.blocks[1]
    model(IDS)


def failing(model: Any, error: type[BaseException]) -> None:
    model.blocks[1].__dict__["within"] = fail(error)
    with pytest.raises(error, match="theirs"):
        model(IDS)


def nested_and_failing(model: Any) -> None:
    model.blocks[0].__dict__["within"] = model.blocks[1]
    failing(model, KeyError)


def beside(model: Any, within: Any) -> None:
    model.blocks[0].__dict__["within"] = lambda x: in_thread(lambda: within(model))
    model(IDS)


def beside_and_failing(model: Any) -> None:
    def within(model: Any) -> None:
        with pytest.raises(RuntimeError):
            model.blocks[1].up(torch.zeros(3, 5, dtype=torch.bfloat16))

    beside(model, within)


def refused_hooks(model: Any) -> None:
    with torch.autograd.graph.disable_saved_tensors_hooks("none"), pytest.raises(RuntimeError, match="none"):
        model(IDS)


def changed(model: Any) -> None:
    model.blocks[0].__dict__["within"] = lambda x: model.blocks[0].up.weight.detach().zero_()
    with pytest.raises(PackedWeight):
        model(IDS)


def called_wrongly(layer: Any) -> None:
    with pytest.raises(RuntimeError):
        layer(torch.zeros(3, 5, dtype=torch.bfloat16))


WAYS: dict[str, Callable[[Any], Any]] = {
    "a pass": lambda model: model(IDS),
    "a backward pass": lambda model: model(IDS).float().sum().backward(),
    "a block within another": nested,
    "an error": lambda model: failing(model, KeyError),
    "an interrupt": lambda model: failing(model, KeyboardInterrupt),
    "an error of a block within another": nested_and_failing,
    "a thread in a block": lambda model: beside(model, lambda it: it.blocks[1].up(X)),
    "an error of a thread in a block": beside_and_failing,
    "a layer of a block": lambda model: model.blocks[0].up(X),
    "an error of a layer of a block": lambda model: called_wrongly(model.blocks[0].up),
    "a layer that is none": lambda model: model.head(X),
    "an error of a layer that is none": lambda model: called_wrongly(model.head),
    "hooks that are refused": refused_hooks,
    "a change that is refused": changed,
    "a transform": lambda model: torch.func.vmap(model.blocks[0])(X),
}


@pytest.mark.parametrize(
    ("way", "gradients"),
    [
        *((way, True) for way in WAYS),
        *((way, False) for way in WAYS if way not in ("a backward pass", "hooks that are refused")),
    ],
)
def test_nobody_has_it_afterwards(way: str, gradients: bool) -> None:
    plain, ours = made()
    with torch.set_grad_enabled(gradients):
        WAYS[way](ours)
    for block in ours.blocks:
        block.__dict__.pop("within", None)
    space = group_of(ours).workspace
    assert (space.depth, space.thread, space.group, space.filled) == (0, 0, None, None)
    assert not space.some
    assert not space.beside
    assert is_free(space.lock)
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    with torch.no_grad():
        assert_same_bits(in_thread(lambda: torch.no_grad()(ours)(IDS)), plain(IDS))


def test_a_tiled_layer_gives_it_back() -> None:
    _, ours = made()
    ours.head.weight.packed.tile_bytes = 32 << 10
    finish(ours)
    ours.head(X)
    called_wrongly(ours.head)
    space = ours.head.tpde_group().workspace
    assert (space.depth, space.thread, space.group) == (0, 0, None)
    assert is_free(space.lock)


def test_a_thread_beside_stays_so_until_its_outermost_scope_ends() -> None:
    _, ours = made()
    one, other = group_of(ours), group_of(ours, 1)
    seen: list[Any] = []

    def second() -> None:
        outer = Scope(one)
        inner = Scope(other)
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
        scope = Scope(one)
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
    outer = Scope(one)
    inner = Scope(one if inside else other)
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


# ---- how large it is ----


def test_it_grows_and_stays() -> None:
    space = Workspace(CPU)
    space.reserve(4096)
    first = space.buffer
    assert (space.buffer.numel(), space.made) == (4096, 1)
    assert (space.start, space.end) == (first.data_ptr(), first.data_ptr() + 4096)
    for less in (100, 4095, 4096, 0):
        space.reserve(less)
        assert space.buffer is first
    space.reserve(4097)
    assert (space.buffer.numel(), space.made) == (4097, 2)
    assert (space.start, space.end) == (space.buffer.data_ptr(), space.buffer.data_ptr() + 4097)
    assert space.release() == 4097
    assert (space.buffer, space.start, space.end) == (None, 0, 0)
    assert is_free(space.lock)
    space.reserve(0)
    assert space.buffer.numel() == 4097


def test_two_of_them_need_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    space, beside, empty = Workspace(CPU), [], torch.empty

    def allocated(nbytes: int, **options: Any) -> Any:
        beside.append(space.buffer)
        return empty(nbytes, **options)

    monkeypatch.setattr(torch, "empty", allocated)
    space.reserve(4096)
    space.reserve(8192)
    assert beside == [None, None]


@pytest.mark.parametrize("spread", [False, True])
def test_each_device_has_room_for_its_own_blocks(spread: bool) -> None:
    pool = Pool()
    pool.capacity, pool.spread = 8192, spread
    pool = pickle.loads(pickle.dumps(pool))
    assert (pool.capacity, pool.spread) == (8192, spread)
    space = pool.workspace(CPU, 4096)
    assert space.buffer is not None
    assert space.buffer.numel() == (4096 if spread else 8192)
    assert pool.workspace(CPU, 4096) is space


def test_models_on_several_devices_are_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    _, ours = made()
    assert not group_of(ours).pool.spread
    there = {id(it) for it in ours.blocks[1].up.weight.packed.sources}
    there |= {id(it) for it in ours.blocks[1].down.weight.packed.sources}
    card = torch.device("meta")  # as far as anybody asks
    monkeypatch.setattr(Resident, "device", property(lambda it: card if id(it) in there else it.blob.device))
    finish(ours)
    assert group_of(ours).pool.spread


@pytest.mark.parametrize("of", ["up", "part"])
def test_blocks_on_two_devices_are_refused(of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until all of a block has moved, nothing is prepared."""
    torch.manual_seed(0)
    halves = [pack_tensor(torch.randn(96, 64).bfloat16(), f"half {n}") for n in range(2)]
    model = nn.ModuleList([Block(64).to(torch.bfloat16)])
    replace_parameter(model, "0.up.weight", PackedTensor([it.sources[0] for it in halves if it], (192, 64)))
    replace_parameter(model, "0.down.weight", pack_tensor(model[0].down.weight.detach(), "down"))
    finish(model)
    model[0](X)
    up = model[0].up.weight.packed
    there = {id(it) for it in (up.sources if of == "up" else up.sources[1:])}
    card = torch.device("cuda:0")
    monkeypatch.setattr(Resident, "device", property(lambda it: card if id(it) in there else it.blob.device))
    made = model[0].__dict__["tpde_forward"].group
    made.changed()
    made.prepare()
    assert made._workspace is None
    with pytest.raises(InvalidInput, match=r"`0` are on cpu, cuda:0.*whole block to one device"):
        model[0](X)
    there.clear()
    model[0](X)


# ---- when its memory is another ----


@pytest.mark.parametrize("first", ["inference", "no_grad"])
def test_one_that_was_made_in_any_mode_serves_all(first: str) -> None:
    """Tensors of inference mode have no versions, and none of autograd."""
    plain, ours = made()
    assert group_of(ours).release()
    with torch.inference_mode() if first == "inference" else torch.no_grad():
        assert_same_bits(ours(IDS), plain(IDS))
    for model in (plain, ours):
        model(IDS).float().square().sum().backward()
    assert_same_bits(ours.blocks[0].up.bias.grad, plain.blocks[0].up.bias.grad)
    with torch.inference_mode():
        assert_same_bits(ours(IDS), plain(IDS))


def test_decoding_to_it_is_no_change() -> None:
    space = Workspace(CPU)
    space.reserve(4096)
    assert space.buffer is not None
    space.buffer.fill_(7)
    space.check()


@pytest.mark.parametrize("graph", [False, True])
def test_one_that_a_graph_writes_to_is_kept(graph: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    _, ours = made()
    one = group_of(ours)
    space = one.workspace
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 1, raising=False)
    space._on_gpu, space.device = True, torch.device("cpu", 0)
    space.order()
    buffer, kept = space.buffer, []
    ours.blocks[0].__dict__["within"] = lambda x: kept.append(ours.blocks[0].up.weight)
    with torch.no_grad():
        ours.blocks[0](X)
    assert (space.buffer is buffer) == graph, "someone has kept a weight in it"
    with torch.no_grad():
        ours.blocks[1](X)
    assert bool(one.release()) != graph
    assert is_free(space.lock)


def test_it_is_not_released_while_a_graph_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    space = Workspace(CPU)
    space.reserve(4096)
    with monkeypatch.context() as recording:
        recording.setattr(workspace, "capturing", lambda _: True)
        assert space.release() == 0
    assert space.buffer is not None
    assert is_free(space.lock)
    assert space.release() == 4096


def test_one_that_another_thread_has_is_not_released() -> None:
    space, held, done = Workspace(CPU), threading.Event(), threading.Event()
    space.reserve(4096)

    def hold() -> None:
        with space.lock:
            held.set()
            done.wait(WITHIN)

    threading.Thread(target=hold, daemon=True).start()
    assert held.wait(WITHIN)
    try:
        assert in_thread(space.release) == 0
        assert space.buffer is not None
    finally:
        done.set()


@pytest.mark.parametrize("of", ["weight", "span", "tiles"])
def test_what_takes_its_place_is_as_large(of: str) -> None:
    """So that the allocator gives it the same memory."""
    _, ours = made()
    slot, size = ours.blocks[0].up.tpde_slots["weight"], group_of(ours).nbytes
    assert slot.nbytes < size
    if of == "tiles":
        slot = ours.head.tpde_slots["weight"]
        slot.packed.tile_bytes = 32 << 10
    ours.blocks[0](X)
    made_of = {
        "weight": slot.instead,
        "span": lambda: slot.span_instead(512, 1024),
        "tiles": lambda: next(iter(slot.tiles()))[2],
    }[of]
    assert group_of(ours).workspace.buffer is not None
    assert made_of().untyped_storage().nbytes() == size
    assert group_of(ours).workspace.buffer is None
    assert made_of().untyped_storage().nbytes() >= size


def test_streams_are_waited_for_before_anything_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever decodes to it: a block, a layer alone, a layer of a block that is not called, tiles."""
    events: list[str] = []
    order, decode = Workspace.order, Source.decode_on_host

    def ordered(self: Any) -> None:
        events.append("order")
        order(self)

    def decoded(self: Any, *args: Any) -> None:
        events.append("decode")
        decode(self, *args)

    torch.manual_seed(0)
    conv = pack_module(nn.Conv1d(64, 64, 3).to(torch.bfloat16), min_bytes=0)
    _, ours = made()
    monkeypatch.setattr(Workspace, "order", ordered)
    monkeypatch.setattr(Source, "decode_on_host", decoded)
    wide = torch.ones(1, 64, 9, dtype=torch.bfloat16)
    with torch.no_grad():
        for work in (lambda: ours.blocks[0](X), lambda: ours.head(X), lambda: ours.blocks[0].up(X)):
            events.clear()
            work()
            assert events[:2] == ["order", "decode"]
        events.clear()
        conv(wide)
        assert events[:2] == ["order", "decode"]
        ours.head.weight.packed.tile_bytes = 32 << 10
        finish(ours)
        events.clear()
        ours.head(X)
        assert events[:2] == ["order", "decode"]


def test_a_weight_that_is_read_twice_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Twice(nn.Conv1d):
        def forward(self, x: Any) -> Any:
            return functional.conv1d(x, self.weight) + functional.conv1d(x, self.weight)

    torch.manual_seed(0)
    plain = Twice(64, 64, 3, bias=False).to(torch.bfloat16)
    ours, decoded = pack_module(copy.deepcopy(plain), min_bytes=0), []
    decode = Source.decode_on_host
    monkeypatch.setattr(
        Source, "decode_on_host", lambda self, *args: (decoded.append(1), decode(self, *args))[1]
    )
    x = torch.randn(1, 64, 9).to(torch.bfloat16)
    with torch.no_grad():
        assert_same_bits(ours(x), plain(x))
    assert len(decoded) == 1


# ---- what is in it ----


def test_a_weight_of_several_tensors_in_a_block() -> None:
    torch.manual_seed(0)
    plain = nn.ModuleList([Block(64).to(torch.bfloat16)])
    ours = copy.deepcopy(plain)
    parts = [
        pack_tensor(it.clone(), f"part {n}") for n, it in enumerate(plain[0].up.weight.detach().split(64))
    ]
    sources = [it.sources[0] for it in parts if it is not None]
    replace_parameter(ours, "0.down.weight", pack_tensor(plain[0].down.weight.detach(), "down"))
    replace_parameter(ours, "0.up.weight", PackedTensor(sources, (192, 64)))
    finish(ours)
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients):
            assert_same_bits(ours[0](X), plain[0](X))


@pytest.mark.parametrize("dtypes", [("bfloat16", "bfloat16"), ("bfloat16", "float32")])
def test_the_compilers_buffer_holds_weights_of_any_dtypes(dtypes: tuple[str, str]) -> None:
    torch.manual_seed(0)
    plain = nn.ModuleList([Block(64)])
    plain[0].up.to(getattr(torch, dtypes[0]))
    plain[0].down.to(torch.bfloat16).to(getattr(torch, dtypes[1]))
    ours = pack_module(copy.deepcopy(plain), min_bytes=0)
    one = ours[0].__dict__["tpde_forward"].group
    flat = one.materialize(torch.empty(0))
    assert flat.dtype is (getattr(torch, dtypes[0]) if len(set(dtypes)) == 1 else torch.uint8)
    assert flat.nbytes == one.pool.capacity
    for name in ("up", "down"):
        slot = getattr(ours[0], name).tpde_slots["weight"]
        assert_same_bits(slot.in_buffer(flat), getattr(plain[0], name).weight)


def test_what_was_derived_from_old_blobs_is_made_anew() -> None:
    """Compiled code finds weights by their keys."""
    _, ours = made()
    slot, one = ours.blocks[0].up.tpde_slots["weight"], group_of(ours)
    slot.packed.tile_bytes = 32 << 10
    before, tiles = (slot.key, one.key), slot.prepare_tiles()
    assert slot.prepare_tiles() is tiles
    torch.manual_seed(5)
    new = pack_tensor(torch.randn(192, 64).bfloat16(), "new")
    assert new is not None
    slot.packed.load(new)
    assert slot.key != before[0]
    assert one.key != before[1]
    assert slot.prepare_tiles() is not tiles
