"""Budgets as users name them."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpde.errors import InvalidInput
from tpde.planning.budget import ACTIVATIONS, MAX_BATCH, MAX_TOKENS, Budget, parse_budget

GIB = 1 << 30


def test_budgets() -> None:
    assert parse_budget(None) is None
    assert parse_budget("16GiB") == Budget(16 * GIB, None, MAX_TOKENS, ACTIVATIONS, MAX_BATCH)
    assert parse_budget(1 << 20) == Budget(1 << 20, None, 8192, GIB, 8), "as documented"
    assert parse_budget("4096B", "1GiB", 7, "2GiB", 3) == Budget(4096, GIB, 7, 2 * GIB, 3)


@pytest.mark.parametrize("name", ["vram", "ram", "activations"])
@pytest.mark.parametrize(
    ("size", "meant"),
    [
        (8, "8GiB"),
        ("8", "8GiB"),
        (" 0.5 ", "0.5GiB"),
        (1.5, "1.5GiB"),
        ("16000", "16000MiB"),
        ((1 << 20) - 1, "MiB"),
    ],
)
def test_a_number_alone_is_no_size_of_a_memory(name: str, size: Any, meant: str) -> None:
    with pytest.raises(InvalidInput, match=f"`{name}` is .* bytes; did you mean `[0-9.]*{meant}`") as caught:
        parse_budget(**{"vram": "1GiB"} | {name: size})
    assert (caught.value.where, caught.value.found) == (name, size)


@pytest.mark.parametrize(
    ("given_", "says"),
    [
        ({"ram": "1GiB"}, "`ram` is a part of a budget of GPU memory; pass `vram` as well"),
        ({"max_tokens": 7}, "`max_tokens` is a part of a budget"),
        ({"activations": "1GiB"}, "`activations` is a part of a budget"),
        ({"max_batch": 2}, "`max_batch` is a part of a budget"),
        ({"vram": "1GiB", "max_batch": 0}, "at least one sequence"),
        ({"vram": "1GiB", "max_batch": 2.0}, "`max_batch` is 2.0; give a whole number"),
        ({"vram": "lots"}, "`lots` is no size"),
        ({"vram": 0}, "above zero"),
        ({"vram": -1}, "above zero"),
        ({"vram": True}, "is no size"),
        ({"vram": 1.5}, "did you mean `1.5GiB`"),
        ({"vram": float("inf")}, "is no size"),
        ({"vram": "1GiB", "ram": "16G"}, "`16GiB` or `16GB`"),
        ({"vram": "1GiB", "activations": "some"}, "`some` is no size"),
        ({"vram": "1GiB", "max_tokens": 0}, "at least one token"),
        ({"vram": "1GiB", "max_tokens": -5}, "at least one token"),
        ({"vram": "1GiB", "max_tokens": 1.5}, "a whole number"),
        ({"vram": "1GiB", "max_tokens": "7"}, "a whole number"),
        ({"vram": "1GiB", "max_tokens": True}, "a whole number"),
    ],
)
def test_what_is_no_budget(given_: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        parse_budget(**{"vram": None} | given_)


ANYTHING = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12) | st.binary(max_size=4)
)


@given(vram=ANYTHING, ram=ANYTHING, max_tokens=ANYTHING, activations=ANYTHING, max_batch=ANYTHING)
def test_anything_is_a_budget_or_refused(
    vram: Any, ram: Any, max_tokens: Any, activations: Any, max_batch: Any
) -> None:
    try:
        made = parse_budget(vram, ram, max_tokens, activations, max_batch)
    except InvalidInput:
        return
    assert made is None or all(
        type(it) is int and it > 0
        for it in (made.vram, made.ram or 1, made.max_tokens, made.activations, made.max_batch)
    )


def test_budgets_import_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, tpde.planning.budget; "
        "assert not {'torch', 'cuda', 'numpy'} & {name.partition('.')[0] for name in sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
