"""Who uses the workspace waits for the stream that did, and its memory is not released while it is in use."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from support.models import assert_same_bits
from support.small import IDS, X, torch
from support.workspaces import CPU, WITHIN, group_of, in_thread, is_free, made
from torch import nn

from tpde.nn import finish, pack_module, workspace
from tpde.nn.workspace import Workspace
from tpde.weights.source import Source


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


def test_a_workspace_in_use_is_not_released() -> None:
    plain, ours = made()
    released: list[int] = []
    ours.blocks[1].__dict__["within"] = lambda x: released.append(group_of(ours, 1).release())
    with torch.no_grad():
        assert_same_bits(ours(IDS), plain(IDS))
    assert released == [0]
    assert group_of(ours, 1).release() > 0


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


def test_it_is_not_released_while_a_graph_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    space = Workspace(CPU)
    space.reserve(4096)
    with monkeypatch.context() as recording:
        recording.setattr(workspace, "capturing", lambda _: True)
        assert space.release() == 0
    assert space.buffer is not None
    assert is_free(space.lock)
    assert space.release() == 4096


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


def test_a_workspace_is_not_given_back_before_another_stream_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator knows only the stream on which the memory was taken."""

    class Stream:
        def __init__(self) -> None:
            self.waited: list[Any] = []

        def wait_stream(self, other: Any) -> None:
            self.waited.append(other)

    empty = torch.empty

    class Buffer:
        def __init__(self, nbytes: int, **_: Any) -> None:
            self.nbytes, self.recorded, self.data = nbytes, list[Any](), empty(0)

        def numel(self) -> int:
            return self.nbytes

        def data_ptr(self) -> int:
            return 1 << 20

        def untyped_storage(self) -> Any:
            return empty(0).untyped_storage()

        def record_stream(self, stream: Any) -> None:
            self.recorded.append(stream)

    loading, computing = Stream(), Stream()
    monkeypatch.setattr(torch, "empty", Buffer)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def enter(stream: Stream) -> None:
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: id(stream), raising=False)

    enter(loading)
    space = Workspace(torch.device("cuda", 0))
    space.reserve(1024)
    alone: Any = space.buffer
    assert space.release() == 1024
    assert alone.recorded == [], "one stream is the allocator's own"
    space.reserve(1024)
    buffer: Any = space.buffer
    enter(computing)
    space.order()
    assert computing.waited == [loading]
    assert space.release() == 1024
    assert buffer.recorded == [computing]
