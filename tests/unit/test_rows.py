"""Rows of packed matrices, constants, and decoders of weights that lie together, on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from support.models import assert_same_bits  # noqa: E402

from tpde.codec.blob import digest, write_constant  # noqa: E402
from tpde.errors import InvalidInput  # noqa: E402
from tpde.format.container import TensorSpec  # noqa: E402
from tpde.format.sink import BytesSink  # noqa: E402
from tpde.nn import pack_tensor  # noqa: E402
from tpde.weights.decoder import Materializer, repeat  # noqa: E402
from tpde.weights.resident import Resident  # noqa: E402
from tpde.weights.rows import RowReader  # noqa: E402

ROWS, COLUMNS = 3000, 48
WEIGHT = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)


@pytest.fixture(scope="module")
def source() -> Any:
    made = pack_tensor(WEIGHT, "w")
    assert made is not None
    return made.sources[0]


@pytest.mark.parametrize("bad", [-1, ROWS, ROWS + 1, 1 << 40])
def test_rows_that_are_not_there_are_refused(source: Any, bad: int) -> None:
    reader = RowReader(source)
    assert_same_bits(reader(torch.tensor([0, ROWS - 1])), WEIGHT[[0, ROWS - 1]])
    with pytest.raises(IndexError, match=f"row {bad} of `w`, which has {ROWS}"):
        reader(torch.tensor([0, bad, 5]))


def test_only_chunks_that_hold_rows_are_decoded(source: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first and the last row, and two neighbours: not what lies between."""
    asked: list[tuple[int, int]] = []
    real = type(source).decode_on_host

    def noted(self: Any, begin: int, end: int, out: Any) -> None:
        asked.append((begin // (2 * COLUMNS), end // (2 * COLUMNS)))
        real(self, begin, end, out)

    monkeypatch.setattr(type(source), "decode_on_host", noted)
    ids = torch.tensor([ROWS - 1, 0, 1500, 1501, 0])
    assert_same_bits(RowReader(source)(ids), WEIGHT[ids])
    assert asked == [(0, 1), (1500, 1502), (ROWS - 1, ROWS)]


@pytest.mark.parametrize("dtype", ["BF16", "F32", "I64", "U8", "F64"])
def test_constants_are_filled_with_all_of_their_bits(dtype: str) -> None:
    """The first one is set, which is a sign for PyTorch's integers."""
    size = {"BF16": 2, "F32": 4, "I64": 8, "U8": 1, "F64": 8}[dtype]
    word = bytes(range(0xF1, 0xF1 + size))
    spec = TensorSpec(dtype, (16, 32))
    sink = BytesSink()
    count = write_constant(spec, word, digest(word * 512), sink, 0)
    source = Resident(torch.frombuffer(bytearray(sink.data[:count]), dtype=torch.uint8), "c")
    out = torch.zeros(spec.nbytes, dtype=torch.uint8)
    repeat(source, out)
    assert out.numpy().tobytes() == word * 512
    rows = RowReader(source)(torch.tensor([3, 1]))
    assert rows.view(torch.uint8).numpy().tobytes() == word * 64
    with pytest.raises(IndexError, match="row 16"):
        RowReader(source)(torch.tensor([16]))


def test_weights_that_are_decoded_together_are_on_one_device(source: Any) -> None:
    for device in (torch.device("cpu", 0), torch.device("meta")):
        with pytest.raises(InvalidInput, match="`w` is on cpu, the weights decoded with it on"):
            Materializer([(source, 0)], device)
    out = torch.zeros(2 * source.nbytes, dtype=torch.uint8)
    Materializer([(source, source.nbytes), (source, 0)], torch.device("cpu"))(out)
    assert np.array_equal(
        out.numpy().view(np.uint16), np.tile(WEIGHT.view(torch.int16).numpy().view(np.uint16).ravel(), 2)
    )
