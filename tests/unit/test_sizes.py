"""Sizes as users write them, and as they are written for users."""

import pytest

from tpde.errors import InvalidInput
from tpde.planning.layout import MIB
from tpde.planning.sizes import mib, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("16GiB", 16 << 30),
        ("16 GB", 16 * 10**9),
        ("1.5MiB", 3 << 19),
        (" 512 kib ", 512 << 10),
        ("4096", 4096),
        (4096, 4096),
        ("2TiB", 2 << 40),
        ("7 B", 7),
        (1, 1),
        ("3kB", 3000),
        ("3MB", 3 * 10**6),
        ("3KiB", 3 << 10),
        ("3TB", 3 * 10**12),
        (".5 GiB", 1 << 29),
        ("1.GiB", 1 << 30),
        ("0.0015 kB", 1),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("16G", "`16GiB` or `16GB`"),
        ("lots", "such as `16GiB`"),
        ("", "such as `16GiB`"),
        ("-1GiB", "such as `16GiB`"),
        ("0GiB", "above zero"),
        (0, "above zero"),
        (-1, "above zero"),
        ("0.5", "above zero"),
        (1.0, "such as `16GiB`"),
        (None, "such as `16GiB`"),
        ("1 GiB 2", "such as `16GiB`"),
        ("1e3", "such as `16GiB`"),
        ("3t", "`3TiB` or `3TB`"),
        ("16 apples", "such as `16GiB`"),
        (True, "such as `16GiB`"),
    ],
)
def test_what_is_no_size(text, says):
    with pytest.raises(InvalidInput, match=says):
        parse_size(text)


def test_sizes_are_written_in_mib_rounded_up():
    assert [mib(it) for it in (1, MIB, MIB + 1, 0)] == ["1 MiB", "1 MiB", "2 MiB", "0 MiB"]
