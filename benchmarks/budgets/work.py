"""What `budgets` does in its processes: make a model, run it plain, run it under a budget."""

from __future__ import annotations

import gc
import shutil
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.budgets.cases import (
    cases,
    device_of,
    difference,
    inputs_of,
    peak_of,
    perform_case,
    saved,
    unsure,
)
from benchmarks.data.shapes import SHAPES, Shape, class_of, model_of
from benchmarks.harness.card import Use
from benchmarks.harness.gpu import need_cuda, wait
from benchmarks.harness.machine import gpu
from benchmarks.harness.processes import guarded, reason, tell
from benchmarks.harness.report import note

IMAGES = 1536 << 20  # bytes for what a transformer of images computes: 1226 MiB by the tensors alive
MOST = 1 << 50  # bytes of a budget in which all fits


def spread(model: Any, seed: int) -> None:
    """Give matrices normal numbers whose scale varies by row; vectors stay as they are."""
    import torch

    for number, weight in enumerate(model.parameters()):
        if weight.dim() < 2:
            continue
        draw = torch.Generator(weight.device).manual_seed(seed + number)
        rows = weight.data.flatten(0, -2) if weight.dim() == 3 else weight.data.flatten(1)
        for part in rows.split(max((64 << 20) // rows.shape[1], 1)):  # large ones need no copy in float32
            scale = torch.randn(part.shape[0], 1, generator=draw, device=weight.device)
            values = torch.randn(part.shape, generator=draw, device=weight.device)
            part.copy_(values.mul_(0.02 * torch.exp(0.3 * scale)))


def make(given: dict[str, Any]) -> None:
    """Make a model, run it plain, keep what it gives, and pack it."""
    import torch

    import tpde

    shape, where = SHAPES[given["shape"]], device_of(given)
    base, start = Path(given["dir"]), time.perf_counter()
    torch.manual_seed(given["seed"])
    with torch.device(where):
        model = model_of(shape, given["tiny"])
    spread(model, given["seed"])
    nbytes = sum(it.numel() * it.element_size() for it in model.parameters())
    model.save_pretrained(base / "plain", max_shard_size="2GB")
    del model
    gc.collect()
    if where == "cuda":
        torch.cuda.empty_cache()
    made_s = time.perf_counter() - start
    model = load_plain(shape, base / "plain", where)
    for case, batch in cases(shape):
        took = inputs_of(given, shape, case, batch)
        row: dict[str, Any] = {"case": case, "batch": batch}
        results: list[Any] = []
        try:
            with peak_of(given, row):
                results = perform_case(model, shape, case, took)
            row["unsure"] = unsure(results, partial(perform_case, model, shape, case, took))
        except Exception as error:  # the other cases can be compared all the same
            traceback.print_exc()
            tell(problem=f"the plain model, {case} {batch}: {reason(error)}")
        del took
        folder = saved(given, case, batch)
        folder.mkdir()
        for number, it in enumerate(results):
            np.save(folder / f"{number:02}.npy", it)
        tell(plain=row)
    del model
    ran_s = time.perf_counter() - start - made_s
    tpde.pack(base / "plain", base / "packed")
    shutil.rmtree(base / "plain")
    packed = sum(it.stat().st_size for it in (base / "packed").glob("*.safetensors"))
    took_s = time.perf_counter() - start
    note(f"{given['shape']}: made {made_s:.1f} s, ran {ran_s:.1f} s, {took_s:.1f} s with packing")
    tell(made={"plain": nbytes, "packed": packed, "seconds": took_s})
    tell(budgets=budgets(given, shape, base / "packed"))


def load_plain(shape: Shape, folder: Path, where: str) -> Any:
    """As anyone would."""
    import torch

    if shape.inputs == "image":
        return class_of(shape).from_pretrained(folder, torch_dtype=torch.bfloat16).to(where).eval()
    there = {} if where == "cpu" else {"device_map": {"": 0}}  # buffers are computed where ours are, then
    return class_of(shape).from_pretrained(folder, dtype="auto", **there).eval()


def plan_of(shape: Shape, packed: Path, vram: int, max_tokens: int, where: str) -> Any:
    """The plan for a budget: what `tpde plan` prints."""
    import torch

    from tpde.planning.budget import Budget

    if shape.inputs == "image":
        from tpde.integrations.diffusers import load_model
        from tpde.integrations.diffusers.streamed import planned
        from tpde.loading.checkpoint_files import Checkpoint

        with Checkpoint(load_model.weight_files(packed, None)) as checkpoint:
            specs = checkpoint.plain | {name: it.spec for name, it in checkpoint.packed.items()}
            model = load_model.build(class_of(shape), packed, torch.bfloat16)
            runs, _ = load_model._sort(model, checkpoint, specs, torch.bfloat16)
            streaming = planned(model, runs, torch.device("meta"), Budget(vram, activations=IMAGES))
        return streaming.plans[torch.device("meta")]
    from tpde.integrations.transformers.budget_plan import plan_streaming
    from tpde.integrations.transformers.shape import opened_shape

    with opened_shape(packed) as (model, checkpoint, weights):
        return plan_streaming(model, checkpoint, weights, Budget(vram, None, max_tokens))


def budgets(given: dict[str, Any], shape: Shape, packed: Path) -> dict[str, int]:
    """The least that works, and half of what all of it takes, or what lies between the two; in bytes."""
    from tpde.errors import OutOfMemory

    where, tokens = device_of(given), given["max_tokens"]
    every = plan_of(shape, packed, MOST, tokens, where).used
    try:
        plan_of(shape, packed, 1, tokens, where)
    except OutOfMemory as error:
        least = error.least or every
    half = every // 2
    return {"tight": least, "roomy": half if half > 1.05 * least else (least + every) // 2, "all": every}


def load_ours(given: dict[str, Any], shape: Shape) -> Any:
    """The packed model under its budget; on a processor, under one in which all fits."""
    import torch

    import tpde

    packed, where = Path(given["dir"]) / "packed", device_of(given)
    if shape.inputs == "image":
        from tpde.integrations.diffusers import load

        options = {} if where == "cpu" else {"vram": given["budget"], "activations": IMAGES}
        return load(class_of(shape), packed, where, **options)
    if where == "cuda":
        return tpde.from_pretrained(packed, vram=given["budget"], max_tokens=given["max_tokens"])
    from tpde.integrations.transformers.load_target import loading_to
    from tpde.loading.collection import collecting_later
    from tpde.planning.budget import Budget

    with collecting_later(), loading_to(torch.device("cpu"), Budget(MOST, None, given["max_tokens"])):
        return class_of(shape).from_pretrained(packed, dtype="auto")


def attempt(work: Callable[[], str]) -> tuple[str, str]:
    """What becomes of a case: `equal`, `DIFFERS`, `out of memory`, `refused` or `error`; and more on that."""
    import torch

    from tpde.errors import OutOfMemory

    try:
        found = work()
    except OutOfMemory as error:
        return "refused", reason(error)
    except torch.OutOfMemoryError as error:
        traceback.print_exc()
        return "out of memory", str(error).split("\n")[0]
    except Exception as error:
        traceback.print_exc()
        return "error", reason(error)
    return ("DIFFERS", found) if found else ("equal", "")


def ours(given: dict[str, Any]) -> None:
    """The packed model under one budget."""
    shape, where = SHAPES[given["shape"]], device_of(given)
    use = Use() if where == "cuda" else None
    start = time.perf_counter()
    if use is not None:
        use.watch()
    model: Any = None

    def load() -> str:
        nonlocal model
        model = load_ours(given, shape)
        return ""

    how, why = attempt(load)
    note(f"{given['shape']} {given['budget_name']}: loaded in {time.perf_counter() - start:.1f} s ({how})")
    if model is None:
        tell(ours={"case": "load", "batch": 0, "how": how, "why": why, "peak": use.peak if use else 0})
        return
    plans = list(model.tpde_streamer.plans.values()) if hasattr(model, "tpde_streamer") else []
    tell(plan={key: size for plan in plans for key, size in plan.parts.items() if size})
    for case, batch in cases(shape):
        took = inputs_of(given, shape, case, batch)
        row: dict[str, Any] = {"case": case, "batch": batch}
        if use is not None:
            use.pause()
            use.watch()  # from a peak of nothing, for each

        def work(case: str = case, batch: int = batch, took: dict[str, Any] = took) -> str:
            files = sorted(saved(given, case, batch).glob("*.npy"))
            expected = [np.load(file, mmap_mode="r") for file in files]
            found = difference(expected, perform_case(model, shape, case, took))
            if not found:
                return ""
            again = [difference(expected, perform_case(model, shape, case, took)) for _ in range(2)]
            return f"{found}; two more runs: {'; '.join(it or 'equal' for it in again)}"

        began = time.perf_counter()
        with peak_of(given, row):
            row["how"], row["why"] = attempt(work)
        row["seconds"] = time.perf_counter() - began
        del took
        if use is not None:
            use.now()
            row["peak"] = use.peak
        tell(ours=row)
    if use is not None:
        use.pause()  # its thread asks the driver, and a process must not end meanwhile
    if plans:
        model.tpde_streamer.check()
        model.tpde_streamer.close()
    wait()


def head(given: dict[str, Any]) -> None:
    """Say what machine this is: a process of its own, since it looks at the GPU."""
    if device_of(given) == "cuda":
        need_cuda()
    tell(gpu=gpu() if device_of(given) == "cuda" else "")


TASKS = {"head": head, "make": make, "ours": ours}


def perform(task: str, given: dict[str, Any]) -> None:
    """Do a task in this process, and tell what went wrong."""
    import torch

    # Its attention gives a plain model other bits from run to run: in 9 to 12 of 12 runs of Llama and Phi-3
    # on an H200 with PyTorch 2.11, eight sequences of which four are padded. With any other it was none.
    torch.backends.cuda.enable_cudnn_sdp(False)
    guarded(TASKS, task, given)
