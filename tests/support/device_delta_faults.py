"""What must hold of deltas of a device where something fails: a base, bytes, memory, kernels, a writer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tpde
from support.backends import MadeBackend, MadeKernel
from support.contents import rng
from support.device_deltas import DeviceDeltas, codecs, cpu, moved, on_host, same, words_of
from support.guarded import guarded
from tpde.cuda.backend import current, launching_on
from tpde.errors import NativeError
from tpde.format.constants import DTYPES
from tpde.format.delta_head import SAME, SPARSE
from tpde.frameworks import torch_bytes, torch_dtype
from tpde.io.sources import BytesSource
from tpde.store import device_copies
from tpde.store.delta_file import DeltaFile

torch = pytest.importorskip("torch", reason="needs torch")


def _failing(call: Any, at: int, lasts: bool, monkeypatch: pytest.MonkeyPatch) -> int:
    """Let the device have no memory for the `at`th allocation, or from it on: how many there were."""
    count = 0

    def failing(real: Any) -> Any:
        def allocate(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == at or (lasts and count > at):
                raise torch.OutOfMemoryError("no memory")
            return real(*args, **kwargs)

        return allocate

    with monkeypatch.context() as patch:
        for owner, name in ((device_copies.Upload, "send"), (device_copies, "zeros"), (torch, "cat")):
            patch.setattr(owner, name, failing(getattr(owner, name)))
        call()
    return count


class DeltaFaults(DeviceDeltas):
    """The tests of what is refused, and of what goes on without the device."""

    @pytest.mark.parametrize("fast", [False, True])
    def test_what_changes_alone_is_checked_if_it_is_asked_for(
        self, fast: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        old, new = self.state(0.005, False, (66_003,))
        made, base = self.make(old, new, fast=fast), {name: it.clone() for name, it in old.items()}
        assert tpde.apply_delta(old, made, check="changed") == sum(it != SAME for it in codecs(made).values())
        assert same(old, new)
        assert tpde.apply_delta(old, made, check="changed") == 0  # whatever is read, all is as it should be
        assert same(old, new)
        file = DeltaFile(BytesSource(made, "<delta>"))
        entry = next(it for it in file.head.tensors if it.codec == SPARSE)
        name, by_class = entry.name, file.models[entry.model].classes > 1
        assert not (fast and by_class)
        differ = (base[name].view(torch.uint8) != new[name].view(torch.uint8)).view(66_003, -1).any(1)
        far = int((~differ).nonzero()[8000])
        while differ[far - 9 : far + 9].any():
            far += 1
        for place, seen in ((int(differ.nonzero()[0]), True), (far, by_class)):
            other = {name: it.clone() for name, it in base.items()}
            other[name].view(torch.uint8).view(66_003, -1)[place] ^= 3
            before = cpu(other)
            if seen:
                with pytest.raises(tpde.MissingBase, match=name):
                    tpde.apply_delta(other, made, check="changed")
                assert same(other, before)
            else:
                tpde.apply_delta(other, made, check="changed")
                now = other[name].view(torch.uint8) == new[name].view(torch.uint8)
                assert (~now.view(66_003, -1).all(1)).nonzero().tolist() == [[place]]

    def test_tied_weights_that_would_differ_are_refused(self) -> None:
        words = words_of("BF16", 66_000)
        apart = {name: self.tensor(words, "BF16") for name in "ab"}
        new = {
            name: self.tensor(moved(words, "BF16", share, False), "BF16")
            for name, share in (("a", 0.002), ("b", 0.001))
        }
        table = self.tensor(words, "BF16")
        with pytest.raises(tpde.InvalidInput, match="shares memory"):
            tpde.apply_delta({"a": table, "b": table}, self.make(apart, new))
        assert np.array_equal(torch_bytes(table), words)

    def test_another_base_is_refused_by_name(self) -> None:
        old, new = self.state(0.01, False, (66_000,))
        made = self.make(old, new)
        old["F32.66000"][123] += 1
        before, errors = cpu(old), []
        with pytest.raises(tpde.MissingBase, match=r"`F32\.66000`") as caught:
            tpde.apply_delta(old, made)
        errors.append(str(caught.value))
        with on_host(), pytest.raises(tpde.MissingBase) as caught:
            tpde.apply_delta(old, made)
        assert errors == [str(caught.value)]
        assert same(old, before)

    @pytest.mark.parametrize("fast", [False, True])
    @pytest.mark.parametrize("dtype", ["BF16", "F32", "F64", "F8_E4M3"])
    def test_damage_is_refused_as_on_the_host(
        self, dtype: str, fast: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Payloads and records that no hash gives away; nothing is written."""
        base = words_of(dtype, 70_000)
        new = {"w": self.tensor(moved(base, dtype, 0.01, False), dtype)}
        # On the CPU nothing lies behind it, so that what leads there ends the process.
        held = torch.from_numpy(guarded(base)) if self.place == "cpu" else torch.from_numpy(base).cuda()
        old = {"w": held.view(torch_dtype(dtype))}
        made, draw = self.make(old, new, fast=fast), rng("damage", dtype, fast)
        assert codecs(made) == {"w": SPARSE}
        flips: list[tuple[int, int]] = []
        records: list[tuple[str, int, int]] = []
        opened, real, read = DeltaFile.__init__, DeltaFile.payload, DeltaFile.read_payloads

        def init(self: DeltaFile, source: Any) -> None:
            opened(self, source)
            (it,) = self.head.tensors
            for name, at, more in records:
                numbers = getattr(it, name).copy()
                numbers[at % numbers.size] += more
                setattr(it, name, numbers)
            it.size += not flips

        def payload(self: DeltaFile, it: Any) -> Any:
            whole = np.zeros(it.size, np.uint8)
            whole[: it.size - (not flips)] = real(self, it)
            return flipped(whole)

        def payloads(self: DeltaFile, entries: Any, out: Any) -> None:
            read(self, entries, out[: out.size - (not flips)])
            flipped(out)

        def flipped(data: Any) -> Any:
            for at, bit in flips:
                data[at % data.size] ^= 1 << bit
            return data

        monkeypatch.setattr(DeltaFile, "__init__", init)
        monkeypatch.setattr(DeltaFile, "payload", payload)
        monkeypatch.setattr(DeltaFile, "read_payloads", payloads)
        for trial in range(40):
            flips[:] = [(int(draw.integers(1 << 30)), int(draw.integers(8))) for _ in range(1 + trial % 3)]
            change = ("changes", "sizes")[trial % 2], trial, (1, 2, 70_000)[trial % 3]
            records[:] = [change] * (trial % 5 == 4)
            if trial == 9:  # a byte that no change needs
                flips[:], records[:] = [], [("sizes", 1, 1)]
            with pytest.raises(tpde.Corrupt) as caught:
                tpde.apply_delta(old, made)
            with on_host(), pytest.raises(tpde.Corrupt) as expected:
                tpde.apply_delta(old, made)
            assert str(caught.value) == str(expected.value)
            assert np.array_equal(torch_bytes(old["w"]), base)

    def test_a_device_that_errs_is_not_believed(self) -> None:
        """One of whose kernels does nothing."""
        old, new = self.state(0.01, False, (66_000,))
        made, before = self.make(old, new), cpu(old)
        there = current()

        def kernel(source: str, name: str, *rest: Any) -> Any:
            if name == "locate":
                return MadeKernel(lambda *_, **__: lambda *_: None)
            return there.kernel(source, name, *rest)

        with (
            launching_on(MadeBackend(kernel, kind=there.kind)),
            pytest.raises(NativeError, match="another tensor"),
        ):
            tpde.apply_delta(old, made)
        assert same(old, before)

    @pytest.mark.parametrize("how", ["more", "fewer", "the same again", "the base", "all", "moved"])
    @pytest.mark.parametrize("dtype", ["BF16", "F32", "F8_E4M3"])
    def test_tensors_that_are_written_meanwhile_lead_nowhere(self, dtype: str, how: str) -> None:
        """As by a trainer's thread, between counting and coding."""
        b, count = DTYPES[dtype].word_bytes, 66_000
        base = words_of(dtype, count)
        old = {"w": self.tensor(base, dtype)}
        new = {"w": self.tensor(moved(base, dtype, 0.01, False), dtype)}
        there, coded = current(), list[str]()
        words = {name: it["w"].view(torch.uint8).view(-1, b) for name, it in (("old", old), ("new", new))}

        def kernel(source: str, name: str, *rest: Any) -> Any:
            if name == "encode" and not coded:
                coded.append(name)
                write()
            return there.kernel(source, name, *rest)

        def write() -> None:
            if how == "more":
                words["new"][::77] ^= 1
            elif how == "fewer":
                words["new"][:30_000] = words["old"][:30_000]
            elif how == "the same again":
                words["new"].copy_(words["old"])
            elif how == "the base":
                words["old"][::3] ^= 0x55
            elif how == "all":
                words["new"] ^= 0x7F
            else:
                words["new"].copy_(words["new"].roll(1, 0))

        with launching_on(MadeBackend(kernel, kind=there.kind)):
            made, found = tpde.make_delta(old, new), self.tensor(base, dtype)
        assert coded
        try:
            tpde.apply_delta({"w": found}, made)
        except (tpde.Corrupt, tpde.MissingBase):
            assert np.array_equal(torch_bytes(found), base)
        else:
            assert same({"w": found}, new)

    def test_without_memory_tensors_pass_through_the_host(self) -> None:
        old, new = self.state(0.01, False, (66_000,))
        there = current()

        def kernel(source: str, name: str, *rest: Any) -> Any:
            if name in ("encode", "decode"):
                raise torch.OutOfMemoryError("no memory")
            return there.kernel(source, name, *rest)

        with launching_on(MadeBackend(kernel, kind=there.kind)):
            self.apply(old, new, self.make(old, new))

    @pytest.mark.parametrize("lasts", [False, True])
    def test_memory_that_ends_at_any_point(self, lasts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """At each allocation that is for a delta: what is made and applied is the same."""
        words = {name: words_of("BF16", 66_000, name) for name in "abc"}
        old = {name: self.tensor(it, "BF16") for name, it in words.items()}
        new = {name: self.tensor(moved(it, "BF16", 0.01, False), "BF16") for name, it in words.items()}
        wanted = {fast: self.make(old, new, fast=fast) for fast in (False, True)}

        def apply(fast: bool, check: Any) -> Any:
            live_now = {name: it.clone() for name, it in old.items()}
            live_now["b"].copy_(new["b"])  # which is written already
            assert tpde.apply_delta(live_now, wanted[fast], check=check) == 2
            assert same(live_now, new)

        def make() -> None:
            assert tpde.make_delta(old, new) == wanted[False]

        for call, least in (
            (make, 10),
            (lambda: apply(False, "all"), 6),
            (lambda: apply(True, "changed"), 6),
        ):
            allocations = 1
            while _failing(call, allocations, lasts, monkeypatch) >= allocations:
                allocations += 1
            assert allocations > least

    def test_kernels_are_there_before_anything_is_written(self) -> None:
        old, new = self.state(0.01, False, (66_000,))
        made, before = self.make(old, new), cpu(old)
        real = current()

        def kernel(source: str, name: str, *rest: Any) -> Any:
            if name == "write":
                raise tpde.errors.CompileError("no")
            return real.kernel(source, name, *rest)

        with launching_on(MadeBackend(kernel, kind=real.kind)), pytest.raises(tpde.errors.CompileError):
            tpde.apply_delta(old, made)
        assert same(old, before)

    def test_the_first_fault_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A tensor of another base before a damaged one, and of damaged ones the first."""
        words = {name: words_of("BF16", 66_000, name) for name in "abc"}
        old = {name: self.tensor(it, "BF16") for name, it in words.items()}
        new = {name: self.tensor(moved(it, "BF16", 0.01, False), "BF16") for name, it in words.items()}
        made, real, read = self.make(old, new), DeltaFile.payload, DeltaFile.read_payloads

        def payload(self: DeltaFile, it: Any) -> Any:
            out = real(self, it)
            out[:9] ^= 0xFF
            return out

        def payloads(self: DeltaFile, entries: Any, out: Any) -> None:
            read(self, entries, out)
            at = 0
            for it in entries:
                out[at : at + 9] ^= 0xFF
                at += it.size

        monkeypatch.setattr(DeltaFile, "payload", payload)
        monkeypatch.setattr(DeltaFile, "read_payloads", payloads)
        for other, error, name in (("a", tpde.MissingBase, "a"), ("", tpde.Corrupt, "a")):
            live_now = {name: self.tensor(it, "BF16") for name, it in words.items()}
            if other:
                live_now[other] += 1
            with pytest.raises(error, match=f"`{name}`"):
                tpde.apply_delta(live_now, made)
