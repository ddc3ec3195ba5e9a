"""Where tensors lie in a packed file: whole blocks of large models start at pages."""

from __future__ import annotations

from support.contents import fill
from support.files import pack_bytes, safetensors_bytes, unpack_bytes

from tpde.format.blob import align
from tpde.format.constants import ALIGN_BLOB, ALIGN_LARGE, LARGE_BYTES
from tpde.format.container import TensorSpec
from tpde.packing.reader import PackedFile

LARGE = TensorSpec("BF16", (2, LARGE_BYTES // 2))
SMALL = TensorSpec("BF16", (2048,))


def test_blocks_that_are_large_end_at_pages() -> None:
    # Blocks of several sizes: one may end at a page by itself.
    tensors = {f"layers.{i}.{name}": LARGE for i in range(3) for name in ("up.weight", "down.weight")}
    tensors |= {f"layers.{i}.small{k}.weight": SMALL for i in range(3) for k in range(i)}
    tensors["head.weight"] = SMALL
    source = safetensors_bytes({name: (spec, fill("normal", spec)) for name, spec in tensors.items()})
    packed = pack_bytes(source)
    with PackedFile(packed) as file:
        start = file.container.data_start
        places = {name: (start + it.begin, start + it.end) for name, it in file.container.entries.items()}
        padding = {
            name: file.tensor(name).stored_bytes - align(file.tensor(name).blob.header.blob_bytes, ALIGN_BLOB)
            for name in file.packed_names()
        }
    assert unpack_bytes(packed) == source
    for i in range(3):
        block = [place for name, place in places.items() if name.startswith(f"layers.{i}.")]
        assert min(block)[0] % ALIGN_LARGE == 0
        assert max(block)[1] % ALIGN_LARGE == 0
        # Within a block, blobs follow each other as closely as they may.
        for (_, end), (begin, _) in zip(sorted(block), sorted(block)[1:], strict=False):
            assert begin == end
            assert begin % ALIGN_BLOB == 0
    assert all(0 <= size < ALIGN_LARGE for size in padding.values())
    assert any(padding.values())


def test_small_blocks_are_not_padded() -> None:
    tensors = {f"layers.{i}.weight": (SMALL, fill("normal", SMALL)) for i in range(9)}
    packed = pack_bytes(safetensors_bytes(tensors))
    with PackedFile(packed) as file:
        sizes = [it.end - it.begin for it in file.container.entries.values()]
    assert max(sizes) < 4096
