"""What was measured, as tables, and the bars."""

from __future__ import annotations

from typing import Any

from benchmarks.harness import texts
from benchmarks.harness.report import Page
from benchmarks.serve.ways import WAYS

FIGURES = (
    ("output_throughput", "tokens generated a second, all requests together (times bf16)", 1),
    ("median_ttft_ms", "time to the first token, ms, median", 1),
    ("most_ttft_ms", "the same, the longest", 1),
    ("median_itl_ms", "time between what is streamed, ms, median", 2),
    ("median_tpot_ms", "time a token after the first, ms, median", 2),
    ("latency_ms", "time that a batch takes, by vLLM's `bench latency`, ms (times bf16)", 1),
)
BESIDE = ("output_throughput", "latency_ms")  # those that are also given as times bf16's
Row = dict[str, Any]
AT_A_TIME, COMPARED = (1, 32), 32  # of the prompts that are compared, and their tokens
# Of the 8 B shape, beside bf16: tokens a second by requests at a time, and the time to a first token.
BARS, FIRST_BAR = {1: 1.25, 8: 1.15, 32: 1.0, 128: 0.8}, 1.15
SPREAD_BARS = {1: 1.15}  # tokens a second where two GPUs share a model
LOAD_BARS = {"tpde": 1.15, "tpde-packed": 0.9}  # time to load, of bf16's
KV_BAR, KV_GIB = 1.6, (23.0, 25.0)  # tokens that the KV cache has room for, of bf16's; within so much memory


def report(page: Page, rows: dict[str, Row], concurrent: list[int], lengths: tuple[int, int]) -> None:
    """Starts and speeds."""
    first = [
        [
            WAYS[way].title,
            row.get("problem") or row["start"],
            _seconds(row.get("read", "")),
            _seconds(row.get("again", "-")),
            row.get("weights", ""),
            row.get("kv", ""),
        ]
        for way, row in rows.items()
    ]
    heads = ["way", "start, s", "of which loading, s", "once more, s", "weights", "KV cache, tokens"]
    page.table(heads, first)
    if not concurrent:
        return
    page.say(f"Prompts of {lengths[0]} tokens, {lengths[1]} are generated.")
    plain = rows.get("bf16", {})
    for key, title, digits in FIGURES:
        lines = []
        for way, row in rows.items():
            if not all(key in row.get(f"{count}", {}) for count in concurrent):
                continue
            cells = []
            for count in concurrent:
                value, base = row[f"{count}"][key], plain.get(f"{count}", {}).get(key)
                times = f" ({value / base:.2f})" if base and key in BESIDE else ""
                cells.append(f"{value:.{digits}f}{times}")
            lines.append([WAYS[way].title, *cells])
        if lines:
            page.say(f"{title}, by requests at a time:")
            page.table(["way", *map(str, concurrent)], lines)


def _seconds(said: str) -> str:
    """What vLLM says, to a hundredth; or what there is instead."""
    try:
        return f"{float(said):.2f}"
    except ValueError:
        return said


def compare(page: Page, rows: dict[str, Row], invariant: bool) -> None:
    """How many prompts had the same tokens in another batch, and with plain weights in such a batch.

    Without plain weights, with `tpde` on one GPU. With exact kernels all should have those of plain weights;
    with fused ones and `VLLM_BATCH_INVARIANT` the same in any batch, on one GPU and on two.
    """
    found = {way: row["tokens"] for way, row in rows.items() if "tokens" in row}
    plain, ours = found.get("bf16"), found.get("tpde")
    beside, name = (ours, "tpde") if plain is None else (plain, "bf16")
    lines = []
    for way, tokens in found.items():
        as_it = [_alike(tokens[i], beside[i]) if beside else "-" for i in range(2)]
        lines.append([WAYS[way].title, _alike(*tokens), *as_it])
    if lines:
        one, many = AT_A_TIME
        page.say(f"Of {len(tokens[0])} prompts, how many have the same {COMPARED} first tokens:")
        heads = ["way", f"with {one} and {many} at a time", f"as {name}, {one}", f"as {name}, {many}"]
        page.table(heads, lines)
    for way in ("tpde", "tpde-2"):
        if invariant and way in found:
            alone, together = found[way]
            page.judge(alone == together, f"{WAYS[way].title}: all tokens are the same in other batches")
    if invariant and ours and "tpde-2" in found:
        page.judge(found["tpde-2"] == ours, f"{WAYS['tpde-2'].title}: all tokens are those of one")
    if plain and "tpde-exact" in found:
        page.judge(found["tpde-exact"] == plain, f"{WAYS['tpde-exact'].title}: all tokens are bf16's")


def _alike(one: list[list[int]], other: list[list[int]]) -> str:
    return str(sum(a == b for a, b in zip(one, other, strict=True)))


def perplexities(page: Page, rows: dict[str, Row]) -> None:
    """Perplexity of a text beside bf16's."""
    titles = {way: WAYS[way].title for way in rows}
    found = {way: row["text"] for way, row in rows.items() if "text" in row}
    texts.perplexities(page, titles, found, "bf16", [way for way in rows if way.startswith("tpde")])


def judge(
    page: Page, rows: dict[str, Row], concurrent: list[int], cards: int = 1, room: float | None = None
) -> None:
    """Hold against the bars, which are of bf16 on as many GPUs, `room` GiB of each if that is known."""
    ours, plain = rows.get("tpde", {}), rows["bf16"]
    speeds = [
        (f"{count} at a time, tokens a second, of bf16's", _of(ours, plain, count, "output_throughput"), bar)
        for count, bar in (BARS if cards == 1 else SPREAD_BARS).items()
        if count in concurrent
    ]
    if room is not None and KV_GIB[0] <= room <= KV_GIB[1]:
        speeds.append(("tokens in the KV cache, of bf16's", _tokens(ours, plain), KV_BAR))
    page.limits(speeds, least=True)
    if cards > 1:
        return
    first = _of(ours, plain, min(concurrent), "median_ttft_ms")
    reading = [
        (f"loading, {WAYS[way].title}{which}, of bf16's time", _reading(rows[way], plain, key), bar)
        for key, which in (("read", ""), ("again", ", once more"))
        for way, bar in LOAD_BARS.items()
        if way in rows and (key == "read" or key in rows[way])
    ]
    page.limits([("the first token, of bf16's time", first, FIRST_BAR), *reading], least=False)


def _of(ours: Row, plain: Row, count: int, key: str) -> float | None:
    found, base = (it.get(f"{count}", {}).get(key) for it in (ours, plain))
    return None if found is None or base is None else float(found / base)


def _tokens(ours: Row, plain: Row) -> float | None:
    """How many more fit in the KV cache, as vLLM says."""
    found, base = (str(it.get("kv", "-")).replace(",", "") for it in (ours, plain))
    return int(found) / int(base) if found.isdigit() and base.isdigit() else None


def _reading(ours: Row, plain: Row, key: str) -> float | None:
    taken = [it.get(key, "-") for it in (ours, plain)]
    return None if "-" in taken else float(taken[0]) / float(taken[1])
