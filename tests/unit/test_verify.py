"""What `verify` compares, what it names, and what it leaves open; single files and small directories."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from support import spoilt
from support.contents import fill, rng
from support.files import pack_bytes, safetensors_bytes, saved_again

import tpde
from tpde.codec.reference import parse_header
from tpde.errors import Corrupt, InvalidInput, NotPacked
from tpde.files import copying
from tpde.files.reader import PackedFile
from tpde.files.walk import walk
from tpde.format.constants import MAGIC
from tpde.format.container import TensorSpec

SPEC = TensorSpec("BF16", (20_000,))
A, B = fill("normal", SPEC), fill("exponents", SPEC)


def files(tmp_path: Path, source: bytes, packed_of: bytes | None = None) -> tuple[Path, Path]:
    """Give a source, and what was packed of it, or of something else."""
    plain, packed = tmp_path / "plain.safetensors", tmp_path / "packed.safetensors"
    plain.write_bytes(source)
    packed.write_bytes(pack_bytes(source if packed_of is None else packed_of))
    return packed, plain


def said(tmp_path: Path, source: bytes, packed_of: bytes) -> list[str]:
    packed, plain = files(tmp_path, source, packed_of)
    return [it.message for it in tpde.verify(packed, against=plain)]


def test_a_source_is_equal_to_itself(tmp_path: Path) -> None:
    source = safetensors_bytes({"a": (SPEC, A), "b": (SPEC, B)}, {"format": "pt"})
    assert said(tmp_path, source, source) == []


def test_another_header_is_another_source(tmp_path: Path) -> None:
    one = safetensors_bytes({"a": (SPEC, A)}, {"format": "pt"})
    other = safetensors_bytes({"a": (SPEC, A)}, {"format": "np"})
    (message,) = said(tmp_path, one, other)
    assert "the source's header differs" in message


def test_a_file_that_was_saved_again_equals_what_it_unpacks_to(tmp_path: Path) -> None:
    source = safetensors_bytes({"b": (SPEC, B), "a": (SPEC, A)}, {"format": "pt"})
    packed, plain = files(tmp_path, source)
    packed.write_bytes(saved_again(packed.read_bytes()))
    (problem,) = tpde.verify(packed, against=plain)
    assert problem.message == "the source's header differs from the one that unpacking gives"
    tpde.unpack(packed, tmp_path / "back")
    assert tpde.verify(packed, against=tmp_path / "back") == []


def test_tensors_that_only_one_has_are_named(tmp_path: Path) -> None:
    one, both = safetensors_bytes({"a": (SPEC, A)}), safetensors_bytes({"a": (SPEC, A), "b": (SPEC, B)})
    assert "tensor `b` is missing from the packed file" in said(tmp_path, both, one)
    assert "tensor `b` is missing from the source file" in said(tmp_path, one, both)


def test_the_first_byte_that_differs_is_named(tmp_path: Path) -> None:
    other = bytearray(A)
    other[30_001] ^= 0x40
    other[35_000] ^= 0x40
    source = safetensors_bytes({"a": (SPEC, bytes(other))})
    (message,) = said(tmp_path, source, safetensors_bytes({"a": (SPEC, A)}))
    assert message == f"tensor `a`: byte 30001 is {A[30_001]:#04x}, but {other[30_001]:#04x} in the source"


def test_a_failed_unpack_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed, _ = files(tmp_path, safetensors_bytes({"a": (SPEC, A)}))
    before = sorted(os.listdir(tmp_path))
    for error in (KeyboardInterrupt, MemoryError):

        def fail(*_: Any, error: type[BaseException] = error) -> int:
            raise error

        monkeypatch.setattr(os, "pwritev", fail)
        with pytest.raises(error):
            tpde.unpack(packed, tmp_path / "out.safetensors")
        assert sorted(os.listdir(tmp_path)) == before


def test_a_file_that_is_refused_is_closed() -> None:
    class Source:
        name, closed = "x", 0
        data = pack_bytes(safetensors_bytes({"a": (SPEC, A)})).replace(
            b'"tpde.source_hash":"', b'"tpde.source_hash":"0'
        )

        def __init__(self) -> None:
            self.size = len(self.data)

        def read_into(self, offset: int, out: memoryview) -> None:
            out[:] = self.data[offset : offset + out.nbytes]

        def view(self, offset: int, size: int) -> None:
            return None

        def close(self) -> None:
            self.closed += 1

    made = Source()
    with pytest.raises(Corrupt):
        PackedFile(made)  # type: ignore[arg-type]
    assert made.closed == 1


def directory(tmp_path: Path) -> tuple[Path, Path]:
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    (plain / "logs").mkdir(parents=True)
    (plain / "config.json").write_text("{}")
    (plain / "logs" / "one.txt").write_text("1")
    for name, data in (("a", A), ("b", B)):
        (plain / f"{name}.safetensors").write_bytes(safetensors_bytes({name: (SPEC, data)}))
    return plain, packed


@pytest.mark.parametrize("way", spoilt.PACKED_WAYS)
def test_one_bad_shard_hides_no_other(way: str, tmp_path: Path) -> None:
    """Whatever is wrong with a shard: even one that is not opened."""
    plain, packed = directory(tmp_path)
    tpde.pack(plain, packed)
    for name in ("a", "b"):
        path = packed / f"{name}.safetensors"
        before = path.read_bytes()
        path.unlink()
        spoilt.write(path, way, before)
    found = tpde.verify(packed)
    assert {Path(it.file).name for it in found} == {"a.safetensors", "b.safetensors"}


@pytest.mark.parametrize("pattern", ["logs", "logs/", "logs/one.txt", "./logs/one.txt", "*.txt", "l*s"])
def test_exclusions_name_files_folders_and_paths(tmp_path: Path, pattern: str) -> None:
    plain, _ = directory(tmp_path)
    assert "logs/one.txt" in walk(plain).files
    tree = walk(plain, (pattern,))
    assert "logs/one.txt" not in tree.files
    assert [it.reason for it in tree.left_out] == ["excluded"]


def test_short_writes_of_a_copy_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = os.urandom(100_000)
    (tmp_path / "source").write_bytes(data)
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, piece: write(descriptor, piece[:7777]))
    copying.copy_file(tmp_path / "source", tmp_path / "target")
    copying.write_text(tmp_path / "text", "x" * 20_000, 0o600)
    assert (tmp_path / "target").read_bytes() == data
    assert (tmp_path / "text").read_text() == "x" * 20_000


@pytest.mark.parametrize("way", spoilt.PACKED_WAYS)
def test_damage_is_returned_and_what_cannot_be_judged_is_raised(way: str, tmp_path: Path) -> None:
    path = tmp_path / "packed"
    error = spoilt.write(path, way)
    if error is not Corrupt:
        with pytest.raises(error):
            tpde.verify(path)
        return
    (problem,) = tpde.verify(path)
    assert problem.file == str(path)
    assert (problem.tensor, problem.chunk) == (("w", 1) if way == "damaged" else (None, None))


@pytest.mark.parametrize("way", spoilt.WAYS)
def test_a_source_that_cannot_be_read_is_raised(way: str, tmp_path: Path) -> None:
    """The packed file is as it should be, so that there is no problem to return."""
    (tmp_path / "packed").write_bytes(spoilt.PACKED)
    error = spoilt.write(tmp_path / "plain", way, spoilt.PLAIN)
    with pytest.raises(error):
        tpde.verify(tmp_path / "packed", against=tmp_path / "plain")


def test_only_what_is_packed_is_verified(tmp_path: Path) -> None:
    plain, packed = directory(tmp_path)
    for path in (plain, plain / "a.safetensors", plain / "logs"):
        with pytest.raises(NotPacked):
            tpde.verify(path)
    tpde.pack(plain, packed)
    for one, other in ((packed, plain / "a.safetensors"), (packed / "a.safetensors", plain)):
        with pytest.raises(InvalidInput, match="compare like with like"):
            tpde.verify(one, against=other)


def test_a_model_that_was_saved_again_has_no_source(tmp_path: Path) -> None:
    plain, packed = directory(tmp_path)
    tpde.pack(plain, packed)
    (packed / "tpde_manifest.json").unlink()
    with pytest.raises(InvalidInput, match="has no source to be compared with"):
        tpde.verify(packed, against=plain)


def test_a_source_of_another_dtype_or_shape_is_told_once(tmp_path: Path) -> None:
    for spec in (TensorSpec("F16", (20_000,)), TensorSpec("BF16", (200, 100))):
        source = safetensors_bytes({"a": (spec, A), "b": (SPEC, B)})
        found = said(tmp_path, source, safetensors_bytes({"a": (SPEC, A), "b": (SPEC, B)}))
        assert found == [
            "the source's header differs from the one that unpacking gives",
            f"tensor `a` is BF16 [20000], but {spec.dtype} {list(spec.shape)} in the source",
        ]


def test_the_first_byte_that_differs_is_told_once_for_a_tensor(tmp_path: Path) -> None:
    """Also where several of its pieces differ."""
    piece = 8 << 20
    size = 3 * piece + 500
    spec = TensorSpec("U8", (size,))
    data = rng("pieces").bytes(size)
    for at in (0, piece - 1, piece, 2 * piece + 345, size - 1):
        other = bytearray(data)
        for i in {at, size - 1}:
            other[i] ^= 1
        packed_of = safetensors_bytes({"a": (spec, data), "b": (SPEC, B)})
        found = said(tmp_path, safetensors_bytes({"a": (spec, bytes(other)), "b": (SPEC, B)}), packed_of)
        assert found == [f"tensor `a`: byte {at} is {data[at]:#04x}, but {other[at]:#04x} in the source"]


def test_every_damaged_chunk_is_named(tmp_path: Path) -> None:
    packed, plain = files(tmp_path, safetensors_bytes({"a": (SPEC, A), "b": (SPEC, B)}))
    whole = packed.read_bytes()
    with PackedFile(whole) as file:
        chunks = file.tensor("a").blob.header.chunks  # type: ignore[union-attr]
        at = file.container.data_start + file.container.entries["a_tpde"].begin
        end = file.container.data_start + file.container.entries["a_tpde"].end
        blob = parse_header(whole[at:end])
    assert chunks == 3
    data = bytearray(whole)
    data[at + blob.chunks_at + 600] ^= 1
    data[at + blob.blob_bytes - 600] ^= 1
    packed.write_bytes(data)
    for against in (None, plain):
        found = tpde.verify(packed, against=against)
        assert [(it.tensor, it.chunk) for it in found] == [("a", 0), ("a", 2)]


def test_a_newer_blob_is_a_problem_of_its_tensor(tmp_path: Path) -> None:
    packed, _ = files(tmp_path, safetensors_bytes({"a": (SPEC, A), "b": (SPEC, B)}))
    data = bytearray(packed.read_bytes())
    data[data.index(MAGIC) + len(MAGIC)] = 2
    packed.write_bytes(data)
    (problem,) = tpde.verify(packed)
    assert (problem.tensor, problem.chunk) == ("a", None)
    assert "version 2" in problem.message


def test_progress_counts_the_bytes_of_the_original(tmp_path: Path) -> None:
    packed, plain = files(tmp_path, spoilt.PLAIN)
    for against in (None, plain):
        done: list[int] = []
        assert tpde.verify(packed, against=against, progress=done.append) == []
        assert sum(done) == spoilt.SPEC.nbytes + spoilt.SMALL.nbytes
