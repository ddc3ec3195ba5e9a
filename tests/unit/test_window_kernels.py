"""The kernels that encode windows, run on the CPU: the core's bytes, of any matrix at any place."""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.emulated import on_cpu  # noqa: F401
from support.models import torch
from support.window_encoding import assert_same_blob, encode_on_host, encoding_on_host, guards, room
from support.windows import MATRICES, weights

from tpde.codec import window_plan, window_stacks, windows
from tpde.cuda import window_encode
from tpde.cuda.window_encode import Matrix, WindowEncoder
from tpde.cuda.window_products import DeviceWindow
from tpde.errors import Corrupt, InvalidInput
from tpde.weights import encode_launches, window_stacking, windowing
from tpde.weights.windowed_experts import WindowedExperts

SHAPES = ((1, 1), (9, 40), (17, 5), (33, 70), (16, 256), (100, 384), (48, 1100), (1, 5000), (40, 264))

pytestmark = pytest.mark.usefixtures("on_cpu")


@pytest.mark.parametrize("shape", SHAPES, ids=lambda it: f"{it[0]}x{it[1]}")
@pytest.mark.parametrize("content", MATRICES)
def test_the_bytes_of_the_core(content: str, shape: tuple[int, int]) -> None:
    words = np.ascontiguousarray(MATRICES[content](*shape))
    assert_same_blob(encode_on_host(words), words)


@pytest.mark.parametrize("first", range(9))
@pytest.mark.parametrize("stride", [512, 520, 515])
def test_views_at_any_word(first: int, stride: int) -> None:
    memory = weights(33, stride).reshape(-1)
    words = np.lib.stride_tricks.as_strided(memory[first:], (32, 490), (2 * stride, 2))
    assert_same_blob(encode_on_host(words), words)


def test_a_row_of_escapes() -> None:
    words = weights(40, 600)
    words[21] = np.arange(600) * 0x6D % 256 << 7
    blob = encode_on_host(words)
    assert_same_blob(blob, words)
    assert windows.validate(blob).entries > 500


@pytest.mark.parametrize("few", [0, 1 << 30])
def test_a_warp_a_row_or_a_block(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_encode, "_FEW_ROWS", few)
    monkeypatch.setattr(window_encode, "_MOST_BLOCKS", 3)  # which take several rows each
    for make in (weights, MATRICES["every_word"], MATRICES["edges"]):
        words = make(70, 3001)
        assert_same_blob(encode_on_host(words), words)


def test_the_sum_of_many_blocks() -> None:
    """More than 32 blocks: some look further back than a warp at once."""
    words = weights(16 * 300, 70)
    assert_same_blob(encode_on_host(words), words)


@pytest.mark.parametrize("ends", [0, 3, 4, 5, 36])
def test_blocks_that_wait_for_many(ends: int) -> None:
    """The last of 38 blocks: those before have said what they have, block `ends` what all up to it have."""
    words = weights(16 * 300, 70)
    encoder, scratch, chosen, out = encoding_on_host(words)
    states = scratch[window_encode._STATES_AT :][: 8 * 38].view(np.uint64)
    offsets = out[chosen.window.offsets_at :][: 4 * 301].view(np.uint32)
    starts = offsets[np.minimum(np.arange(39) * 8, 300)].astype(np.uint64)
    assert (
        states.tolist() == (starts[1:] | np.uint64(2 << 32)).tolist()
    )  # blocks run one after the other here
    states[:-1] = np.diff(starts)[:-1] | np.uint64(1 << 32)
    states[0] = starts[1] | np.uint64(2 << 32)
    states[ends] = starts[ends + 1] | np.uint64(2 << 32)
    states[-1] = 0
    scratch[window_encode._TICKET_AT] = 37
    out[chosen.window.entries_at + 2 * int(starts[37]) : chosen.window.bodies_at] = 0
    offsets[8 * 37 :] = 0
    encoder._blocks = 1
    encoder.encode(chosen, scratch.ctypes.data, out.ctypes.data, 0)
    assert states[-1] == starts[-1] | np.uint64(2 << 32)
    assert_same_blob(out, words)


def test_words_that_change_meanwhile() -> None:
    """Nothing outside the blob is written, though there is no room for all entries."""
    words = weights(200, 300)
    encoder, scratch, chosen, out = encoding_on_host(words)
    scratch[window_encode._TICKET_AT :][: 16 + 8 * encoder._blocks] = 0
    words[:] = MATRICES["every_word"](200, 300)
    encoder.encode(chosen, scratch.ctypes.data, out.ctypes.data, 0)
    assert (guards(out) == 0xA5).all()
    with pytest.raises(Corrupt):
        windows.validate(out)


class OnDevice:
    """A tensor of the CPU that says of itself that it is on a device."""

    is_cuda = True

    def __init__(self, tensor: Any) -> None:
        self.tensor, self.shape, self.device = tensor, tensor.shape, torch.device("cpu", 0)
        self.data_ptr, self.stride = tensor.data_ptr, tensor.stride


def on_a_device(words: np.ndarray) -> Any:
    return OnDevice(torch.from_numpy(words.copy().view(np.int16)))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of a device is the CPU's, at addresses that kernels take."""
    monkeypatch.setattr(encode_launches, "on_device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(encode_launches, "stream_handle", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=bool))
    empty = torch.empty
    monkeypatch.setattr(
        torch,
        "empty",
        lambda size, **more: (
            torch.from_numpy(room(size, 128, 0xA5)) if more.get("device") else empty(size, **more)
        ),
    )


def assert_holds(blob: Any, window: windows.Window, words: np.ndarray) -> None:
    """Compare what a blob with room to spare decodes to, by kernels and by the core, with words."""
    tight = windowing.without_spare(blob, window).numpy()
    assert windows.validate(tight).entries == window.entries
    assert np.array_equal(windows.decode(tight), words)
    out = np.zeros_like(words)
    DeviceWindow(window, blob.data_ptr(), 0).rows(out.ctypes.data, words.shape[1], 0)
    assert np.array_equal(out, words)


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize(("rows", "columns"), [(48, 1100), (33, 70), (1, 256)])
@pytest.mark.parametrize("content", ["weights", "pruned"])
def test_other_words_where_kernels_read(content: str, rows: int, columns: int) -> None:
    """All that kernels were told stays: places, flag and table. What has no room changes nothing."""
    first, other = (np.ascontiguousarray(MATRICES[content](rows + 5, columns)[at:][:rows]) for at in (0, 5))
    made = windowing.encode(on_a_device(first), spare=True)
    assert made is not None
    tight = windowing.without_spare(made.blob, made.window)
    assert_same_blob(tight.numpy(), first)
    assert tight.numel() < made.blob.numel() == made.window.nbytes <= tight.numel() * 1.02 + 3000
    for words in (other, first):
        found = windowing.encode_again(on_a_device(words), made.window, made.blob)
        assert found is not None
        assert found._replace(entries=made.window.entries) == made.window
        assert_holds(made.blob, found, words)
    if rows > 1:
        before = made.blob.clone()
        every = MATRICES["every_word"](rows, columns)
        assert windowing.encode_again(on_a_device(every), made.window, made.blob) is None
        assert torch.equal(made.blob, before)


@pytest.mark.usefixtures("launches")
def test_other_experts_where_kernels_read() -> None:
    first, other = ([weights(40 + at, 600)[at:] for at in range(low, low + 3)] for low in (0, 3))
    made = window_stacking.encode_together([on_a_device(it) for it in first], spare=True)
    tight = window_stacking.encode_together([on_a_device(it) for it in first])
    assert made is not None
    assert tight is not None
    assert torch.equal(window_stacking.without_spare(made.blob, made.stack), tight.blob)
    assert window_stacking.without_spare(tight.blob, tight.stack) is tight.blob
    found = window_stacking.encode_again([on_a_device(it) for it in other], made.stack, made.blob)
    assert found is not None
    assert found.starts == made.stack.starts
    for window, at, words in zip(found.windows, found.starts, other, strict=True):
        assert_holds(made.blob[at : at + window.nbytes], window, words)


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("full", [0, 1, 2])
def test_experts_are_taken_together_or_not_at_all(full: int) -> None:
    """One of them has more escapes than there is room for."""
    first, other = ([weights(40 + at, 600)[at:] for at in range(low, low + 3)] for low in (0, 3))
    made = window_stacking.encode_together([on_a_device(it) for it in first], spare=True)
    assert made is not None
    before = made.blob.clone()
    source = WindowedExperts(made.blob, "experts", made.stack)
    version = source.version
    other[full] = MATRICES["every_word"](40, 600)
    given = SimpleNamespace(unbind=lambda: [on_a_device(it) for it in other])
    assert source.renew(given) is False
    assert torch.equal(made.blob, before)
    assert (source.stack, source.version) == (made.stack, version)
    for number, words in enumerate(first):
        window, at = made.stack.windows[number], made.stack.starts[number]
        assert_holds(made.blob[at : at + window.nbytes], window, words)
    other[full] = first[full]
    assert source.renew(given) is True
    assert source.version == version + 1
    for window, at, words in zip(source.stack.windows, source.stack.starts, other, strict=True):
        assert_holds(made.blob[at : at + window.nbytes], window, words)


def test_which_entries_say_an_xor() -> None:
    """The fewest that there are, of any table: brute force over all sets of up to three."""
    table = bytes(sorted({1, 2, 4, 8, 16, 32, 64} | {3, 5, 6, 7, 9, 10, 57, 58, 122}))
    said = window_plan.said_by(table)
    assert said[0] == 0
    fewest: dict[int, int] = {}
    for size in range(1, 4):
        for chosen in itertools.combinations(table, size):
            fewest.setdefault(functools.reduce(operator.xor, chosen), size)
    fewest.pop(0)
    assert len(fewest) > 100
    for xor in range(1, 128):
        entries = [one for index, one in enumerate(table) if said[xor] >> index & 1]
        assert functools.reduce(operator.xor, entries) == xor
        assert len(entries) == fewest.get(xor, len(entries))


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize("turned", [False, True])
def test_matrices_that_are_encoded_together(turned: bool) -> None:
    """All launches before one wait: each blob is that of the matrix alone, in a stack that is valid."""
    for rows, columns in ((1, 1), (40, 70), (33, 600)):
        matrices = [MATRICES[it](rows, columns) for it in ("weights", "escapes", "pruned", "every_word")]
        plain = [torch.from_numpy(it.copy().view(np.int16)) for it in matrices]
        made = window_stacking.encode_together([on_a_device(it) for it in matrices], turned=turned)
        assert made is not None
        blob = made.blob.numpy()
        assert window_stacks.validate(blob) == made.stack
        assert made.stack.turned == turned
        for number, words in enumerate(matrices):
            assert_same_blob(made.stack.blob(blob, number), words)
        host = window_stacking.encode_together([it.view(torch.bfloat16) for it in plain], turned=turned)
        assert host is not None
        assert np.array_equal(host.blob.numpy(), blob)
    assert window_stacking.encode_together([torch.zeros(0, 4, dtype=torch.bfloat16)]) is None


def test_what_no_matrix_is() -> None:
    with pytest.raises(InvalidInput, match="no window layout"):
        WindowEncoder(Matrix(256, 0, 5, 5), 0)
    for wrong in (Matrix(257, 2, 5, 5), Matrix(256, 2, 5, 4)):
        with pytest.raises(ValueError, match="no matrix"):
            WindowEncoder(wrong, 0)
    encoder = WindowEncoder(Matrix(256, 1, 5, 0), 0)
    with pytest.raises(ValueError, match="0x108"):
        encoder.plan(264, 0)
    chosen = encoder.choose(bytes(2048))
    with pytest.raises(ValueError, match="a blob at 0x40"):
        encoder.encode(chosen, 256, 64, 0)
