"""The GPU decodes every blob to the bits that the CPU core encoded."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from support.backends import MadeBackend
from support.codecs import pack_everything
from support.contents import CONTENTS, fill, rng, shapes
from support.gpu import Batch, needs_cuda, torch
from support.packed import opened, pack

from tpde.codec import reference
from tpde.codec.selection import PREFIX_CHUNK_WORDS
from tpde.cuda.backend import current
from tpde.format.constants import DTYPES, RECORD_BYTES
from tpde.format.container import TensorSpec

pytestmark = needs_cuda


def with_little_shared_memory() -> MadeBackend:
    """This card's kernels, launched as on one whose blocks have 99 KiB."""
    here = current()
    return MadeBackend(here.kernel, here.facts(0)._replace(shared_bytes=99 << 10))


@pytest.fixture(params=["staged", "rings"])
def way(request: pytest.FixtureRequest, launch_on: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """Decode as on this card; and as where shared memory is small, with rings wherever they fit."""
    from tpde.cuda import geometry

    if request.param == "rings":
        staged = geometry.staged
        launch_on(with_little_shared_memory())
        monkeypatch.setattr(geometry, "staged", lambda *wanted: staged(*wanted)._replace(most=1))
    return str(request.param)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_contract(dtype: str, check: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every content in every shape, all in one work list."""
    pack_everything(monkeypatch)
    packed = [pack(spec, fill(name, spec)) for name in CONTENTS for spec in shapes(dtype, PREFIX_CHUNK_WORDS)]
    batch = Batch([p for p in packed if p is not None and p.header.codec == 1])
    assert batch.packed
    batch.launch(check)
    batch.assert_equal()
    assert batch.status.tolist() == [0, 0, 0, 0]


@pytest.mark.usefixtures("way")
def test_many_tensors_in_one_launch() -> None:
    specs = [TensorSpec("BF16", (n, 997)) for n in (40, 64, 300, 1200, 77)]
    batch = Batch([p for s in specs * 7 if (p := pack(s, fill("normal", s)))])
    assert len(batch.work._launches) == 1
    batch.launch()
    batch.assert_equal()


def test_launched_again_for_something_else() -> None:
    """What a launch is asked for is kept for the next one, which may be asked for something else."""
    spec = TensorSpec("BF16", (300, 997))
    batch = Batch([p for name in ("normal", "random") if (p := pack(spec, fill(name, spec)))])
    batch.launch()
    for check in (True, False, False, True):
        batch.out = torch.full_like(batch.out, 0xA5)  # elsewhere: the one before is still there
        batch.launch(check)
        batch.assert_equal()
        with torch.cuda.stream(torch.cuda.Stream()):
            batch.out.fill_(0xA5)
            batch.launch(check)
            batch.assert_equal()


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_tables_that_arrive_late(dtype: str, rows: bool) -> None:
    """With fewer chunks than warps, those without one load their share of the tables too: all wait for it."""
    from tpde.cuda.decode import Rows, WorkList

    spec = TensorSpec(dtype, (8, 4096))
    packed = pack(spec, fill("normal", spec))
    batch = Batch([packed])
    images = [torch.from_numpy(table.image.copy()).pin_memory() for table in batch.tables]
    items = [
        item._replace(tables_at=image.data_ptr()) for item, image in zip(batch.items, images, strict=True)
    ]  # which come over the bus, long after the chunks
    ids = torch.arange(8, device="cuda")
    made: WorkList | Rows = Rows(items[0], 0) if rows else WorkList(items, 0)
    descriptors = batch.upload(made.descriptors)
    stream = torch.cuda.current_stream().cuda_stream
    for _ in range(20):
        batch.out.fill_(0xA5)
        where, out = (descriptors.data_ptr(), batch.status.data_ptr(), stream), batch.out.data_ptr()
        if isinstance(made, Rows):
            made.launch(*where, ids.data_ptr(), 8, out, True)
        else:
            made.launch(*where, out, True)
        batch.assert_equal()
        assert batch.status.tolist() == [0, 0, 0, 0]


@pytest.mark.usefixtures("way")
def test_slices_that_start_chunks_of_their_own() -> None:
    spec = TensorSpec("BF16", (3, 1021, 523))  # slices of an odd number of words
    batch = Batch([pack(spec, fill("normal", spec))])
    assert batch.packed[0].header.segment_words == 1021 * 523
    batch.launch()
    batch.assert_equal()


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("misalign", [2, 6, 8])
def test_output_anywhere(misalign: int) -> None:
    spec = TensorSpec("BF16", (40, 1000))
    batch = Batch([pack(spec, fill("normal", spec))], misalign=misalign)
    batch.launch()
    batch.assert_equal()


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("seed", range(24))
def test_any_valid_table(seed: int) -> None:
    """Tables that no planner makes: any lengths, raw bits, escapes, both kinds, several variants."""
    draw = rng("gpu tables", seed)
    dtype = ["BF16", "F8_E5M2", "F32", "F16"][seed % 4]
    b = DTYPES[dtype].word_bytes
    kind = 1 + seed // 4 % 2
    tables = []
    for _ in range(int(draw.integers(1, 4))):
        longest = int(draw.integers(2, 13))
        raw = int(draw.integers(0, min(7, 12 - longest) + 1)) if kind == 1 else 0
        limit = 1 << (8 - raw if kind == 1 else 16)
        leaves = [0]
        for _ in range(int(draw.integers(2, 60))):
            short = [i for i, bits in enumerate(leaves) if bits < longest]
            if not short or len(leaves) >= limit:
                break
            at = short[int(draw.integers(len(short)))]
            leaves[at] += 1
            leaves.append(leaves[at])
        escape = leaves.pop() if len(leaves) > 1 else 0
        values = draw.choice(limit, len(leaves), replace=False)
        lengths = dict(zip(map(int, values), leaves, strict=True))
        tables.append(reference.Table.from_lengths(kind, max([*leaves, escape]), raw, lengths, escape))
    n = 3 * 2048 + 333
    data = draw.integers(0, 256, n * b, dtype=np.uint8).tobytes()
    uses = [(0, 0)] * (b - 1) + [(0, len(tables))]
    blob = reference.encode_blob(data, dtype, (n,), tables=tables, planes=uses, chunk_words=2048)
    batch = Batch([opened(np.frombuffer(blob, np.uint8), data)])
    batch.launch()
    batch.assert_equal()
    assert batch.status.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("shape", [(50, 4096), (100, 384), (30, 8192), (7, 20000), (1000, 3), (90, 1000)])
@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_rows(shape: tuple[int, int], dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tpde.cuda.decode import Rows

    pack_everything(monkeypatch)
    spec = TensorSpec(dtype, shape)
    packed = pack(spec, fill("normal", spec))
    batch = Batch([packed])
    rows = Rows(batch.items[0], 0)
    descriptors = batch.upload(rows.descriptors)
    ids = torch.randint(0, shape[0], (217,), device="cuda")
    width = shape[1] * DTYPES[dtype].word_bytes
    out = torch.full((217 * width + 64,), 0xA5, dtype=torch.uint8, device="cuda")
    where = descriptors.data_ptr(), batch.status.data_ptr(), torch.cuda.current_stream().cuda_stream
    for check in (False, True):
        rows.launch(*where, ids.data_ptr(), 217, out.data_ptr(), check)
    expected = np.frombuffer(packed.data, np.uint8).reshape(shape[0], width)[ids.cpu().numpy()]
    assert np.array_equal(out[: 217 * width].cpu().numpy().reshape(217, width), expected)
    assert bool((out[217 * width :] == 0xA5).all())
    assert batch.status.tolist() == [0, 0, 0, 0]
    everything = torch.arange(shape[0], device="cuda")
    rows.launch(*where, everything.data_ptr(), shape[0], 0, check=True)  # writes nothing
    assert batch.status.tolist() == [0, 0, 0, 0]
    last = packed.header.index_at + RECORD_BYTES * (packed.header.chunks - 1)
    batch.blobs[0][last + 4] ^= 1  # its checksum: format.md 4.3
    rows.launch(*where, everything.data_ptr(), shape[0], 0, check=True)
    assert batch.status.tolist() != [0, 0, 0, 0]


@pytest.mark.parametrize("dtype", ["F8_E4M3", "BF16", "F32", "F64"])
@pytest.mark.parametrize("kind", [1, 2])
@pytest.mark.usefixtures("way")
def test_runs_of_escapes(dtype: str, kind: int) -> None:
    """The longest codewords there are, group after group in some lanes: the most that rings must bring."""
    draw, b = rng("gpu escapes", dtype, kind), DTYPES[dtype].word_bytes
    longest, repeated = 12, 1 if kind == 1 else 257
    lengths = {value * repeated: value + 1 for value in range(longest)}
    table = reference.Table.from_lengths(kind, longest, 0, lengths, longest)
    places = 16 // b
    symbols = np.zeros((2 * PREFIX_CHUNK_WORDS // (32 * places), 32, places), np.uint8)
    for lane in range(32):
        group = 0
        while group < len(symbols):
            group += int(draw.integers(1, 256 // places + 1))
            count = int(draw.integers(1, 32 // places + 3))
            run = symbols[group : group + count, lane]
            run[:] = draw.integers(100, 256, run.shape)
            group += count
    words = draw.integers(0, 256, (symbols.size, b), dtype=np.uint8)
    words[:, -1] = symbols.reshape(-1)
    top = (
        words[:, -2:].copy().view("<u2") if b > 1 else words.copy()
    )  # of which the sign goes back to the top
    bits = 8 * top.itemsize
    top = top >> 1 | top << (bits - 1)
    words[:, -top.itemsize :] = top.view(np.uint8)
    data = words.tobytes()
    uses = [(0, 0)] * (b - 1) + [(0, 1)]
    blob = reference.encode_blob(
        data, dtype, (len(words),), tables=[table], planes=uses, chunk_words=PREFIX_CHUNK_WORDS
    )
    packed = opened(np.frombuffer(blob, np.uint8), data)
    modes = packed.blob[packed.header.index_at : packed.header.chunks_at].view("<u4")[2::3]
    assert (modes >> 2 * (b - 1) & 3 == 2).all()
    batch = Batch([packed])
    batch.launch()
    batch.assert_equal()
    assert batch.status.tolist() == [0, 0, 0, 0]


def test_as_on_a_card_with_little_shared_memory(launch_on: Any) -> None:
    """What 8.6, 8.9 and 12.0 get: staged planes where 24 warps hold them, rings otherwise."""
    launch_on(with_little_shared_memory())
    specs = [TensorSpec(dtype, (3000, 4096)) for dtype in ("BF16", "F16", "F32", "F8_E4M3")]
    batch = Batch([pack(spec, fill("normal", spec)) for spec in specs])
    assert {bool(it.geometry.piece) for it in batch.work._launches} == {False, True}
    for check in (False, True):
        batch.out.fill_(0xA5)
        batch.launch(check)
        batch.assert_equal()
    assert batch.status.tolist() == [0, 0, 0, 0]


@pytest.mark.usefixtures("way")
def test_damage_is_reported_with_item_and_chunk() -> None:
    spec = TensorSpec("BF16", (64, 1024))
    good, bad = pack(spec, fill("normal", spec)), pack(spec, fill("normal", spec))
    blob = bad.blob.copy()
    offsets = blob[bad.header.index_at : bad.header.chunks_at].view("<u4")[::3].astype(np.int64) << 4
    blob[offsets[5] + 100] ^= 4  # a mantissa of chunk 5
    batch = Batch([good, bad._replace(blob=blob)])
    batch.launch(check=True)
    assert batch.status.tolist() == [1, 1, 5, 0]
    batch.status.zero_()
    batch.launch(check=False)
    assert batch.status.tolist() == [0, 0, 0, 0]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "F8_E4M3", "F64"])
def test_mutations_never_crash_and_never_pass(dtype: str) -> None:
    """Any byte of index map or chunks changed: reported, or the output is as it was (padding)."""
    draw = rng("gpu mutations", dtype)
    spec = TensorSpec(dtype, (37000,))
    packed = pack(spec, fill("normal", spec))
    assert packed is not None
    batch = Batch([packed])
    good, size = batch.blobs[0].clone(), packed.blob.size
    for _ in range(400):
        batch.blobs[0].copy_(good)
        for at in draw.integers(packed.header.index_at, size, int(draw.integers(1, 4))):
            batch.blobs[0][int(at)] ^= int(draw.integers(1, 256))
        batch.status.zero_()
        batch.out.fill_(0xA5)
        batch.launch(check=True)
        if not batch.status[0].item():
            batch.assert_equal()
        gaps = batch.out.cpu().numpy()[len(packed.data) :]
        assert (gaps == 0xA5).all()


def test_header_that_understates_its_streams() -> None:
    """Coded planes beyond the room that the header promises take the slow way."""
    spec = TensorSpec("BF16", (100, 1000))
    packed = pack(spec, fill("normal", spec))
    batch = Batch([packed._replace(header=dataclasses.replace(packed.header, max_stream_bytes=2700))])
    batch.launch()
    batch.assert_equal()


@pytest.mark.usefixtures("way")
def test_graph_capture_and_other_streams() -> None:
    spec = TensorSpec("BF16", (512, 1024))
    batch = Batch([pack(spec, fill("normal", spec))])
    batch.work.prepare()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        batch.launch()
    side.synchronize()
    batch.assert_equal()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batch.launch(check=False)
    batch.out.fill_(0xA5)
    graph.replay()
    torch.cuda.synchronize()
    batch.assert_equal()
