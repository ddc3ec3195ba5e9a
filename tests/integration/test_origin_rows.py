"""The systems that led to deltas and checkpoints here, by their numbers: each works, on bits."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.backends import NotingBackend
from support.contents import rng
from support.emulated import on_cpu  # noqa: F401

import tpde
from tpde.codec.delta import chunk_count
from tpde.codec.delta_reference import Model as ReferenceModel
from tpde.codec.delta_reference import decode_chunk
from tpde.cuda.backend import current, launching_on
from tpde.format.delta_head import DENSE, SPARSE
from tpde.io.sources import BytesSource, FileSource
from tpde.store.delta_file import DeltaFile

torch = pytest.importorskip("torch", reason="needs torch")
st = pytest.importorskip("safetensors.torch", reason="needs safetensors")


def bits(tensor: Any) -> np.ndarray:
    return tensor.contiguous().view(torch.uint8).numpy()


def test_row_1_an_exact_dense_delta_of_two_models(tmp_path: Path) -> None:
    """All weights of a small GPT changed, NaN payloads and signed zeros among them.

    Adding a difference in floating point, as it was done, restores fewer.
    """
    draw = torch.Generator().manual_seed(1)
    shapes = {"wte": (500, 64), "h.0.attn.c_attn": (64, 192), "h.0.mlp.c_fc": (64, 256), "ln_f": (64,)}
    base = {k: (0.02 * torch.randn(s, generator=draw)).bfloat16() for k, s in shapes.items()}
    final = {k: (w.float() + 0.01 * torch.randn(w.shape, generator=draw)).bfloat16() for k, w in base.items()}
    special = torch.tensor([0x7FC1, 0xFF81, 0x8000, 0x0000, 0x7F80, 0x0001], dtype=torch.int32).short()
    final["wte"].view(-1)[:6] = special.view(torch.bfloat16)
    base["wte"].view(-1)[6:12] = special.view(torch.bfloat16)
    lost = sum(int((bits(w + (final[k] - w)) != bits(final[k])).sum()) for k, w in base.items())
    assert lost > 0
    for name, state in (("base", base), ("final", final)):
        st.save_file(state, tmp_path / f"{name}.safetensors")
    paths = tmp_path / "base.safetensors", tmp_path / "final.safetensors", tmp_path / "delta.tpde"
    tpde.diff(*paths)
    file = DeltaFile(FileSource(paths[2]))
    assert {it.codec for it in file.head.tensors} <= {DENSE, SPARSE}
    file.close()
    tpde.patch(paths[0], paths[2], tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == paths[1].read_bytes()


def test_row_2_sparse_deltas_in_chunks_of_a_documented_format(tmp_path: Path) -> None:
    """Every chunk is decoded alone, by the reference that was written from the document."""
    draw = rng("origin", 2)
    base = (0.02 * draw.standard_normal(150_000)).astype(np.float32)
    target = base.copy()
    target[draw.random(base.size) < 0.01] *= np.float32(1.0001)
    for name, words in (("base", base), ("target", target)):
        st.save_file({"w": torch.from_numpy(words)}, tmp_path / name)
    tpde.diff(tmp_path / "base", tmp_path / "target", tmp_path / "delta")
    file = DeltaFile(FileSource(tmp_path / "delta"))
    entry, model = next(iter(file.head.tensors)), ReferenceModel.parse(file.head.models[0])
    assert (entry.codec, entry.changes.size) == (SPARSE, chunk_count(base.size))
    data, at = file.payload(entry), 0
    file.close()
    for i, (count, size) in enumerate(zip(entry.changes, entry.sizes, strict=True)):
        part = slice(65536 * i, 65536 * (i + 1))
        words = base[part].view(np.uint32).tolist()
        found = decode_chunk(model, words, data[at : at + size].tobytes(), int(count))
        assert found == target[part].view(np.uint32).tolist()
        at += int(size)
    assert at == data.size


def test_row_3_a_layer_with_a_tenth_changed(tmp_path: Path) -> None:
    """768 x 2304 fp32 weights: 8.08 to 1 was reached; the whole file is taken here."""
    draw = rng("origin", 3)
    base = (0.02 * draw.standard_normal((768, 2304))).astype(np.float32)
    target = base.copy()
    at = draw.choice(base.size, base.size // 10, replace=False)
    target.reshape(-1)[at] += (0.01 * draw.standard_normal(at.size)).astype(np.float32)
    for name, words in (("base", base), ("target", target)):
        st.save_file({"w": torch.from_numpy(words)}, tmp_path / name)
    made = tpde.diff(tmp_path / "base", tmp_path / "target", tmp_path / "delta")
    assert made.ratio >= 10.5
    tpde.patch(tmp_path / "base", tmp_path / "delta", tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "target").read_bytes()


@pytest.mark.usefixtures("on_cpu")
def test_row_4_reconstruction_from_a_sparse_delta_by_a_kernel() -> None:
    """The kernel runs on the CPU here, on a GPU in tests/gpu/test_delta.py."""
    draw = rng("origin", 4)
    base = (0.02 * draw.standard_normal((16, 4096))).astype(np.float32)
    target = base.copy()
    at = draw.random(base.shape) < 0.1
    target[at] += (0.01 * draw.standard_normal(int(at.sum()))).astype(np.float32)
    target[3, :9] = np.float32("nan")
    live, new = {"w": torch.from_numpy(base)}, {"w": torch.from_numpy(target)}
    made = tpde.make_delta(live, new)
    file = DeltaFile(BytesSource(made, "<delta>"))
    assert [it.codec for it in file.head.tensors] == [SPARSE]
    noting = NotingBackend(current())
    with launching_on(noting):
        assert tpde.apply_delta(live, made) == 1
    assert {"decode", "write"} <= set(noting.names)
    assert np.array_equal(bits(live["w"]), bits(new["w"]))


@pytest.mark.parametrize("by", ["core", "kernels"])
def test_row_9_a_layer_of_a_base_and_a_delta_in_a_model(by: str, request: pytest.FixtureRequest) -> None:
    """The weight is rebuilt from base, index and blob, multiplied by, and gone.

    A base of less than the weight stays, packed, with two deltas on it; the kernels run on the CPU here.
    """
    from tpde.nn import PackedParameter, add_deltas

    if by == "kernels":
        request.getfixturevalue("on_cpu")
    torch.manual_seed(9)
    layers = [torch.nn.Linear(512, 1280), torch.nn.GELU(), torch.nn.Linear(1280, 512)]
    base = torch.nn.Sequential(*layers).to(torch.bfloat16)
    tunes, x = {None: base}, torch.randn(4, 512).bfloat16()
    for name in ("math", "law"):
        tunes[name] = copy.deepcopy(base)
        with torch.no_grad():
            for it in tunes[name].parameters():
                it.view(torch.int16)[torch.rand(it.shape) < 0.035] += 1
    deltas = {name: tpde.make_delta(base, tunes[name]) for name in ("math", "law")}
    model = add_deltas(tpde.pack_module(copy.deepcopy(base)), deltas)
    plain = sum(it.nbytes for it in base.parameters())
    held = sum(it.packed_bytes for it in model[0].weight.packed.sources + model[2].weight.packed.sources)
    assert held < 0.73 * plain
    assert model.tpde_deltas.nbytes < 2 * 0.15 / 8 * plain
    for name in ("math", "law", None):
        model.use(name)
        with torch.no_grad():
            assert np.array_equal(bits(model(x)), bits(tunes[name](x)))
        assert isinstance(model[0].weight, PackedParameter)
        assert np.array_equal(bits(model[0].weight.plain()), bits(tunes[name][0].weight.detach()))


def test_row_10_checkpoints_on_disk_with_exact_resume(tmp_path: Path) -> None:
    """Each epoch against the one before; a run that goes on from one is the run that never stopped."""

    def trained(model: Any, optimizer: Any, epochs: range, store: Any) -> list[float]:
        losses = []
        for epoch in epochs:
            draw = torch.Generator().manual_seed(epoch)
            x = torch.randn(16, 32, generator=draw)
            loss = (model(x) - x.roll(1, 1)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if store is not None:
                store.save(epoch, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        return losses

    def fresh() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    with tpde.CheckpointStore(tmp_path / "run") as store:
        whole = trained(*fresh(), range(12), store)
    assert (tmp_path / "run" / "step-00000010.tpde").stat().st_size > 0
    for last in (0, 6, 10):
        model, optimizer = fresh()
        state = tpde.CheckpointStore(tmp_path / "run").load(last)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        assert trained(model, optimizer, range(last + 1, 12), None) == whole[last + 1 :]
