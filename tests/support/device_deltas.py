"""What must hold of deltas that a device makes and applies, whether that is a GPU or stands for one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import tpde
from support.backends import MadeBackend, MadeKernel, NotingBackend
from support.contents import rng
from support.guarded import guarded
from tpde.codec import fingerprints
from tpde.cuda.backend import current, launching_on
from tpde.errors import NativeError
from tpde.format.constants import DTYPES
from tpde.format.delta_head import SAME, SPARSE
from tpde.frameworks import has_words, torch_bytes, torch_dtype
from tpde.io.sources import BytesSource
from tpde.store import (
    device_copies,
    device_deltas,
)
from tpde.store.delta_file import DeltaFile

torch = pytest.importorskip("torch", reason="needs torch")

Tensors = dict[str, Any]

KINDS = ("BF16", "F16", "F32", "F64", "F8_E4M3", "U8", "I16", "I32", "I64", "BOOL")


def words_of(dtype: str, words: int, *seed: Any) -> np.ndarray:
    """Words whose symbols spread as weights' do."""
    draw, b = rng("delta", dtype, words, *seed), DTYPES[dtype].word_bytes
    if dtype in ("F32", "F64", "F16"):
        return (draw.standard_normal(words) * 0.02).astype(f"f{b}").view(np.uint8)
    if dtype == "BF16":
        floats = draw.standard_normal(words).astype(np.float32)
        return (floats.view(np.uint32) >> 16).astype("<u2").view(np.uint8)
    return draw.integers(0, 2 if dtype == "BOOL" else 256, words * b).astype(np.uint8)


def moved(base: np.ndarray, dtype: str, share: float, far: bool, *seed: Any) -> np.ndarray:
    """Some words moved: by a little, or to anything."""
    draw, b = rng("change", dtype, base.size, share, far, *seed), DTYPES[dtype].word_bytes
    target = base.copy().view(f"<u{b}")
    at = np.flatnonzero(draw.random(target.size) < share)
    if dtype == "BOOL":
        target[at] ^= 1
    elif far:
        target[at] = draw.integers(0, 256, at.size * b).astype(np.uint8).view(target.dtype)
    else:
        target[at] += draw.integers(-3, 4, at.size).astype(f"<i{b}").view(target.dtype)
    return target.view(np.uint8)


def cpu(tensors: Tensors) -> Tensors:
    return {name: it.to("cpu", copy=True) for name, it in tensors.items()}


def same(one: Tensors, other: Tensors) -> bool:
    return all(np.array_equal(torch_bytes(one[name]), torch_bytes(other[name])) for name in other)


def codecs(data: bytes) -> dict[str, str]:
    return {it.name: it.codec for it in DeltaFile(BytesSource(data, "<delta>")).head.tensors}


@contextmanager
def on_host() -> Iterator[None]:
    """Nothing is resident: no kernel runs."""
    with launching_on(MadeBackend(kind="none")):
        yield


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


class DeviceDeltas:
    """The tests, of tensors that lie at `place`."""

    place: str
    sizes: tuple[int, ...]

    def tensor(self, data: np.ndarray, dtype: str, offset: int = 0) -> Any:
        """A tensor on the device, so many elements from where its memory begins."""
        kind = torch_dtype(dtype)
        room = torch.zeros(data.size + offset * kind.itemsize, dtype=torch.uint8, device=self.place)
        room[offset * kind.itemsize :] = torch.from_numpy(data.copy()).to(self.place)
        return room.view(kind)[offset:]

    def state(
        self, share: float, far: bool, sizes: tuple[int, ...] = (), offset: int = 0
    ) -> tuple[Tensors, Tensors]:
        """Tensors of all kinds and sizes, and what became of them."""
        old, new = {}, {}
        for dtype in KINDS:
            for size in sizes or self.sizes:
                base = words_of(dtype, size)
                old[f"{dtype}.{size}"] = self.tensor(base, dtype, offset)
                new[f"{dtype}.{size}"] = self.tensor(moved(base, dtype, share, far), dtype, offset)
        return old, new

    def make(self, old: Tensors, new: Tensors, **options: Any) -> bytes:
        """Make a delta on the device; on the host it is the same."""
        made = tpde.make_delta(old, new, **options)
        with on_host():
            assert made == tpde.make_delta(cpu(old), cpu(new), **options)
        return made

    def apply(self, old: Tensors, new: Tensors, made: bytes) -> None:
        """Apply a delta on the device, and again."""
        assert tpde.apply_delta(old, made) == sum(codec != SAME for codec in codecs(made).values())
        assert same(old, new)
        assert tpde.apply_delta(old, made) == 0

    @pytest.mark.parametrize("fast", [False, True])
    @pytest.mark.parametrize(
        ("share", "far"),
        [(0, False), (0.0001, True), (0.005, False), (0.02, True), (0.1, False), (0.6, False)],
    )
    def test_every_kind_of_words(self, share: float, far: bool, fast: bool) -> None:
        old, new = self.state(share, far, (5, 3000, 9999) if share > 0.5 else ())
        self.apply(old, new, self.make(old, new, fast=fast))

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
