"""Attacks on the container (docs/reference/attacks.md, A1 to A17)."""

from __future__ import annotations

import base64
import json
import struct

import pytest
import xxhash
import zstandard
from support.contents import fill, spec_of
from support.craft import bounded, constant_blob, prefix_blob
from support.files import container, pack_bytes, safetensors_bytes, unpack_bytes, verify_bytes

from tpde.errors import (
    AlreadyPacked,
    Corrupt,
    NotSafetensors,
    TpdeError,
    Truncated,
    UnsupportedDtype,
    UnsupportedVersion,
)
from tpde.files.file_writer import FileWriter
from tpde.files.inputs import open_source
from tpde.files.reader import PackedFile
from tpde.format.constants import MAX_CONTAINER_HEADER
from tpde.format.container import TensorSpec
from tpde.io.sinks import BytesSink


def _entry(**changes: object) -> dict[str, object]:
    return {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]} | changes


def _open(header: object, data: bytes = bytes(8)) -> PackedFile:
    return PackedFile(container(header, data))


def _packed(tensors: dict[str, TensorSpec] | None = None) -> tuple[dict[str, object], bytes]:
    """Give the header, as a value, and the data of a packed file."""
    specs = tensors or {"a.weight": spec_of("BF16", 2000), "b": TensorSpec("U8", (3, 5))}
    packed = pack_bytes(safetensors_bytes({n: (s, fill("normal", s)) for n, s in specs.items()}))
    size = struct.unpack("<Q", packed[:8])[0]
    return json.loads(packed[8 : 8 + size]), packed[8 + size :]


def _with_source(header: object) -> PackedFile:
    """Open a packed file whose source's header is another, with a hash that fits it."""
    outer, data = _packed()
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    frame = zstandard.ZstdCompressor(write_content_size=True).compress(text)
    outer["__metadata__"] |= {  # type: ignore[operator]
        "tpde.source": base64.b64encode(frame).decode(),
        "tpde.source_hash": xxhash.xxh3_128_hexdigest(text),
    }
    return _open(outer, data)


@pytest.mark.parametrize("size", [MAX_CONTAINER_HEADER + 1, 1 << 40, (1 << 63) - 1, (1 << 64) - 1])
def test_a01_header_length_above_the_limit(size: int) -> None:
    with bounded(1), pytest.raises(NotSafetensors, match="at most 100000000"):
        PackedFile(size.to_bytes(8, "little") + b"{}" + bytes(100))
    with bounded(1), pytest.raises(Truncated):
        PackedFile(MAX_CONTAINER_HEADER.to_bytes(8, "little") + b"{}" + bytes(100))


@pytest.mark.parametrize(
    "shape",
    [
        [1 << 60],
        [1 << 32, 1 << 32],
        [(1 << 61) + 1],
        [1 << 63, 2],
        [10**4000],
        [2] * 65,
        [1 << 20] * 64,
        [1 << 64],
    ],
)
def test_a02_huge_shapes(shape: list[int]) -> None:
    with bounded(1), pytest.raises(Corrupt, match="`x`") as caught:
        _open({"x": _entry(shape=shape)})
    assert caught.value.tensor == "x"


def test_a03_names_that_occur_twice() -> None:
    entry = json.dumps(_entry())
    for header in (
        f'{{"x":{entry},"x":{entry}}}',
        f'{{"x":{entry},"\\u0078":{entry}}}',
        f'{{"__metadata__":{{}},"__metadata__":{{}},"x":{entry}}}',
        '{"x":{"dtype":"U8","shape":[8],"shape":[4],"data_offsets":[0,8]}}',
        f'{{"__metadata__":{{"a":"1","a":"2"}},"x":{entry}}}',
    ):
        with pytest.raises(NotSafetensors, match="twice"):
            _open(header.encode())


@pytest.mark.parametrize("opening", ["[", '{"a":', '{"x":{"dtype":['])
def test_a04_deep_nesting(opening: str) -> None:
    with pytest.raises(NotSafetensors):
        _open((opening * 200_000).encode())
    with pytest.raises(NotSafetensors):
        _with_source((opening * 200_000).encode())


@pytest.mark.parametrize("value", [1, "x", ["a"], [], "", 0, False, {"a": 1}, {"a": None}, {"a": {"b": "c"}}])
def test_a05_metadata_that_is_not_texts(value: object) -> None:
    with pytest.raises(Corrupt, match="__metadata__"):
        _open({"__metadata__": value, "x": _entry()})


@pytest.mark.parametrize(
    "number", ["NaN", "Infinity", "-Infinity", "-1", "8.0", "8e0", "true", "null", '"8"', "[8]", "1e999"]
)
def test_a06_numbers_that_are_not_sizes(number: str) -> None:
    for entry in (
        f'{{"dtype":"U8","shape":[8],"data_offsets":[0,{number}]}}',
        f'{{"dtype":"U8","shape":[8],"data_offsets":[{number},8]}}',
        f'{{"dtype":"U8","shape":[{number}],"data_offsets":[0,8]}}',
    ):
        with pytest.raises(Corrupt, match="`x`") as caught:
            _open(f'{{"x":{entry}}}'.encode())
        assert caught.value.tensor == "x"
    # Nor where what Python takes them for would fit.
    for zero, one in (("false", "true"), ("0.0", "1.0"), ("-0.0", "1e0")):
        for shape, begin, end in ((one, 0, 1), (1, 0, one), (1, zero, 1)):
            entry = f'{{"dtype":"U8","shape":[{shape}],"data_offsets":[{begin},{end}]}}'
            with pytest.raises(Corrupt, match="`x`"):
                _open(f'{{"x":{entry}}}'.encode(), bytes(1))
    with pytest.raises(NotSafetensors):
        _open(b'{"x":{"dtype":"U8","shape":[8],"data_offsets":[0,' + b"9" * 5000 + b"]}}")


@pytest.mark.parametrize(
    ("offsets", "data"),
    [
        (([0, 8], [4, 12]), 12),
        (([0, 8], [0, 8]), 8),
        (([0, 8], [9, 17]), 17),
        (([1, 9], [9, 17]), 17),
        (([8, 0], [8, 16]), 16),
        (([0, 8], [8, 16]), 17),
    ],
    ids=["overlap", "same", "gap", "gap at the start", "descending", "bytes after the end"],
)
def test_a07_gaps_and_overlaps(offsets: tuple[list[int], list[int]], data: int) -> None:
    with pytest.raises(Corrupt):
        _open({"x": _entry(data_offsets=offsets[0]), "y": _entry(data_offsets=offsets[1])}, bytes(data))


def test_a08_names_that_are_not_unicode() -> None:
    entry = json.dumps(_entry())
    for name in ("\\ud800", "\\udfff.weight", "a\\ud83d"):
        with pytest.raises(TpdeError):
            _open(f'{{"{name}":{entry}}}'.encode())
        with pytest.raises(TpdeError):
            _open(f'{{"__metadata__":{{"tpde":"{name}"}},"x":{entry}}}'.encode())
    with pytest.raises(NotSafetensors):
        _open(b'{"\xff":' + entry.encode() + b"}")


def test_a09_a_tensor_both_plain_and_packed() -> None:
    blob = prefix_blob()
    where = {"dtype": "U8", "shape": [len(blob)], "data_offsets": [8, 8 + len(blob)]}
    with pytest.raises(Corrupt, match="both plain and packed") as caught:
        _open({"x": _entry(), "x_tpde": where}, bytes(8) + blob)
    assert caught.value.tensor == "x"


def test_a10_a_source_header_of_another_file() -> None:
    right = {
        "a.weight": {"dtype": "BF16", "shape": [2000], "data_offsets": [0, 4000]},
        "b": {"dtype": "U8", "shape": [3, 5], "data_offsets": [4000, 4015]},
    }
    with _with_source(right) as file:
        assert set(file.specs) == {"a.weight", "b"}
    for change in (
        {"a.weight": right["a.weight"] | {"dtype": "F16"}},
        {"a.weight": right["a.weight"] | {"shape": [20, 100]}},
        {"b": right["b"] | {"shape": [15]}},
        {"b": right["b"] | {"dtype": "I8"}},
        {"b": right["b"] | {"data_offsets": [4001, 4016]}},
        {"c": {"dtype": "U8", "shape": [0], "data_offsets": [4015, 4015]}},
    ):
        with pytest.raises(Corrupt), _with_source(right | change) as file:
            file.read("a.weight")
    with pytest.raises(Corrupt, match=r"missing|not in the source"):
        _with_source({"a.weight": right["a.weight"]})
    with pytest.raises(Corrupt, match=r"missing|not in the source"):
        _with_source({"a.weights": right["a.weight"], "b": right["b"]})


def _frame(content_size: int, blocks: bytes) -> bytes:
    """Give a zstd frame with a content size of 8 bytes that may lie."""
    return b"\x28\xb5\x2f\xfd\xe0" + content_size.to_bytes(8, "little") + blocks


def test_a11_bombs_in_the_source_header() -> None:
    outer, data = _packed()
    meta = dict(outer["__metadata__"])  # type: ignore[call-overload]
    bomb = b"".join(((1 << 20) << 3 | 2 | (i == 99)).to_bytes(3, "little") + b" " for i in range(100))
    frames = [
        _frame(1 << 62, b""),
        _frame(MAX_CONTAINER_HEADER + 1, bomb),
        _frame(2, bomb),  # claims two bytes, holds 100 MiB
        zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1000)),
        b"",
        b"{}",
    ]
    texts = [base64.b64encode(frame).decode() for frame in frames]
    for text in [*texts, "?", "é", meta["tpde.source"][:-5], meta["tpde.source"] + "!"]:
        outer["__metadata__"] = meta | {"tpde.source": text}
        with bounded(8), pytest.raises(Corrupt, match="source's header"):
            _open(outer, data)
    honest = b'{"x":[' + b"{}," * (2 << 20) + b"0]}"  # it holds what it claims: some kB, but parsed 400 MB
    text = base64.b64encode(zstandard.compress(honest)).decode()
    outer["__metadata__"] = meta | {
        "tpde.source": text,
        "tpde.source_hash": xxhash.xxh3_128_hexdigest(honest),
    }
    with bounded(16), pytest.raises(Corrupt, match="far larger than that of the packed file"):
        _open(outer, data)
    for change in ({"tpde.source_hash": "0" * 32}, {"tpde.source_hash": ""}):
        outer["__metadata__"] = meta | change
        with pytest.raises(Corrupt, match="source's header"):
            _open(outer, data)
    for key in ("tpde.source", "tpde.source_hash"):
        outer["__metadata__"] = {k: v for k, v in meta.items() if k != key}
        with pytest.raises(Corrupt, match="source's header"):
            _open(outer, data)


def test_a12_tensors_named_like_blobs() -> None:
    spec = spec_of("BF16", 2000)
    names = ["a", "a_tpde", "a_tpde_tpde", "_tpde", "b_tpde_tpde", "c"]
    source = safetensors_bytes({n: (spec, fill("normal", spec)) for n in names})
    packed = pack_bytes(source)
    with PackedFile(packed) as file:
        assert file.packed_names() == ["c"]
    assert unpack_bytes(packed) == source


def test_a13_a_source_with_a_tensor_that_is_a_blob(tmp_path) -> None:
    blob = constant_blob()
    tensor = {"x_tpde": (TensorSpec("U8", (len(blob),)), blob)}
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors_bytes(tensor))
    with pytest.raises(AlreadyPacked):
        open_source(path)
    # The writer, given such bytes under such a name, must not write what reads as something else.
    sink = BytesSink()
    with FileWriter(sink, {n: s for n, (s, _) in tensor.items()}) as writer:
        writer.write("x_tpde", blob)
    with PackedFile(bytes(sink.data)) as file:
        assert file.packed_names() == []
        assert file.read("x_tpde").tobytes() == blob


@pytest.mark.parametrize("dtype", ["F128", "", "bf16", "__metadata__", "F8_E4M3\x00", None, 16, ["U8"]])
def test_a14_dtypes_that_are_not_known(dtype: object) -> None:
    with pytest.raises(UnsupportedDtype, match="`x`"):
        _open({"x": _entry(dtype=dtype)})


@pytest.mark.parametrize("version", ["0", "2", "01", " 1", "1.0", "", "9" * 10_000])
def test_a15_versions_that_are_not_known(version: str) -> None:
    with pytest.raises(UnsupportedVersion) as caught:
        _open({"__metadata__": {"tpde": version}, "x": _entry()})
    assert len(str(caught.value)) < 500


def test_a16_hashes_of_plain_tensors() -> None:
    outer, data = _packed()
    meta = dict(outer["__metadata__"])  # type: ignore[call-overload]
    digits = meta["tpde.plain"]
    for text in ("", digits[:-1], digits * 2, digits[:-1] + "g", digits[:-2] + " 1", "\u0661" * len(digits)):
        outer["__metadata__"] = meta | {"tpde.plain": text}
        with pytest.raises(Corrupt, match=r"tpde\.plain"):
            _open(outer, data)
    outer["__metadata__"] = {key: value for key, value in meta.items() if key != "tpde.plain"}
    with pytest.raises(Corrupt, match=r"`tpde\.plain` is missing"):
        _open(outer, data)
    with _open(*_packed({"a.weight": spec_of("BF16", 2000)})) as file:  # nothing is plain
        assert "tpde.plain" not in file.container.metadata
    outer["__metadata__"] = meta | {"tpde.plain": digits[::-1]}
    assert [p.tensor for p in verify_bytes(container(outer, data))] == ["b"]
    with pytest.raises(Corrupt) as caught:
        unpack_bytes(container(outer, data))
    assert caught.value.tensor == "b"


@pytest.mark.parametrize(
    "name", ["²", "x.٣.y", "1" * 5000, "layers." + "9" * 5000 + ".w", "", "\x00", "../../x"]
)
def test_a17_names_that_look_like_numbers_or_paths(name: str) -> None:
    spec = spec_of("BF16", 1000)
    source = safetensors_bytes({name: (spec, fill("normal", spec)), "a": (spec, fill("random", spec))})
    packed = pack_bytes(source)
    assert unpack_bytes(packed) == source
    assert verify_bytes(packed) == []
