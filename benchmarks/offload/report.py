"""What `offload` makes of what its processes found: tables, bars, a plot."""

from __future__ import annotations

import operator
import statistics
from typing import Any

from benchmarks.harness.quiet import PATIENCE, SLOW
from benchmarks.harness.report import Page, gib, ms, verdict
from benchmarks.offload.decoding import WARM
from benchmarks.offload.results import FIXED, GB, Found, Results, limit, paired, turns_of
from benchmarks.offload.work import PREFILL, PREFILL_BUDGET

EFFICIENCY = 0.93  # of the copy rate
RATE_BAR = 52e9
RESIDENT_SPARE = 3e-3  # s a token above packed-resident, once everything fits
SLOWER = 1.02  # with more VRAM
ACCELERATE_BAR, ACCELERATE_BUDGET = 13.0, 4.0
PREFILL_BAR = 1.15
PRIVATE_BAR, LOCKED_BAR = 256 << 20, 64 << 20
FIRST_BAR = 1.0  # s
PREDICTED_BAR = 0.15


def above_resident(row: Found, found: Results) -> float | None:
    """Seconds a token more than when all is packed and resident."""
    return paired(row, found.resident, operator.sub)


def predicted_share(found: Results, budget: float, what: str) -> float | None:
    """Predicted over found seconds a token: the median of turns that have both.

    Predicted `before`, by a process of its own, or with calls that were timed `beside` the tokens.
    """
    turns = {number: it for number, it in found.ours[budget]["turns"].items() if "token_s" in it}
    seconds = found.predicted.get(budget, {})
    if what == "beside":
        seconds = {number: it["beside_s"] for number, it in turns.items() if "beside_s" in it}
    shares = [seconds[number] / it["token_s"] for number, it in turns.items() if number in seconds]
    return statistics.median(shares) if shares else None


def bar(found: Results, budget: float) -> float | None:
    """Seconds a token allowed; None where all fits, and what that takes is not known."""
    if not found.rate:
        return None
    row = found.ours[budget]
    streamed = limit(found.made["streamed_packed"], budget, found.rate) / EFFICIENCY
    above = above_resident(row, found)
    return max(streamed, 0.0 if above is None else row["token_s"] - above + RESIDENT_SPARE) or None


COLUMNS = (
    *("budget, GiB", "ours, ms/token", "at most", "", "limit, packed", "limit, plain", "predicted", "beside"),
    *("no overlap", "copied, GB/token", "card peak, GiB", "load to first token, s", "private, MiB"),
    "bits as plain",
)


def budgets(found: Results) -> list[list[str]]:
    """One row a budget."""
    made = found.made
    lines = []
    for budget, row in sorted(found.ours.items()):
        bits = {"": "yes", None: ""}.get(row.get("difference"), "NO")
        took, allowed = row.get("token_s"), bar(found, budget)
        predicted = found.predicted.get(budget)
        lines.append(
            [
                f"{budget:g}",
                ms(took) or str(row.get("problem")).partition(":")[0],
                ms(allowed),
                verdict(took <= allowed) if took is not None and allowed is not None else "",
                ms(limit(made["streamed_packed"], budget, found.rate)) if found.rate else "",
                ms(limit(made["streamed_plain"], budget, found.rate)) if found.rate else "",
                ms(statistics.median(predicted.values()) if predicted else None),
                ms(row.get("beside_s")),
                ms(row.get("serial_s")),
                f"{row.get('copied_a_token', 0) / GB:.2f}",
                gib(row.get("peak")),
                f"{row['first_s']:.2f}" if "first_s" in row else "",
                f"{row.get('private', 0) / 2**20:.0f}",
                bits,
            ]
        )
    return lines


def others(found: Results) -> dict[str, Found]:
    """What does not depend on the budget."""
    return {"plain, resident": found.plain, "tpde, packed, resident": found.resident} | found.peers


def checks(found: Results, mapped: bool) -> list[tuple[str, str, str, bool]]:
    """Every bar: what, found, at most (or least), whether it is met. What was not measured is left out."""
    out: list[tuple[str, str, str, bool]] = []
    made, rate = found.made, found.rate
    good = {b: row for b, row in sorted(found.ours.items()) if "token_s" in row}
    if found.rates:
        out.append(("copy rate, GB/s", f"{rate / GB:.1f}", f">= {RATE_BAR / GB:.0f}", rate >= RATE_BAR))
    for budget, row in sorted(found.ours.items()):
        if "token_s" not in row:
            out.append((f"{budget:g} GiB", str(row.get("problem")), "runs", False))
            continue
        allowed = bar(found, budget)
        if allowed is not None:
            met = row["token_s"] <= allowed
            out.append((f"{budget:g} GiB, ms/token", ms(row["token_s"]), ms(allowed), met))
        if "peak" in row:
            met = row["peak"] <= budget * 2**30
            out.append((f"{budget:g} GiB, card peak, GiB", gib(row["peak"]), f"{budget:g}", met))
        if row.get("difference") is not None:
            out.append(
                (f"{budget:g} GiB, bits", row["difference"] or "equal", "equal", not row["difference"])
            )
        share, beside = (predicted_share(found, budget, what) for what in ("before", "beside"))
        if share is not None:
            met = abs(share - 1) <= PREDICTED_BAR
            said = f"{100 * (share - 1):+.1f} %"
            said += "" if beside is None else f", beside {100 * (beside - 1):+.1f} %"
            out.append((f"{budget:g} GiB, predicted", said, f"{100 * PREDICTED_BAR:.0f} %", met))
        locked = row.get("locked")
        if locked is not None:
            over = (locked - made["packed_bytes"]) / 2**20
            what = f"{budget:g} GiB, locked more than packed, MiB"
            out.append((what, f"{over:.0f}", f"{LOCKED_BAR >> 20}", over <= LOCKED_BAR >> 20))
    if found.resident.get("difference") is not None:
        differs = found.resident["difference"]
        out.append(("packed, resident, bits", differs or "equal", "equal", not differs))
    best: Found | None = None
    plans: set[str] = set()
    for budget, row in good.items():
        if best is not None:
            more = paired(row, best, operator.truediv) or row["token_s"] / best["token_s"]
            same = row["plan"] in plans  # then processes differ, and nothing else does
            said = f"{more:.3f}" + (", same plan" if same else "")
            out.append((f"{budget:g} GiB against less", said, f"{SLOWER}", same or more <= SLOWER))
        if best is None or row["token_s"] < best["token_s"]:
            best = row
        plans.add(row["plan"])
    firsts = [paired(row, found.plain, operator.sub, "first_s") for row in good.values()]
    if more := [it for it in firsts if it is not None]:
        first = max(more)
        met = first <= FIRST_BAR
        out.append(("load to first token above plain's, s", f"{first:.2f}", f"{FIRST_BAR:g}", met))
    if mapped and good and found.plain:
        private = (max(row["private"] for row in good.values()) - found.plain["private"]) / 2**20
        met = private <= PRIVATE_BAR >> 20
        out.append(("private more than plain's, MiB", f"{private:.0f}", f"{PRIVATE_BAR >> 20}", met))
    theirs, at = found.peers.get("accelerate cpu_offload", {}), good.get(ACCELERATE_BUDGET)
    if "token_s" in theirs and at:
        times = theirs["token_s"] / at["token_s"]
        what = f"{ACCELERATE_BUDGET:g} GiB against accelerate"
        out.append((what, f"{times:.1f} times", f">= {ACCELERATE_BAR:g}", times >= ACCELERATE_BAR))
    if "prefill_s" in found.prefill and "prefill_s" in found.plain and rate:
        allowed = PREFILL_BAR * max(found.prefill["copied"] / rate, found.plain["prefill_s"])
        took = found.prefill["prefill_s"]
        out.append(
            (f"{PREFILL} tokens at {PREFILL_BUDGET:g} GiB, ms", ms(took), ms(allowed), took <= allowed)
        )
    return out


def draw(options: Any, found: Results, page: Page) -> None:
    """The whole page, of what there is so far."""
    page.clear()
    page.facts["GPU"] = found.gpu
    made = found.made
    hold = "A second process held all of the card but the budget and the context. " if options.hold else ""
    after = f", {found.rates[-1] / GB:.1f} after" if len(found.rates) > 1 else ""
    measured = f"{found.rates[0] / GB:.1f} GB/s before{after}" if found.rates else "not measured"
    counts = {len(row["turns"]) for budget, row in found.ours.items() if found.fits(budget)} or {0}
    turns = " or ".join(f"{it}" for it in sorted(counts)) + " processes"
    plain_gb, packed_gb, read_gb = (
        f"{made[key] / GB:.2f} GB" for key in ("plain_bytes", "packed_bytes", "streamed_packed")
    )
    timed = [turn for row in (found.plain, found.resident, *found.ours.values()) for turn in turns_of(row)]
    lost, runs = (sum(turn.get(key, 0) for turn in timed) for key in ("lost", "runs"))
    about = (
        f"Model: {options.shape} shape, {made['layers']} layers, bf16, random weights with per-row scale "
        f"0.02 * exp(0.3 * normal), seed {options.seed}; {plain_gb} plain, {packed_gb} packed, of which "
        f"{read_gb} are read for a token; made and packed in {made['pack_s']:.1f} s. Host memory: "
        f"{options.host}. {hold}Batch 1, greedy, {options.tokens} timed tokens after {WARM}, the "
        "median of several runs of less than a second, and as many tokens before, whose logits are compared "
        "as integers with the plain model's of the same run; "
        f"where all fits, and resident, medians of {turns} in turns, also of what one takes more than "
        "another. Predicted: what `tpde plan` says in a process of its own right before; beside: the same, "
        "but with what the host needs for a call measured right before and after the tokens. First tokens: "
        "from the call that loads on, with a CUDA context, modules imported and our kernels compiled; the "
        "plain model's is that of its first call. As many turns, but ours are not timed in the first, where "
        "the card's memory is looked at all the while. No overlap: copies wait for all that was asked for "
        "before. Peers: the median of three tokens. Before anything but copies is timed, a thread waits up "
        f"to {PATIENCE:g} s for a processor on which fixed arithmetic takes at most {SLOW:g} times its "
        "fastest, and moves there. Where it takes longer afterwards, others use the processor: runs of "
        f"tokens do not count then ({lost} of {lost + runs} here); first tokens ({found.again} here) and "
        "predictions are taken again, at most twice. Copy rate from `cuMemHostAlloc`, 256 MiB "
        f"at a time: {measured}. Limits: (bytes read for a token - (budget - {FIXED / GB} GB)) / rate.\n"
    )
    page.say(about)
    page.table(COLUMNS, budgets(found))
    without = [
        [
            name,
            ms(row.get("token_s")) or str(row.get("problem")),
            gib(row.get("peak")),
            gib(row.get("private")),
        ]
        for name, row in others(found).items()
        if row
    ]
    page.table(["without a budget", "ms/token", "card peak, GiB", "private, GiB"], without)
    page.say("Bars:")
    judged = [
        [what, got, need, page.judge(met, what)]
        for what, got, need, met in checks(found, options.host == "mapped")
    ]
    page.table(["bar", "found", "at most", ""], judged)
    if found.problems:
        page.say("Problems:\n\n" + "".join(f"- {it}\n" for it in found.problems))
        page.judge(False, "problems")
    page.data = {key: value for key, value in vars(found).items() if key != "gpu"}


def plot(found: Results, pyplot: Any) -> Any:
    """Time per token against the budget."""
    made, held = found.made, sorted(found.ours)
    figure, panel = pyplot.subplots(figsize=(7, 4.5))
    fine = [held[0] + (held[-1] - held[0]) * i / 200 for i in range(201)] if held else []
    for key, name in (("streamed_packed", "packed"), ("streamed_plain", "plain")):
        times = [1e3 * limit(made[key], budget, found.rate) for budget in fine] if found.rate else []
        if times:
            style = "--" if name == "packed" else ":"
            panel.plot(fine, times, color="grey", linestyle=style, label=f"{name} bytes / copy rate")
    for key, name in (("token_s", "tpde"), ("serial_s", "tpde, no overlap")):
        points = [(b, 1e3 * found.ours[b][key]) for b in held if key in found.ours[b]]
        if points:
            panel.plot(*zip(*points, strict=True), marker="o", markersize=4, label=name)
    for number, (name, row) in enumerate(others(found).items()):
        if "token_s" in row:
            panel.axhline(1e3 * row["token_s"], color=f"C{number + 2}", linewidth=1, label=name)
    panel.set(xlabel="budget, GiB of device memory", ylabel="ms per token", yscale="log")
    panel.set_ylim(bottom=5)  # the limits fall to zero where everything fits
    panel.grid(alpha=0.3)
    panel.legend(fontsize="small")
    figure.tight_layout()
    return figure
