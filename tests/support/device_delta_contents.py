"""What must hold of deltas that a device makes and applies, whatever tensors hold and however they lie."""

from __future__ import annotations

import numpy as np
import pytest

import tpde
from support.backends import NotingBackend
from support.contents import rng
from support.device_deltas import DeviceDeltas, codecs, moved, same, words_of
from tpde.codec import fingerprints
from tpde.cuda.backend import current, launching_on
from tpde.format.constants import DTYPES
from tpde.format.delta_head import SPARSE
from tpde.frameworks import has_words, torch_bytes
from tpde.store import device_deltas

torch = pytest.importorskip("torch", reason="needs torch")


class DeltaContents(DeviceDeltas):
    """The tests of what is made and applied."""

    @pytest.mark.parametrize("fast", [False, True])
    @pytest.mark.parametrize(
        ("share", "far"),
        [(0, False), (0.0001, True), (0.005, False), (0.02, True), (0.1, False), (0.6, False)],
    )
    def test_every_kind_of_words(self, share: float, far: bool, fast: bool) -> None:
        old, new = self.state(share, far, (5, 3000, 9999) if share > 0.5 else ())
        self.apply(old, new, self.make(old, new, fast=fast))

    @pytest.mark.parametrize("offset", [1, 3, 8])
    def test_views_that_do_not_begin_where_memory_does(self, offset: int) -> None:
        old, new = self.state(0.01, False, (9, 65539), offset)
        self.apply(old, new, self.make(old, new))

    def test_what_is_sparse_stays_on_the_device(self) -> None:
        old, new = self.state(0.005, False, (66_003,))
        floats = [name for name in old if DTYPES[name.split(".")[0]].rotate]
        old, new = ({name: it[name] for name in floats} for it in (old, new))
        made = self.make(old, new)
        assert set(codecs(made).values()) == {SPARSE}
        noting = NotingBackend(current())
        with launching_on(noting):
            assert tpde.make_delta(old, new) == made
            assert {"encode", "gather"} <= set(noting.names)
            assert tpde.apply_delta(old, made) == len(floats)
        assert {"decode", "write"} <= set(noting.names)
        assert same(old, new)

    def test_fingerprints(self) -> None:
        old, _ = self.state(0, False)
        expected = {name: fingerprints.fingerprint(torch_bytes(it)) for name, it in old.items()}
        for offset in (0, 1):
            again = {
                name: self.tensor(torch_bytes(it), name.split(".")[0], offset) for name, it in old.items()
            }
            assert device_deltas.fingerprints(again) == expected
        assert device_deltas.fingerprints({}) == {}

    def test_heavy_chunks_among_light_ones(self) -> None:
        """Runs of words change, at the start, in the middle and at the end."""
        base = words_of("BF16", 65536 * 24 + 17)
        target = base.copy().view("<u2")
        for begin, end in ((0, 9000), (65536 * 12 - 3, 65536 * 12 + 5000), (65536 * 24, 65536 * 24 + 17)):
            target[begin:end] += 1
        old, new = {"w": self.tensor(base, "BF16")}, {"w": self.tensor(target.view(np.uint8), "BF16")}
        self.apply(old, new, self.make(old, new))

    def test_targets_of_one_word(self) -> None:
        base, target = np.zeros(80_000, "<u2"), np.zeros(160_000, np.uint8)
        base[::500] = 0x3F80
        old, new = {"w": self.tensor(base.view(np.uint8), "BF16")}, {"w": self.tensor(target, "BF16")}
        self.apply(old, new, self.make(old, new))

    def test_changes_that_are_smaller_as_something_else(self) -> None:
        base, target = np.zeros(66_000, "<i4"), np.zeros(66_000, "<i4")
        target[::10] = 1
        old, new = (
            {"w": self.tensor(base.view(np.uint8), "I32")},
            {"w": self.tensor(target.view(np.uint8), "I32")},
        )
        made = self.make(old, new)
        assert codecs(made) != {"w": SPARSE}
        self.apply(old, new, made)

    def test_bits_that_are_no_numbers(self) -> None:
        """NaNs with payloads, signed zeros, infinities and subnormals on both sides."""
        special = np.array([0, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 0x7F81, 1, 0x8001, 0x3F80], "<u2")
        draw, base = rng("special"), words_of("BF16", 66_000).view("<u2").copy()
        at = draw.choice(base.size, 900, replace=False)
        base[at[:600]] = draw.choice(special, 600)
        target = base.copy()
        target[at[300:]] = draw.choice(special, 600)
        old, new = (
            {"w": self.tensor(base.view(np.uint8), "BF16")},
            {"w": self.tensor(target.view(np.uint8), "BF16")},
        )
        self.apply(old, new, self.make(old, new))

    def test_tensors_that_pass_through_the_host(self) -> None:
        """Strided, tied, empty and scalar tensors beside usual ones."""
        old, new = self.state(0.01, False, (66_000,))
        for it, more in ((old, 0), (new, 1)):
            table = self.tensor(words_of("BF16", 9_000), "BF16")
            table[more * 5] += 1
            it["tied.a"] = it["tied.b"] = table
            it["strided"] = self.tensor(words_of("F32", 6_000), "F32").view(30, 200).t()
            it["strided"][7, 9 * more] += 1
            it["empty"] = torch.empty(0, 3, device=self.place)
            it["scalar"] = torch.tensor(1.5 + more, device=self.place)
            it["host"] = torch.ones(1000) + more
        made = self.make(old, new)
        tpde.apply_delta(old, made)
        assert same(old, new)
        assert old["tied.a"] is old["tied.b"]
        assert tpde.apply_delta(old, made) == 0

    def test_a_change_counts_as_one_in_place(self) -> None:
        base = words_of("F32", 66_000)
        old = self.tensor(base, "F32").requires_grad_()
        new = {"w": self.tensor(moved(base, "F32", 0.001, False), "F32")}
        made, before = self.make({"w": old}, new), old._version
        tpde.apply_delta({"w": old}, made)
        assert old._version > before
        assert old.requires_grad
        with torch.inference_mode():
            frozen = {"w": self.tensor(base, "F32")}
        assert tpde.apply_delta(frozen, made) == 1
        assert same(frozen, new)

    def test_freed_storage_is_not_resident(self) -> None:
        tensor = self.tensor(words_of("BF16", 100), "BF16")
        assert has_words(tensor)
        assert has_words(tensor[3:])
        assert not has_words(tensor[:0])
        tensor.untyped_storage().resize_(0)
        assert not has_words(tensor)

    def test_chains_of_steps(self) -> None:
        words = words_of("BF16", 66_000)
        tensors = {"w": self.tensor(words, "BF16")}
        for step in range(12):
            words = moved(words, "BF16", 0.003, step % 7 == 0, step)
            made = self.make(tensors, {"w": self.tensor(words, "BF16")}, fast=step % 2 == 1)
            tpde.apply_delta(tensors, made)
            assert np.array_equal(torch_bytes(tensors["w"]), words)

    def test_batches_of_little_room(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(device_deltas, "_ROOM", 10_000)
        old, new = self.state(0.01, False, (65_537, 66_000))
        self.apply(old, new, self.make(old, new))
