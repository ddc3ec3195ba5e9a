"""Tables of results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from .runner import FLOW, Result, Task

_SIGNS = {"ok": "yes", "fail": "**no**", "plain": "-", "refused": "refused", "absent": "absent"}
_REASONS = {
    "fail": "What differs",
    "plain": "What plain models do not do",
    "absent": "What these libraries do not have",
}


def label(task: Task) -> str:
    """Name a task."""
    return f"flow {task.name}" if task.check == FLOW else f"{task.name}, {task.check}, {task.dtype}"


def summary(results: Iterable[Result]) -> str:
    """Count results."""
    count = Counter(result.status for result in results)
    refused = f"{count['refused']} refused by name, " if count["refused"] else ""
    absent = f", {count['absent']} that these libraries do not have" if count["absent"] else ""
    return (
        f"{count['ok']} as plain, {refused}{count['fail']} not, {count['plain']} that plain models do not do"
        f"{absent}."
    )


def pages(results: list[Result], out: Path) -> dict[Path, str]:
    """Give pages in Markdown by their paths: of architectures `out`, of flows one beside it."""
    checked = [result for result in results if result.task.check != FLOW]
    flows = [result for result in results if result.task.check == FLOW]
    made = {}
    if checked:
        made[out] = _page("The zoo", results, _matrix(checked))
    if flows:
        made[out.with_stem(f"{out.stem}-flows")] = _page("The zoo's flows", results, _flows(flows))
    return made


def _page(title: str, results: list[Result], tables: list[str]) -> str:
    lines = [
        f"# {title}",
        "",
        "Tiny random models, packed and plain side by side, compared bit by bit on the CPU. "
        "`python -m tests.zoo --out docs/notes/zoo.md` writes this page.",
        "",
        f"With {'; and some with '.join(_libraries(results))}.",
        *tables,
    ]
    return "\n".join(lines) + "\n"


def _libraries(results: list[Result]) -> list[str]:
    """What results were taken with, that of most of them first."""
    return [name for name, _ in Counter(it.libraries or libraries() for it in results).most_common()]


def libraries() -> str:
    """Name the libraries that are tested with, and their versions."""
    names = ("torch", "transformers", "diffusers", "timm", "peft", "accelerate", "sentence-transformers")
    found = []
    for name in names:
        with suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return ", ".join(found)


def _matrix(results: list[Result]) -> list[str]:
    from .architectures import ARCHITECTURES
    from .checks import CHECKS

    names = list(dict.fromkeys(result.task.name for result in results))
    dtypes = list(dict.fromkeys(result.task.dtype for result in results))
    checks = [check for check in CHECKS if any(result.task.check == check for result in results)]
    found = {(it.task.name, it.task.check, it.task.dtype): it for it in results}
    lines = [
        "",
        f"{len(names)} architectures in {', '.join(dtypes)}: {summary(results)}",
        "",
        "## What is checked",
        "",
        *(f"- `{check}`: {(CHECKS[check].__doc__ or '').strip().splitlines()[0]}" for check in checks),
    ]
    same = {name for name in names if all(it.status == "ok" for it in results if it.task.name == name)}
    if same:
        lines += ["", "## Every bit as plain, in every check", ""]
    families = list(dict.fromkeys(ARCHITECTURES[name].family for name in names if name in same))
    for family in families:
        some_names = [name for name in names if name in same and ARCHITECTURES[name].family == family]
        lines += [f"- **{family}** ({len(some_names)}): {', '.join(some_names)}"]
    if len(same) < len(names):
        lines += [
            "",
            "## The others",
            "",
            "`yes`: every bit as the plain model's. **no**: see the reasons below. `-`: the plain model does "
            "not do it either, or not twice the same way.",
            "",
            "| architecture | family | " + " | ".join(checks) + " |",
            "| --- | --- |" + " --- |" * len(checks),
        ]
    for name in names:
        if name in same:
            continue
        cells = []
        for check in checks:
            some = [(dtype, found[name, check, dtype]) for dtype in dtypes if (name, check, dtype) in found]
            signs = [(dtype, _SIGNS[it.status]) for dtype, it in some]
            alike = len({sign for _, sign in signs}) < 2
            cells.append(signs[0][1] if signs and alike else ", ".join(f"{d} {sign}" for d, sign in signs))
        lines.append(f"| {name} | {ARCHITECTURES[name].family} | " + " | ".join(cells) + " |")
    for status, title in (
        ("fail", "What differs"),
        ("plain", "What plain models do not do"),
        ("absent", "What these libraries do not have"),
    ):
        some = [result for result in results if result.status == status]
        if some:
            lines += ["", f"## {title}", "", *_listed(some)]
    return lines


def _flows(results: list[Result]) -> list[str]:
    same = [it.task.name for it in results if it.status == "ok"]
    lines = ["", f"{len(results)} things that users do with a model: {summary(results)}"]
    if same:
        lines += ["", "## As on the plain model", "", ", ".join(f"`{name}`" for name in same)]
    if len(same) < len(results):
        lines += ["", "## The others", "", "| flow | | why |", "| --- | --- | --- |"]
    return [
        *lines,
        *(
            f"| {it.task.name} | {_SIGNS[it.status]} | {_escaped(it.reason)} |"
            for it in results
            if it.status != "ok"
        ),
    ]


def _listed(results: list[Result]) -> list[str]:
    """One line for each architecture, its checks and dtypes together where the reason is the same."""
    same: dict[tuple[str, str], dict[str, list[str]]] = {}
    for result in results:
        checks = same.setdefault((result.task.name, _escaped(result.reason)), {})
        checks.setdefault(result.task.check, []).append(result.task.dtype)
    lines = []
    for (name, why), checks in same.items():
        where = (f"{check} ({', '.join(dtypes)})" for check, dtypes in checks.items())
        lines.append(f"- {name}: {', '.join(where)}: {why}")
    return lines


def _escaped(reason: str) -> str:
    return reason.replace("|", "\\|").replace("<", "&lt;")
