"""Settings of tests of single modules."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.bounds import bound


@pytest.fixture
def bounded() -> Iterator[None]:
    """Whatever is waited for in vain: the test fails."""
    with bound():
        yield
