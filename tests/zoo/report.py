"""Tables of results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

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


def page(results: list[Result]) -> str:
    """Give a page in Markdown: tables, failures with their reasons, what plain models do not do."""
    checked = [result for result in results if result.task.check != FLOW]
    flows = [result for result in results if result.task.check == FLOW]
    lines = [
        "# The zoo",
        "",
        "Tiny random models, packed and plain side by side, compared bit by bit on the CPU. "
        "`python -m tests.zoo --out docs/zoo.md` writes this page.",
        "",
        f"With {'; and some with '.join(_libraries(results))}.",
        "",
        "`yes`: every bit as the plain model's. **no**: see the reasons below. `-`: the plain model does not "
        "do it either, or not twice the same way.",
        *_matrix(checked),
        *_flows(flows),
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

    if not results:
        return []
    names = list(dict.fromkeys(result.task.name for result in results))
    dtypes = list(dict.fromkeys(result.task.dtype for result in results))
    checks = [check for check in CHECKS if any(result.task.check == check for result in results)]
    found = {(it.task.name, it.task.check, it.task.dtype): it for it in results}
    lines = [
        "",
        "## Architectures",
        "",
        f"{len(names)} architectures in {', '.join(dtypes)}: {summary(results)}",
        "",
        *(f"- `{check}`: {(CHECKS[check].__doc__ or '').strip().splitlines()[0]}" for check in checks),
        "",
        "| architecture | family | " + " | ".join(checks) + " |",
        "| --- | --- |" + " --- |" * len(checks),
    ]
    for name in names:
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
            lines += ["", f"### {title}", "", *_listed(some)]
    return lines


def _flows(results: list[Result]) -> list[str]:
    if not results:
        return []
    lines = [
        "",
        "## Flows",
        "",
        f"{len(results)} things that users do with a model: {summary(results)}",
        "",
        "| flow | | why |",
        "| --- | --- | --- |",
    ]
    return [*lines, *(f"| {it.task.name} | {_SIGNS[it.status]} | {_escaped(it.reason)} |" for it in results)]


def _listed(results: list[Result]) -> list[str]:
    """One line for each architecture and check, its dtypes together where the reason is the same."""
    same: dict[tuple[str, str, str], list[str]] = {}
    for result in results:
        key = (result.task.name, result.task.check, _escaped(result.reason))
        same.setdefault(key, []).append(result.task.dtype)
    return [f"- {name}, {check}, {', '.join(dtypes)}: {why}" for (name, check, why), dtypes in same.items()]


def _escaped(reason: str) -> str:
    return reason.replace("|", "\\|").replace("<", "&lt;")
