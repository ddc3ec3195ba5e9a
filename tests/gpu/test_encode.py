"""Tensors that a GPU packs: the bytes of the CPU."""

from __future__ import annotations

import numpy as np
import pytest
from support.contents import CONTENTS, fill, spec_of
from support.encoding import assert_same_blob, spread, uneven
from support.gpu import needs_cuda, torch
from support.packed import pack
from support.window_encoding import GUARD

from tpde.codec.native import Bytes
from tpde.cuda.encode import PackEncoder
from tpde.format.container import TensorSpec

pytestmark = needs_cuda

DTYPES = ("F16", "F32", "F64", "F8_E4M3", "F8_E5M2", "I8", "I16", "I64")
SIZES = (1021, 8191, 8192, 8193, 2 * 8192 + 517, 70 * 8192 + 3, 1000 * 8192 + 11)


def encode(spec: TensorSpec, words: torch.Tensor) -> torch.Tensor | None:
    """Pack a tensor where it is, on the current stream; nothing but the blob is written."""
    encoder, stream = PackEncoder(words.data_ptr(), spec, 0), torch.cuda.current_stream().cuda_stream

    def room(nbytes: int) -> torch.Tensor:
        return torch.full((nbytes + 2 * GUARD,), 0xA5, dtype=torch.uint8, device="cuda")

    def inner(guarded: torch.Tensor) -> torch.Tensor:
        assert (guarded[:GUARD] == 0xA5).all()
        assert (guarded[-GUARD:] == 0xA5).all()
        return guarded[GUARD:-GUARD]

    sample = room(encoder.sample_bytes)
    encoder.gather(sample.data_ptr() + GUARD, stream)
    chosen = encoder.choose(inner(sample).cpu().numpy(), "prefix")
    if chosen is None:
        return None
    scratch = room(chosen.scratch_bytes)
    image = GUARD + chosen.image_at
    scratch[image : image + chosen.image.size] = torch.from_numpy(chosen.image).cuda()
    encoder.measure(chosen, scratch.data_ptr() + GUARD, stream)
    found = encoder.found(chosen, inner(scratch)[: chosen.found_bytes].cpu().numpy())
    blob = room(found.nbytes)
    encoder.encode(chosen, scratch.data_ptr() + GUARD, blob.data_ptr() + GUARD, stream)
    inner(scratch)
    made, head = inner(blob), found.head(bytes(16)).copy()
    assert (made[: head.size] == 0xA5).all()
    made[: head.size] = torch.from_numpy(head).cuda()
    return made


def upload(data: bytes | Bytes, first: int = 0) -> torch.Tensor:
    flat = np.zeros(first + len(data), np.uint8)
    flat[first:] = np.frombuffer(data, np.uint8)
    return torch.from_numpy(flat).cuda()[first:]


def check(spec: TensorSpec, data: bytes | Bytes, first: int = 0) -> bool:
    """Compare a tensor's blob with the packer's; whether there is one."""
    made, expected = encode(spec, upload(data, first)), pack(spec, bytes(data))
    if made is None:
        return False
    assert expected is not None
    assert_same_blob(made.cpu().numpy(), expected)
    return True


@pytest.mark.parametrize("words", SIZES)
@pytest.mark.parametrize("content", CONTENTS)
def test_the_bytes_of_the_packer(content: str, words: int) -> None:
    spec = spec_of("BF16", words)
    assert check(spec, fill(content, spec)) or content in ("random", "exponents", "zeros", "constant")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("content", ["normal", "nearly", "specials"])
def test_every_kind_of_words(content: str, dtype: str) -> None:
    spec = spec_of(dtype, 100 * 8192 + 77)
    assert check(spec, fill(content, spec)) or content != "normal"


@pytest.mark.parametrize("first", [2, 4, 8, 14])
def test_words_at_any_address(first: int) -> None:
    spec = spec_of("BF16", 20 * 8192 + 100)
    assert check(spec, fill("normal", spec), first)


@pytest.mark.parametrize("shape", [(3, 701, 751), (40, 700, 752)])
def test_slices_of_experts(shape: tuple[int, ...]) -> None:
    spec = TensorSpec("BF16", shape)
    assert check(spec, fill("normal", spec))


@pytest.mark.parametrize("make", [spread, uneven])
def test_many_blocks(make: object) -> None:
    """Blocks wait for those before them, again and again in other orders."""
    assert callable(make)
    spec = TensorSpec("BF16", (2000 * 8192 + 300,))
    data = make(2000 * 8192 + 300)
    words, expected = upload(data), pack(spec, data.tobytes())
    assert expected is not None
    first = encode(spec, words)
    assert first is not None
    assert_same_blob(first.cpu().numpy(), expected)
    for _ in range(20):
        again = encode(spec, words)
        assert again is not None
        assert torch.equal(again, first)


def test_a_stream_of_its_own() -> None:
    spec = spec_of("BF16", 200 * 8192)
    data = fill("normal", spec)
    words, expected = upload(data), pack(spec, data)
    assert expected is not None
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        blob = encode(spec, words)
        assert blob is not None
        found = blob.cpu()
    assert_same_blob(found.numpy(), expected)
