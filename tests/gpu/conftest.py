"""What tests on GPUs leave each other."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def memory_given_back() -> Iterator[None]:
    """Give memory back after each test, for those that count all that the process has.

    PyTorch keeps memory for cuBLAS, which may lie in what a large tensor left: that then stays whole.
    """
    yield
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
