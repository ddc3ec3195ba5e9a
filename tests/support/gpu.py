"""Blobs on the device, and decoding them there, for tests in tests/gpu."""

from __future__ import annotations

import numpy as np
import pytest

from support.packed import Packed

torch = pytest.importorskip("torch", reason="needs torch")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Batch:
    """Blobs on the device with what decodes them."""

    def __init__(self, packed: list[Packed], device: int = 0, misalign: int = 0) -> None:
        from tpde.cuda.decode import WorkList
        from tpde.cuda.items import Item, lookup_tables

        self.packed, self.device = packed, device
        self.tables = [lookup_tables(p.header, p.section) for p in packed]
        assert all(table is not None for table in self.tables)
        self.blobs = [self.upload(p.blob) for p in packed]
        self.images = [self.upload(t.image) for t in self.tables]
        self.offsets, at = [], misalign
        for p in packed:
            self.offsets.append(at)
            at += -(-len(p.data) // 512) * 512 + 512  # a gap that nothing may touch
        self.out = torch.full((at + 512,), 0xA5, dtype=torch.uint8, device=f"cuda:{device}")
        self.items = [
            Item(p.header, t, blob.data_ptr(), image.data_ptr(), offset)
            for p, t, blob, image, offset in zip(
                packed, self.tables, self.blobs, self.images, self.offsets, strict=True
            )
        ]
        self.work = WorkList(self.items, device)
        self.descriptors = self.upload(self.work.descriptors)
        self.status = torch.zeros(4, dtype=torch.int32, device=f"cuda:{device}")

    def upload(self, data: np.ndarray) -> torch.Tensor:
        """Put bytes on the device; at least 16, since an empty tensor has no address."""
        padded = np.zeros(max(data.size, 16), np.uint8)
        padded[: data.size] = data
        return torch.from_numpy(padded).to(f"cuda:{self.device}")

    def launch(self, check: bool = True) -> None:
        """Decode everything."""
        stream = torch.cuda.current_stream(self.device).cuda_stream
        self.work.launch(
            self.descriptors.data_ptr(), self.status.data_ptr(), stream, self.out.data_ptr(), check
        )

    def assert_equal(self) -> None:
        """Compare every byte, gaps included."""
        expected = np.full(self.out.numel(), 0xA5, np.uint8)
        for p, offset in zip(self.packed, self.offsets, strict=True):
            expected[offset : offset + len(p.data)] = np.frombuffer(p.data, np.uint8)
        found = self.out.cpu().numpy()
        wrong = np.flatnonzero(found != expected)
        if wrong.size:
            at = int(wrong[0])
            item = int(np.searchsorted(self.offsets, at, "right")) - 1
            header = self.packed[item].header
            pytest.fail(
                f"{wrong.size} bytes differ, the first at {at - self.offsets[item]} of item {item} "
                f"({header.spec}): found {found[at]:#x}, expected {expected[at]:#x}"
            )
