"""What pages say of the code is what the code says of itself."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer

import tpde
from tpde import errors
from tpde.cli import app, plan
from tpde.files import inspection_report, operations
from tpde.files.problem import Problem
from tpde.files.result import Result
from tpde.files.walk import LeftOut
from tpde.planning.units import Placement
from tpde.store.delta_report import DeltaReport, TensorChange
from tpde.store.step_report import StepReport
from tpde.streaming.stats import StreamingTimes as Stats

from .conftest import DOCS, ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MOST = 1500  # words of a page
LONG = {"format.md", "delta.md", "windows.md", "reference/cli.md"}  # formats, and the command line
PAGES = sorted(it.relative_to(DOCS).as_posix() for it in DOCS.rglob("*.md"))


def _text(name: str) -> str:
    return (DOCS / name).read_text("utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_pages_are_short(page: str) -> None:
    assert page in LONG or len(_text(page).split()) <= MOST


def test_every_page_is_in_the_navigation() -> None:
    named = re.findall(r"^\s+- .+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)
    assert sorted(named) == PAGES


# ---- the command line ----


def _commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    if hasattr(command, "commands"):  # a group
        for part, below in command.commands.items():
            yield from _commands(below, f"{name} {part}".strip())
    else:
        yield name, command


COMMANDS = dict(_commands(typer.main.get_command(app), ""))
EVERYWHERE = {"--help", "-h", "--json"}


def _options(command: Any) -> set[str]:
    options = (it for it in command.params if it.param_type_name == "option")
    return {name for it in options for name in (*it.opts, *it.secondary_opts)}


def _section(name: str) -> str:
    """What the page has of a command, under its first word, or all of them."""
    title = name if f"\n## {name}\n" in _text("reference/cli.md") else name.split(maxsplit=1)[0]
    return _text("reference/cli.md").partition(f"\n## {title}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_of_a_command_is_on_the_page(name: str) -> None:
    head = _text("reference/cli.md").partition("\n## ")[0]
    shared = re.findall(r"^- `(--\w+)[^`]*`.*For (.+)\.$", head, re.MULTILINE)
    common = {option for option, names in shared if f"`{name}`" in names}
    named = set(re.findall(r"(?<![\w-])(--[a-z][a-z-]+|-[a-z](?!\w))", _section(name)))
    for option in _options(COMMANDS[name]) - EVERYWHERE:
        assert option in named or option in common, option
    for option in common:
        assert option in _options(COMMANDS[name])


def test_the_page_names_no_other_option_and_no_other_command() -> None:
    text = _text("reference/cli.md")
    there = set().union(*map(_options, COMMANDS.values())) | _options(typer.main.get_command(app))
    there |= {"--help", "--install-completion", "--show-completion"}
    assert set(re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", text)) - {"--compact-output"} <= there  # of jq
    titles = set(re.findall(r"^## (.+)$", text, re.MULTILINE))
    words = {name.split()[0] for name in COMMANDS} - {"bench"}
    assert titles == words | {"bench codec", "Exit codes", "JSON", "Environment variables"}
    for name in COMMANDS:
        assert f"`{name} " in text or f"`tpde {name}" in text, name


def test_what_a_plan_prints_is_explained() -> None:
    rows = re.findall(r"^\| ([^|]+) \|", _text("notes/planning.md").partition("## What the memory")[2], re.M)
    for words in plan._PARTS.values():
        assert words in rows or any(words in row.split(", ") for row in rows), words
    table = _text("guides/larger-than-gpu.md").partition("| it says | that is |")[2].partition("\n\n")[0]
    for place in Placement:
        assert f"`{place.value}`" in table, place
    for words in (
        "units",
        "packed",
        "plain",
        "used row by row",
        "device memory",
        "in all",
        "of",
        "host memory",
    ):
        assert f"`{words}`" in table, words


# ---- Python ----


def test_every_public_name_is_on_the_page() -> None:
    text = _text("reference/python.md")
    for name in set(tpde.__all__) - {"__version__"}:
        assert re.search(rf"`{name}`", text), name


def test_every_error_is_on_the_page_and_nothing_else() -> None:
    rows = set(re.findall(r"^\| `([A-Z]\w+)` \|", _text("reference/errors.md"), re.MULTILINE))
    classes = {
        it for it in vars(errors).values() if isinstance(it, type) and it.__module__ == errors.__name__
    }
    assert rows == {it.__name__ for it in classes} - {"TpdeError"}
    below = re.search(r"^(.+) are subclasses of `InvalidInput`", _text("reference/errors.md"), re.MULTILINE)
    assert below is not None
    assert set(re.findall(r"`(\w+)`", below[1])) == {
        it.__name__ for it in classes if issubclass(it, errors.InvalidInput) and it is not errors.InvalidInput
    }


def test_the_fields_of_errors_are_on_the_page() -> None:
    text = _text("reference/errors.md").partition("## What an error says")[2]
    for error in (errors.TpdeError("x"), errors.Corrupt("x"), errors.OutOfMemory("x")):
        for name in ("message", *vars(error)):
            assert f"`{name}`" in text, name


REPORTS = {
    "A `Summary`:": operations.Summary,
    "A `LeftOut`:": LeftOut,
    "Each `Problem`:": Problem,
    "A `Report`:": inspection_report.Report,
    "A `TensorReport`:": inspection_report.TensorReport,
    "A `DeltaReport`:": DeltaReport,
    "A `TensorChange`:": TensorChange,
    "A `StepReport` for each:": StepReport,
}


@pytest.mark.parametrize("title", REPORTS)
def test_the_fields_of_reports_are_on_the_page(title: str) -> None:
    table = _text("reference/reports.md").partition(title)[2].lstrip().partition("\n\n")[0]
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", table, re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted(it.name for it in dataclasses.fields(REPORTS[title]))


def test_the_fields_of_parts_of_reports_are_on_the_page() -> None:
    text = _text("reference/reports.md")
    group = re.search(r"a `GroupReport` for each, largest first: (.+?) \|", text)
    assert group is not None
    assert re.findall(r"`(\w+)`", group[1]) == [
        it.name for it in dataclasses.fields(inspection_report.GroupReport)
    ]
    fields = {it.name for it in dataclasses.fields(Result)}
    assert fields == {it.name for it in dataclasses.fields(operations.Summary)} - {
        "ratio",
        "files",
        "left_out",
        "unmatched",
    }
    streaming = text.partition("## Streaming")[2].partition("\n### ")[0]
    named = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| ([^|]+) \|", streaming, re.MULTILINE))))
    assert named - {"expert_hits", "expert_misses", "expert_bytes"} == set(
        Stats(*[0] * len(dataclasses.fields(Stats))).as_dict()
    )


# ---- what is installed ----


def test_every_extra_is_on_the_page_and_nothing_else() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    text = _text("install.md")
    rows = re.findall(r"^\| ((?:`[\w-]+`(?:, )?)+) \|.+\|.+\|$", text, re.MULTILINE)
    users = {name for row in rows for name in re.findall(r"`([\w-]+)`", row)}
    others = re.search(r"^Extras named (.+) are for", text, re.MULTILINE)
    assert others is not None
    developers = set(re.findall(r"`(\w+)`", others[1]))
    assert users & developers == set()
    extras = set(project["optional-dependencies"])
    assert {it for it in users if it in extras} | developers == extras


def test_versions_on_the_page_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    text = _text("install.md")
    for extra, name, said in (
        ("torch", "torch", "PyTorch {} to below {}"),
        ("transformers", "transformers", "transformers {} to below {}"),
        ("diffusers", "diffusers", "diffusers {} to below {}"),
    ):
        found = re.search(rf"{name}>=([\d.]+),<([\d.]+)", str(project["optional-dependencies"][extra]))
        assert found is not None
        assert said.format(*found.groups()) in text
    assert f"Python {project['requires-python'].removeprefix('>=')} or later" in text


def test_the_rooms_on_the_page_are_those_that_the_linter_holds() -> None:
    """From the table's bottom to its top, as the contract has them."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (it["layers"] for it in contracts if "tpde.cli" in it.get("layers", ()))
    rows = re.findall(r"^\| (`tpde\.[^|]+) \|", _text("notes/architecture.md"), re.MULTILINE)
    assert [set(re.findall(r"tpde\.\w+", row)) for row in rows] == [
        set(re.findall(r"tpde\.\w+", layer)) for layer in reversed(layers)
    ]
