"""Tables of results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from .runner import Result

_SIGNS = {"ok": "yes", "fail": "**no**", "plain": "-"}


def summary(results: Iterable[Result]) -> str:
    """Count results."""
    count = Counter(result.status for result in results)
    return f"{count['ok']} as plain, {count['fail']} not, {count['plain']} that the plain model does not do."


def page(results: list[Result]) -> str:
    """Give a page in Markdown: a table for each dtype, failures with their reasons, what plain models lack."""
    from .architectures import ARCHITECTURES
    from .checks import CHECKS

    names = list(dict.fromkeys(result.task.name for result in results))
    dtypes = list(dict.fromkeys(result.task.dtype for result in results))
    checks = [check for check in CHECKS if any(result.task.check == check for result in results)]
    found = {(it.task.name, it.task.check, it.task.dtype): it for it in results}
    lines = [
        "# The zoo",
        "",
        "Tiny random models, packed and plain side by side, compared bit by bit on the CPU: "
        "`python -m tests.zoo --out docs/zoo.md` writes this page.",
        "",
        *(f"- `{check}`: {(CHECKS[check].__doc__ or '').strip().splitlines()[0]}" for check in checks),
        "",
        f"{len(names)} architectures: {summary(results)} "
        "`yes`: every bit as the plain model's; `no`: see below; `-`: the plain model does not do it either.",
        "",
        "| architecture | family | " + " | ".join(checks) + " |",
        "| --- | --- |" + " --- |" * len(checks),
    ]
    for name in names:
        cells = []
        for check in checks:
            signs = [_SIGNS[found[name, check, dtype].status] for dtype in dtypes]
            cells.append(signs[0] if len(set(signs)) == 1 else ", ".join(map("{} {}".format, dtypes, signs)))
        lines.append(f"| {name} | {ARCHITECTURES[name].family} | " + " | ".join(cells) + " |")
    for status, title in (("fail", "What differs"), ("plain", "What plain models do not do")):
        some = [result for result in results if result.status == status]
        if some:
            lines += ["", f"## {title}", "", *_listed(some)]
    return "\n".join(lines) + "\n"


def _listed(results: list[Result]) -> list[str]:
    """One line for each architecture and check, its dtypes together where the reason is the same."""
    same: dict[tuple[str, str, str], list[str]] = {}
    for result in results:
        reason = result.reason.replace("|", "\\|").replace("<", "&lt;")
        same.setdefault((result.task.name, result.task.check, reason), []).append(result.task.dtype)
    return [f"- {name}, {check}, {', '.join(dtypes)}: {why}" for (name, check, why), dtypes in same.items()]
