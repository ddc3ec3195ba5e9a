"""Tensor contents that have broken compressors, for every dtype, from fixed seeds."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator

import ml_dtypes
import numpy as np

from tpde.format.constants import DTYPES
from tpde.format.container import TensorSpec

FLOATS = {
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F32": np.float32,
    "C64": np.float32,
    "F64": np.float64,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
}
# Bits of the exponent, for infinities, NaN payloads and subnormals.
EXPONENT_BITS = {"F16": 5, "BF16": 8, "F32": 8, "C64": 8, "F64": 11}


def rng(*key: object) -> np.random.Generator:
    """Give a generator whose seed is the text of its key."""
    return np.random.default_rng(zlib.crc32(repr(key).encode()))


def _unsigned(dtype: str) -> type[np.unsignedinteger]:
    return {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[DTYPES[dtype].word_bytes]


def normal(dtype: str, words: int) -> bytes:
    """Give weights as they are: normal with a small deviation; small integers for other dtypes."""
    draw = rng("normal", dtype, words)
    if dtype in FLOATS:
        scale = 0.02 if DTYPES[dtype].word_bytes > 1 else 0.5
        return (draw.standard_normal(words) * scale).astype(FLOATS[dtype]).tobytes()
    return (draw.geometric(0.2, words) - 1).astype(_unsigned(dtype)).tobytes()


def random(dtype: str, words: int) -> bytes:
    """Give random bits, which no codec shrinks."""
    return rng("random", dtype, words).bytes(words * DTYPES[dtype].word_bytes)


def zeros(dtype: str, words: int) -> bytes:
    """Give nothing but zeros."""
    return bytes(words * DTYPES[dtype].word_bytes)


def constant(dtype: str, words: int) -> bytes:
    """Give one word, whose bytes differ, again and again."""
    return bytes(range(0x81, 0x81 + DTYPES[dtype].word_bytes)) * words


def nearly(dtype: str, words: int) -> bytes:
    """Give one word but for a single other one late on."""
    data = bytearray(constant(dtype, words))
    if data:
        data[len(data) * 7 // 8] ^= 0x40
    return bytes(data)


def specials(dtype: str, words: int) -> bytes:
    """Give signed zeros, subnormals, infinities and NaNs of many payloads among weights."""
    bits, kind = 8 * DTYPES[dtype].word_bytes, _unsigned(dtype)
    sign, ones = 1 << (bits - 1), (1 << bits) - 1
    mantissa = bits - 1 - EXPONENT_BITS.get(dtype, 4 if bits == 8 else bits // 2)
    inf = ones & ~sign & ~((1 << mantissa) - 1)
    values = [0, sign, 1, sign | 1, (1 << mantissa) - 1, inf, sign | inf, inf | 1, ones, ones ^ sign]
    values += [inf | 1 << (mantissa - 1), sign | inf | 1 << (mantissa - 1) | 1]
    draw = rng("specials", dtype, words)
    out = np.frombuffer(normal(dtype, words), kind).copy()
    places = draw.random(words) < 0.5
    out[places] = draw.choice(np.array(values, np.uint64), int(places.sum())).astype(kind)
    return out.tobytes()


def exponents(dtype: str, words: int) -> bytes:
    """Give every exponent equally often, all signs and mantissas."""
    bits, kind = 8 * DTYPES[dtype].word_bytes, _unsigned(dtype)
    draw = rng("exponents", dtype, words)
    low = draw.integers(0, 1 << min(bits, 63), words, np.uint64) & np.uint64((1 << max(bits - 9, 0)) - 1)
    top = np.arange(words, dtype=np.uint64) % np.uint64(256) << np.uint64(max(bits - 9, 0))
    sign = draw.integers(0, 2, words, np.uint64) << np.uint64(bits - 1)
    return (low | top | sign).astype(kind).tobytes()


def ascending(dtype: str, words: int) -> bytes:
    """Give sorted words: every chunk differs from every other."""
    return np.sort(np.frombuffer(normal(dtype, words), _unsigned(dtype))).tobytes()


def pruned(dtype: str, words: int) -> bytes:
    """Give weights of which half are zeros, later on of either sign."""
    bits, kind = 8 * DTYPES[dtype].word_bytes, _unsigned(dtype)
    draw = rng("pruned", dtype, words)
    out = np.frombuffer(normal(dtype, words), kind).copy()
    zero, signed = draw.random(words) < 0.5, np.arange(words) >= words // 2
    out[zero] = (draw.integers(0, 2, words, np.uint64) * signed << np.uint64(bits - 1)).astype(kind)[zero]
    return out.tobytes()


CONTENTS: dict[str, Callable[[str, int], bytes]] = {
    f.__name__: f for f in (normal, random, zeros, constant, nearly, specials, exponents, ascending, pruned)
}


def spec_of(dtype: str, words: int) -> TensorSpec:
    """Give a one-dimensional spec of at least this many words, in whole bytes."""
    bits, b = DTYPES[dtype].bits, DTYPES[dtype].word_bytes
    step = {4: 2, 6: 4}.get(bits, 1)
    elements = -(-words * b * 8 // (bits * step)) * step
    return TensorSpec(dtype, (elements,))


def shapes(dtype: str, chunk_words: int) -> Iterator[TensorSpec]:
    """Give scalars, empty and tiny tensors, primes, and what lies around the edges of chunks."""
    step = {4: 2, 6: 4}.get(DTYPES[dtype].bits, 1)
    if step == 1:
        yield TensorSpec(dtype, ())
    for shape in ((0,), (3, 0, 2), (step,), (1, 1, step), (17, step), (7, 11, 13 * step)):
        yield TensorSpec(dtype, shape)
    for words in (1021, chunk_words - 1, chunk_words, chunk_words + 1, 2 * chunk_words + 517):
        yield spec_of(dtype, words)


def fill(content: str, spec: TensorSpec) -> bytes:
    """Give a tensor's bytes."""
    return CONTENTS[content](spec.dtype, spec.nbytes // DTYPES[spec.dtype].word_bytes)


def fill_large(content: str, spec: TensorSpec, part: int = 1 << 20) -> bytes:
    """Give a large tensor's bytes, soon: of parts of so many words, which differ where words do."""
    b, kind = DTYPES[spec.dtype].word_bytes, _unsigned(spec.dtype)
    words, count = np.frombuffer(CONTENTS[content](spec.dtype, part), kind), spec.nbytes // (part * b)
    if words.min() == words.max():
        return words.tobytes() * count
    return b"".join((words ^ kind(number)).tobytes() for number in range(count))
