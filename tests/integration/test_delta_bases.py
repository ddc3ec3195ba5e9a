"""A delta applies to its base alone: any other is refused by the name of a tensor."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support import spoilt
from support.contents import fill, spec_of
from support.delta_files import NEW, OLD, SMALL, file_delta, makers, weight_folder
from support.files import safetensors_bytes
from support.states import content, files

from tpde.errors import Corrupt, MissingBase
from tpde.files.reader import PackedFile
from tpde.format.container import TensorSpec
from tpde.store.diffing import diff
from tpde.store.patching import patch
from tpde.store.verify_delta import verify_delta


@makers
def test_another_base_is_refused_by_name(make, tmp_path: Path) -> None:
    base, target = make(tmp_path)
    diff(base, target, tmp_path / "delta")
    with pytest.raises(MissingBase, match="tensor `"):
        patch(target, tmp_path / "delta", tmp_path / "out")
    file = base if base.is_file() else base / "model-1.safetensors"
    data = bytearray(file.read_bytes())
    with PackedFile(file) as opened:
        data[opened.container.data_start + opened.container.entries["layers.1.half"].begin] ^= 1
    file.write_bytes(data)
    with pytest.raises(MissingBase, match="fingerprint") as caught:
        patch(base, tmp_path / "delta", tmp_path / "out")
    assert caught.value.where == "layers.1.half"
    assert not (tmp_path / "out").exists()
    problems = verify_delta(tmp_path / "delta", base=base)
    assert [it.tensor for it in problems] == [caught.value.where]
    assert problems[0].message == caught.value.message, "without the hint, which all would repeat"


def test_every_tensor_of_the_base_is_checked_also_those_that_stay(tmp_path: Path) -> None:
    base, target = files(tmp_path)
    report = diff(base, target, tmp_path / "delta")
    whole = base.read_bytes()
    with PackedFile(base) as opened:
        entries, start = opened.container.entries, opened.container.data_start
    seen = set()
    for it in report.tensors:
        if it.codec in ("same", "sparse", "dense") and it.bytes:
            data = bytearray(whole)
            data[start + entries[it.name].begin] ^= 1
            base.write_bytes(data)
            with pytest.raises(MissingBase, match="fingerprint") as caught:
                patch(base, tmp_path / "delta", tmp_path / "out")
            assert caught.value.where == it.name
            seen.add(it.codec)
    assert seen == {"same", "sparse", "dense"}


def test_a_base_of_another_shape_or_without_a_tensor_is_refused(tmp_path: Path) -> None:
    spec = spec_of("BF16", 800)
    states = [np.frombuffer(fill("normal", spec), np.uint16), None]
    states[1] = np.where(np.arange(800) % 50, states[0], states[0] + 1).astype(np.uint16)
    for name, words in zip(("base", "target"), states, strict=True):
        (tmp_path / name).write_bytes(safetensors_bytes({"w": (spec, words.tobytes())}, {}))
    diff(tmp_path / "base", tmp_path / "target", tmp_path / "delta")
    for other, tensor in (("x", spec), ("w", spec_of("F16", 800)), ("w", spec_of("BF16", 801))):
        data = fill("zeros", tensor)
        (tmp_path / "wrong").write_bytes(safetensors_bytes({other: (tensor, data)}, {}))
        with pytest.raises(MissingBase, match="tensor `w`"):
            patch(tmp_path / "wrong", tmp_path / "delta", tmp_path / "out")


def test_a_header_written_otherwise_is_no_base_for_a_file_that_shares_it(tmp_path: Path) -> None:
    spec = spec_of("BF16", 800)
    data = fill("normal", spec)
    one, other = (
        safetensors_bytes({"w": (spec, data)}, {"a": "1"}),
        safetensors_bytes({"w": (spec, data)}, {}),
    )
    for name, state in (("base", one), ("target", one), ("wrong", other)):
        (tmp_path / name).write_bytes(state)
    diff(tmp_path / "base", tmp_path / "target", tmp_path / "delta")
    with pytest.raises(MissingBase, match="header"):
        patch(tmp_path / "wrong", tmp_path / "delta", tmp_path / "out")


def test_a_tensor_that_moved_has_its_base_in_the_other_file(tmp_path: Path) -> None:
    base = weight_folder(
        tmp_path / "base", {"1.safetensors": {"w": OLD, "a": OLD}, "2.safetensors": {"b": OLD}}
    )
    target = weight_folder(
        tmp_path / "target", {"1.safetensors": {"a": OLD}, "2.safetensors": {"b": OLD, "w": NEW}}
    )
    report = diff(base, target, tmp_path / "delta")
    assert [(it.name, it.codec) for it in report.tensors] == [("a", "same"), ("b", "same"), ("w", "sparse")]
    patch(base, tmp_path / "delta", tmp_path / "out")
    assert content(tmp_path / "out") == content(target)


def test_a_tensor_of_a_name_that_two_other_files_have_has_no_base(tmp_path: Path) -> None:
    base = weight_folder(tmp_path / "base", {"1.safetensors": {"w": OLD}, "2.safetensors": {"w": OLD}})
    target = weight_folder(tmp_path / "target", {"2.safetensors": {"w": NEW}, "3.safetensors": {"w": OLD}})
    report = diff(base, target, tmp_path / "delta")
    assert [(it.file, it.codec) for it in report.tensors] == [
        ("2.safetensors", "sparse"),
        ("3.safetensors", "plain"),
    ]
    patch(base, tmp_path / "delta", tmp_path / "out")
    assert content(tmp_path / "out") == content(target)


def test_a_base_that_has_a_moved_tensor_twice_is_refused(tmp_path: Path) -> None:
    """It need not be the one that was meant."""
    base = weight_folder(tmp_path / "base", {"1.safetensors": {"w": OLD}})
    target = weight_folder(tmp_path / "target", {"3.safetensors": {"w": NEW}})
    assert diff(base, target, tmp_path / "delta").tensors[0].codec == "sparse"
    weight_folder(base, {"2.safetensors": {"w": OLD}})
    with pytest.raises(MissingBase, match="tensor `w` is not in the base"):
        patch(base, tmp_path / "delta", tmp_path / "out")


def test_a_base_of_another_dtype_says_both(tmp_path: Path) -> None:
    base = weight_folder(tmp_path / "base", {"1.safetensors": {"w": OLD}})
    target = weight_folder(tmp_path / "target", {"1.safetensors": {"w": NEW}})
    diff(base, target, tmp_path / "delta")
    other = TensorSpec("F16", (600,))
    (base / "1.safetensors").write_bytes(safetensors_bytes({"w": (other, OLD.tobytes())}))
    with pytest.raises(MissingBase, match=r"`w` is F16 \[600\].*needs BF16 \[600\]") as caught:
        patch(base, tmp_path / "delta", tmp_path / "out")
    assert (caught.value.where, caught.value.found, caught.value.needed) == ("w", other, SMALL)


def test_a_base_without_a_file_whose_header_it_shares_is_refused_by_name(tmp_path: Path) -> None:
    base = weight_folder(tmp_path / "base", {"1.safetensors": {"w": OLD}, "2.safetensors": {}})
    target = weight_folder(tmp_path / "target", {"1.safetensors": {"w": NEW}, "2.safetensors": {}})
    diff(base, target, tmp_path / "delta")
    (base / "2.safetensors").unlink()
    with pytest.raises(MissingBase, match=r"`2\.safetensors` is not in the base") as caught:
        patch(base, tmp_path / "delta", tmp_path / "out")
    assert caught.value.where == "2.safetensors"


def test_a_tensor_of_a_packed_state_that_lies_there_plain_is_checked(tmp_path: Path) -> None:
    """Its chunks have no checksums; its hash is in the metadata."""
    base, target = file_delta(tmp_path)
    packed = bytearray(spoilt.PACKED)
    with PackedFile(spoilt.PACKED) as file:
        entry = file.container.entries["few"]
        packed[file.container.data_start + entry.begin] ^= 1
    (tmp_path / "packed").write_bytes(packed)
    for call in (
        lambda: diff(tmp_path / "packed", target, tmp_path / "out"),
        lambda: diff(base, tmp_path / "packed", tmp_path / "out"),
        lambda: patch(tmp_path / "packed", tmp_path / "delta", tmp_path / "out"),
    ):
        with pytest.raises(Corrupt, match="`few`"):
            call()
