"""What running models needs beside tpde itself."""

from __future__ import annotations

import importlib

from tpde.errors import MissingDependency

MIN_MAJOR = 5  # transformers 4 has other loading code


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
    major = version.partition(".")[0]
    if not major.isdecimal() or int(major) < MIN_MAJOR:
        raise MissingDependency(
            f"transformers {version} is too old, {MIN_MAJOR}.0 or newer is needed",
            hint='run `pip install --upgrade "tpde[transformers]"`',
            where="transformers",
            found=version,
            needed=f"{MIN_MAJOR}.0",
        )
