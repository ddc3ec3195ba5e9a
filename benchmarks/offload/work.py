"""What `offload` does in its processes: the plain model, ours under budgets, the peers."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data.llama import PROMPT, config_of, import_everything
from benchmarks.data.synthetic import CHECKED_LOGITS, plain_model, write_packed
from benchmarks.harness.gpu import copy_rate, device, give_back, need_cuda, wait
from benchmarks.harness.machine import gpu
from benchmarks.harness.memory import private_bytes
from benchmarks.harness.processes import reason, tell
from benchmarks.harness.quiet import calibrate, quiet, settle
from benchmarks.harness.report import note
from benchmarks.offload.decoding import WARM, call_seconds, difference, generate, one_token, prefill, timed
from benchmarks.peers.offloading import OFFLOADING

PREDICTIONS = 3  # at most: of one after which the processor is slow there is another
PREFILL, PREFILL_BUDGET = 4096, 4.0
FACTS = "facts.json"


def checked_logits(given: dict[str, Any]) -> Path:
    """Where the plain model's logits are kept."""
    return Path(given["dir"]) / CHECKED_LOGITS.format(given["tokens"])


def plain(given: dict[str, Any]) -> None:
    """The plain model in device memory: its speed, its logits, its memory."""
    import_everything()
    use_of(given)  # nobody holds the card
    model = plain_model(config_of(given["shape"], given["layers"]), given["seed"])
    wait()
    settle()
    start = time.perf_counter()
    generate(model, 0, 0)  # the first of a process, as ours: libraries are loaded for it
    found: dict[str, Any] = {"first_s": time.perf_counter() - start, "slow": not quiet()}
    if given["first_only"]:
        tell(turn=given["turn"], plain=found)
        return
    logits: list[Any] = []
    generate(model, WARM, given["tokens"], logits)
    if not given["turn"]:
        np.save(checked_logits(given), np.stack(logits))
    found |= timed(model, given["tokens"]) | {"private": private_bytes()}
    note(f"plain: {found['token_s'] * 1e3:.1f} ms/token, first token {found['first_s']:.2f} s")
    tell(turn=given["turn"], plain=found)
    if given["prefill"] and not given["turn"]:
        tell(turn=0, plain=found | {"prefill_s": prefill(model, PREFILL, 3)})


class Loaded:
    """One of our models under a budget in GiB, or without one; `close` gives everything back."""

    def __init__(self, given: dict[str, Any], budget: float | None, max_tokens: int = 1024) -> None:
        import tpde

        vram, tokens = None if budget is None else f"{budget:g}GiB", None if budget is None else max_tokens
        self.model: Any = tpde.from_pretrained(given["packed"], device=device(), vram=vram, max_tokens=tokens)
        self._streaming: Any = getattr(self.model, "tpde_streamer", None)
        self.streamers = list(self._streaming.streamers.values()) if self._streaming else []

    def plan(self) -> str:
        """What says whether two budgets come to the same."""
        if self._streaming is None:
            return ""
        plans = [
            (sorted((name, it.value) for name, it in made.placements.items()), made.workspace, made.parts)
            for made in self._streaming.plans.values()
        ]
        return hashlib.sha256(repr(plans).encode()).hexdigest()[:16]

    def predicted(self, copy: float, memory: float, call: float) -> float:
        """Seconds a token as `tpde plan` prints them, of a machine with such rates and seconds of a call."""
        from tpde.streaming.rates import given_rates

        rates = replace(given_rates(copy, memory), launch=call)
        return max(float(made.on(rates).seconds) for made in self._streaming.plans.values())

    def copied(self) -> int:
        """Bytes copied so far."""
        return sum(it.ring.copied_bytes for it in self.streamers)

    def dropped(self) -> int:
        """Pieces copied in vain."""
        return sum(it.dropped_pieces for it in self.streamers)

    def locked(self) -> int:
        """Bytes of host memory that are page-locked for it."""
        return sum(getattr(thing, "locked_bytes", 0) for it in self.streamers for thing in it.owned)

    def close(self) -> None:
        """Let go of the model."""
        if self._streaming is not None:
            self._streaming.close()
        self.model, self._streaming, self.streamers = None, None, []
        gc.collect()
        give_back()


def predict(given: dict[str, Any]) -> None:
    """What `tpde plan` says of a budget: seconds a token, with what it measures of this machine."""
    import torch

    from tpde.integrations.transformers.budget_plan import plan_streaming
    from tpde.integrations.transformers.shape import opened_shape
    from tpde.planning.budget import Budget
    from tpde.streaming.rates import measure_rates

    use_of(given)  # nobody holds the card
    budget, packed, ram = given["budget"], Path(given["packed"]), given.get("ram")
    for _ in range(PREDICTIONS):
        settle()
        rates = measure_rates(torch.device("cuda", 0), sorted(packed.glob("*.safetensors")) if ram else [])
        note(f"measured: {rates}")
        if quiet():
            break
    limits = Budget(int(budget * 2**30), None if ram is None else int(ram * 2**30), 1024)
    with opened_shape(packed) as (shape, checkpoint, weights):
        plan = plan_streaming(shape, checkpoint, weights, limits)
    seconds = plan.on(rates).seconds
    tell(turn=given["turn"], predicted=[budget, seconds], measured=[rates.copy, rates.memory])


def start(given: dict[str, Any]) -> None:
    """Make and pack the model if it is not there, measure the machine, and say what it is."""
    import torch

    if given["shape"] != "tiny":
        need_cuda()
    tell(gpu=gpu())
    facts = Path(given["dir"]) / FACTS
    if not facts.exists():
        made = write_packed(Path(given["packed"]), config_of(given["shape"], given["layers"]), given["seed"])
        facts.write_text(json.dumps(made | {"layers": given["layers"]}))
    tell(made=json.loads(facts.read_text()))
    calibrate()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        tell(rate=copy_rate())
    if torch.cuda.is_available() and given["budgets"]:
        guarded("first of all, not counted", {}, partial(warm, given))


def warm(given: dict[str, Any]) -> None:
    """Compile the kernels that a budget needs, and keep them on the disk."""
    loaded = Loaded(given, given["budgets"][0])
    generate(loaded.model, 0, 0)
    loaded.close()


def rate(given: dict[str, Any]) -> None:
    """The copy rate again."""
    tell(rate=copy_rate())


def copy_then_decode(streamer: Any) -> None:
    """Let no copy begin before all is computed that was asked for earlier, as where nothing is prefetched."""
    import torch

    streamer.ring.prefetch, copy = False, streamer.device.copy

    def later(place: int, address: int, piece: Any) -> Any:
        streamer.device.hold(torch.cuda.current_stream().record_event())
        return copy(place, address, piece)

    streamer.device.copy = later


def use_of(given: dict[str, Any]) -> Any:
    """What looks at the card's memory, of which nobody holds any; None without a card.

    What is imported only here is not timed later.
    """
    import torch

    from benchmarks.harness.card import Use

    with contextlib.suppress(ImportError):
        import cuda.core  # noqa: F401 - not before this process is a fork of its own: it may start the driver
    return Use(given.get("holder")) if torch.cuda.is_available() else None


def measure(given: dict[str, Any], use: Any, found: dict[str, Any], say: Callable[[], None]) -> None:
    """One budget, or None for all of it packed and resident: `found` is filled, and said as it grows."""
    budget = given["budget"]
    if use is not None:
        if budget is not None:
            use.limit(int(budget * 2**30))
        if not given["turn"]:
            use.watch()
    settle()
    start = time.perf_counter()
    loaded = Loaded(given, budget)
    try:
        wait()
        found["load_s"], found["plan"] = time.perf_counter() - start, loaded.plan()
        generate(loaded.model, 0, 0)
        if given["turn"]:  # not beside somebody who asks the driver for the card's memory 200 times a second
            found["first_s"], found["slow"] = time.perf_counter() - start, not quiet()
        if given["first_only"]:
            return
        # As many tokens as are timed: up to each new length, libraries load kernels, for 0.4 s in all.
        logits: list[Any] = []
        before, count = loaded.copied(), given["tokens"]
        generate(loaded.model, WARM, count, logits)
        # The prompt's forward pass, WARM and `count`: all read every streamed weight once.
        found["copied_a_token"] = (loaded.copied() - before) / (1 + WARM + count)
        if checked_logits(given).exists():
            found["difference"] = difference(logits, checked_logits(given))
        if use is not None:
            use.pause()
            found["peak"] = use.peak
        before_them = call_seconds()
        found |= timed(loaded.model, count)
        call = (before_them + call_seconds()) / 2
        found["private"] = private_bytes()
        if use is not None:
            found["peak"] = max(found["peak"], use.now())
        if loaded.streamers:
            found["locked"], found["dropped"] = loaded.locked(), loaded.dropped()
        if given["measured"] and budget is not None:
            # Hosts with other work take half as long again, or not, from one second to the next.
            copy, memory = given["measured"]
            found["beside_s"] = loaded.predicted(copy, memory, call)
        say()
        if loaded.streamers and given["serial"]:
            for streamer in loaded.streamers:
                copy_then_decode(streamer)
            settle()
            found["serial_s"], _ = generate(loaded.model, 0, 2)
            say()
    finally:
        if use is not None:
            use.pause()
        loaded.close()


def guarded(name: str, found: dict[str, Any], work: Callable[[], object]) -> None:
    """What fails becomes a row that says so, and keeps what was found before."""
    start = time.perf_counter()
    try:
        work()
    except Exception as error:
        traceback.print_exc()
        found["problem"] = reason(error)
    said = f"{found['token_s'] * 1e3:.1f} ms/token, " if "token_s" in found else ""
    said += (
        f"load {found['load_s']:.2f} s, first token {found['first_s']:.2f} s, " if "first_s" in found else ""
    )
    said += f"{found['problem']}, " if "problem" in found else ""
    note(f"{name}: {said}{time.perf_counter() - start:.1f} s in all")


def ours(given: dict[str, Any]) -> None:
    """One budget, or none: all of it packed and resident."""
    import_everything()
    found: dict[str, Any] = {}
    budget = given["budget"]

    def say() -> None:
        if budget is None:
            tell(turn=given["turn"], resident=found)
        else:
            tell(turn=given["turn"], budget=budget, ours=found)

    name = "packed, resident" if budget is None else f"{budget:g} GiB"
    guarded(name, found, lambda: measure(given, use_of(given), found, say))
    say()


def our_prefill(given: dict[str, Any]) -> None:
    """A long prompt under one budget: seconds, and what was copied for it."""
    import_everything()
    found: dict[str, Any] = {}

    def work() -> None:
        use, runs = use_of(given), 3
        if use is not None:
            use.limit(int(PREFILL_BUDGET * 2**30))
        loaded = Loaded(given, PREFILL_BUDGET, PREFILL + PROMPT)
        before = loaded.copied()
        found["prefill_s"] = prefill(loaded.model, PREFILL, runs)
        found["copied"] = (loaded.copied() - before) / (runs + 1)
        tell(prefill=found)
        loaded.close()

    guarded(f"{PREFILL} tokens", found, work)
    tell(prefill=found)


def peer(given: dict[str, Any]) -> None:
    """The same plain model offloaded by others: `accelerate`, or `diffusers`' groups with streams."""
    import torch

    import_everything()
    found: dict[str, Any] = {}

    def work() -> None:
        use, install = use_of(given), OFFLOADING[given["peer"]]()
        model = plain_model(config_of(given["shape"], given["layers"]), given["seed"]).to("cpu")
        gc.collect()
        if use is not None:
            torch.cuda.empty_cache()
            use.watch()
        model = install(model)
        generate(model, 0, 0)
        if use is not None:
            use.pause()
            found["peak"] = use.peak
        found["token_s"] = statistics.median(one_token(model) for _ in range(3))
        found["private"] = private_bytes()

    guarded(given["peer"], found, work)
    tell(peer=given["peer"], found=found)


TASKS: dict[str, Callable[[dict[str, Any]], None]] = {
    "start": start,
    "predict": predict,
    "plain": plain,
    "ours": ours,
    "prefill": our_prefill,
    "rate": rate,
    "peer": peer,
}


def perform(task: str, given: dict[str, Any]) -> None:
    """Do a task in this process."""
    TASKS[task](given)
