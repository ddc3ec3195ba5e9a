"""Models of one architecture in one dtype, plain and packed; what two plain runs agree on."""

from __future__ import annotations

import gc
import random
import re
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

import tpde
import tpde.nn

from .architecture import SEED, Architecture
from .bits import Differs, kept, same_all
from .shrink import Absent, Unbuilt

TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MIN_BYTES = 256
LARGE = 8192  # bytes; of half of that, fp16 saves less than a blob's header and tables take
_KEEP = ("A_log", "decay", "time_", "rotation")  # weights that are no matrices: their values must stay sane


_FOLDER = re.compile(r"/?zoo-\w{8}")  # names that change from run to run


class PlainFails(Exception):
    """The plain model cannot do this either, or does not do it twice the same way."""


class NothingPacked(AssertionError):
    """The check would prove nothing."""


def one_line(error: BaseException) -> str:
    """Say an error in one line: for those of ours and of transformers the text is enough."""
    text = " ".join(str(error).split()).replace(tempfile.gettempdir(), "")
    text = _FOLDER.sub("folder", text)[:240]
    return text if isinstance(error, (Differs, NothingPacked)) else f"{type(error).__name__}: {text}"


def seeded() -> None:
    """Start all random numbers again."""
    torch.manual_seed(SEED)
    numpy.random.seed(SEED)
    random.seed(SEED)


class Case:
    """An architecture in a dtype.

    Models are made anew for each use, always with the same weights: nothing that one check does to a model
    is seen by another.
    """

    def __init__(self, architecture: Architecture, dtype: str) -> None:
        self.architecture = architecture
        self.dtype = TORCH[dtype]
        self._folders: list[Path] = []

    def plain(self) -> Any:
        """Make a plain model: normal weights of deviation 0.02, vectors near where they start.

        Raises
        ------
        Absent
            If the installed libraries do not have it.
        Unbuilt
            If it cannot be made.
        """
        seeded()
        try:
            model = self.architecture.build()
        except Unbuilt:
            raise
        except ImportError as error:
            raise Absent(one_line(error)) from error
        except Exception as error:
            raise Unbuilt(f"cannot be built: {one_line(error)}") from error
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() < 2:
                    parameter.add_(torch.randn_like(parameter), alpha=0.02)
                elif not any(word in name for word in _KEEP):
                    parameter.normal_(0, 0.02)
            for module in model.modules():  # some models zero these whenever they are loaded
                if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                    module.weight[module.padding_idx] = 0
        if hasattr(model, "tie_weights"):
            model.tie_weights()
        return model.to(self.dtype).eval()

    @staticmethod
    def pack(model: Any) -> Any:
        """Pack a model.

        Raises
        ------
        NothingPacked
            If most of its larger weights stayed plain.
        """
        large = large_weights(model)
        return mostly_packed(tpde.pack_module(model, min_bytes=MIN_BYTES), large)

    def packed(self) -> Any:
        """Make a packed model of the plain one's weights."""
        return self.pack(self.plain())

    def cast(self, given: dict[str, Any]) -> dict[str, Any]:
        """Cast what is given in floating point to the model's dtype."""
        return {
            name: value.to(self.dtype)
            if isinstance(value, torch.Tensor) and value.is_floating_point()
            else value
            for name, value in given.items()
        }

    def forward(self, model: Any) -> dict[str, torch.Tensor]:
        """Give all tensors that a forward pass returns, with random numbers from their start."""
        seeded()
        with torch.no_grad():
            return kept(model(**self.cast(self.architecture.inputs())))

    def folder(self) -> Path:
        """Make a temporary folder."""
        folder = Path(tempfile.mkdtemp(prefix="zoo-"))
        self._folders.append(folder)
        return folder

    def close(self) -> None:
        """Remove the folders, and free the models."""
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)
        self._folders.clear()
        gc.collect()


def large_weights(model: nn.Module) -> set[str]:
    """Name the modules whose weights shrink in any dtype, as far as they can be packed at all."""
    kinds = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    sizes = {name: it.numel() * it.element_size() for name, it in model.named_parameters()}
    places = {name: f"{name}.weight" for name, it in model.named_modules() if isinstance(it, kinds)}
    return {name for name, place in places.items() if sizes.get(place, 0) >= LARGE}


def mostly_packed(model: Any, large: set[str]) -> Any:
    """Give the model, if it is packed so far that a check of it proves something.

    Raises
    ------
    NothingPacked
        If nothing is, or less than half of the larger weights.
    PlainFails
        If there is nothing to pack.
    """
    packed = {name for name, _ in tpde.nn.packed_modules(model)}
    if not packed and not large:
        raise PlainFails("has no larger weights of a kind that is packed")
    if not packed or 2 * len(packed & large) < len(large):
        raise NothingPacked(
            f"{len(packed & large)} of {len(large)} larger weights are packed: the check would prove little"
        )
    return model


def agreed(run: Callable[[], dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Do something with plain models twice, and give what came out.

    Raises
    ------
    PlainFails
        If it fails, or two runs differ.
    Unbuilt
        If the plain model cannot be made at all.
    """
    try:
        first, second = run(), run()
    except Unbuilt:
        raise
    except Exception as error:
        raise PlainFails(one_line(error)) from error
    try:
        same_all(second, first)
    except Differs as error:
        raise PlainFails(f"two plain runs differ: {error}") from error
    return first


def place(case: Case, plain: Any, packed: Any) -> str:
    """Name the first module whose output differs, for the reader of a failure."""
    seen: list[list[tuple[str, str, dict[str, torch.Tensor]]]] = [[], []]
    for model, calls in zip((plain, packed), seen, strict=True):
        handles = []
        for name, module in model.named_modules():

            def note(module: nn.Module, args: Any, out: Any, name: str = name, calls: Any = calls) -> None:
                given = ", ".join(
                    f"{list(arg.shape)}/{list(arg.stride())}" for arg in args if isinstance(arg, torch.Tensor)
                )
                calls.append((name, f"{_kind(module)} of {given}", kept(out)))

            handles.append(module.register_forward_hook(note))
        with suppress(Exception):
            case.forward(model)
        for handle in handles:
            handle.remove()
    for (name, kind, expected), (_, _, found) in zip(*seen, strict=False):
        try:
            same_all(found, expected, "output")
        except Differs as error:
            return f"first in `{name}` ({kind}) {error}"
    return ""


def _kind(module: nn.Module) -> str:
    return type(module).__name__
