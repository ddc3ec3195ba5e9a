"""What running models needs beside tpde itself."""

from __future__ import annotations

import importlib

from tpde.errors import MissingDependency

MIN_VERSION = (5, 13)  # what `tpde.integrations.transformers.internals` relies on


def require_transformers() -> None:
    """Check that torch and a known transformers are there.

    Raises
    ------
    MissingDependency
        Naming what to install.
    """
    for package in ("torch", "transformers"):
        try:
            module = importlib.import_module(package)
        except ImportError as error:
            raise MissingDependency(
                f"running models needs {package}, which cannot be imported ({error})",
                hint='run `pip install "tpde[transformers]"`',
                where=package,
            ) from None
    version = str(module.__version__)
    numbers = [int(it) for it in version.split(".")[:2] if it.isdecimal()]
    if tuple(numbers) < MIN_VERSION:
        least = ".".join(map(str, MIN_VERSION))
        raise MissingDependency(
            f"transformers {version} is too old, {least} or newer is needed",
            hint='run `pip install --upgrade "tpde[transformers]"`',
        )
