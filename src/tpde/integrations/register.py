"""`tpde.register`: teaching other libraries about packed models."""

from __future__ import annotations

import importlib
from importlib.metadata import version
from importlib.util import find_spec

from tpde.errors import InvalidArgument, MissingDependency

LIBRARIES = ("transformers", "diffusers")


def register(*libraries: str) -> tuple[str, ...]:
    """Teach libraries about packed models: from then on, their `from_pretrained` takes them.

    Importing `tpde.integrations.transformers` or `tpde.integrations.diffusers` does the same for one.

    Parameters
    ----------
    *libraries : {"transformers", "diffusers"}
        Which; by default all that are installed.

    Returns
    -------
    tuple of str
        Those that know packed models now. Doing it again changes nothing.

    Raises
    ------
    MissingDependency
        If a library that was named is missing or too old, or none is there.
    InvalidArgument
        If there is no such library.

    Examples
    --------
    >>> tpde.register()  # doctest: +SKIP
    ('transformers', 'diffusers')
    >>> model = AutoModelForCausalLM.from_pretrained("llama-packed")  # doctest: +SKIP
    """
    for name in libraries:
        if name not in LIBRARIES:
            raise InvalidArgument(
                f"tpde knows no library `{name!s:.50}`",
                hint=f"name one of {', '.join(LIBRARIES)}, or none for all that are installed",
                where="libraries",
                found=name,
            )
    known = tuple(name for name in libraries or LIBRARIES if _register(name, required=bool(libraries)))
    if not known:
        raise MissingDependency(
            "neither transformers nor diffusers knows packed models: both are missing, or too old",
            hint='run `pip install --upgrade "tpde[transformers]"` or `"tpde[diffusers]"`',
        )
    return known


def _register(name: str, *, required: bool) -> bool:
    """Teach a library; whether it knows packed models now. One that was not asked for may be missing."""
    try:
        if find_spec(name) is None:
            raise MissingDependency(
                f"{name} is not installed", hint=f'run `pip install "tpde[{name}]"`', where=name
            )
        importlib.import_module(f"tpde.integrations.{name}")
        if name == "diffusers":
            _require_asking()
    except MissingDependency:
        if required:
            raise
        return False
    return True


def _require_asking() -> None:
    """Refuse a diffusers that asks nobody about packed components."""
    from tpde.integrations.diffusers.quantizer import IS_ASKED

    if not IS_ASKED:
        raise MissingDependency(
            f"diffusers {version('diffusers')} refuses packed components by their configuration",
            hint="run `pip install --upgrade diffusers` for 0.40 or newer, or use "
            "`tpde.integrations.diffusers.load`",
            where="diffusers",
        )
