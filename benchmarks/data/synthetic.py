"""Llamas whose weights any process makes again on the GPU, tensor by tensor, and packs without a plain copy.

A weight depends on its name, its shape and a seed alone: normal, per-row scale 0.02 * exp(0.3 * normal).
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.gpu import device
from benchmarks.harness.report import note

SHARD_BYTES = 4 << 30
CHECKED_LOGITS = "logits-{}.npy"  # of so many tokens


def weight(name: str, shape: tuple[int, ...], seed: int, rows: tuple[int, int] | None = None) -> Any:
    """A weight on the device in bf16, or only rows of it (those that `rows` of the same bounds always gives).

    Norms and other vectors are ones.
    """
    import torch

    if len(shape) != 2:
        return torch.ones(shape, dtype=torch.bfloat16, device=device())
    begin, end = rows or (0, shape[0])
    draw = torch.Generator(device())
    draw.manual_seed(zlib.crc32(f"{name} {begin} {end}".encode(), seed))  # a CPU takes 32 bits of it
    scale = 0.02 * torch.exp(0.3 * torch.randn(end - begin, 1, generator=draw, device=device()))
    values = torch.randn(end - begin, shape[1], generator=draw, device=device())
    return values.mul_(scale).to(torch.bfloat16)


class Source:
    """Tensors for `tpde.files`, made when they are read. The last one is kept on the host.

    Parameters
    ----------
    shapes : mapping of str to tuple of int
        What is in the file, all bf16.
    make : callable
        Gives a tensor, by its name and shape, on any device.
    """

    name = "synthetic"

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], make: Callable[[str, tuple[int, ...]], Any]
    ) -> None:
        from tpde.format.container import TensorSpec
        from tpde.format.container_reader import parse_header
        from tpde.format.container_writer import canonical_header

        self.specs: Mapping[str, TensorSpec] = {
            name: TensorSpec("BF16", tuple(shape)) for name, shape in shapes.items()
        }
        self.container = parse_header(canonical_header(self.specs, {"format": "pt"}), self.name)
        self.size = self.container.data_start + self.container.data_bytes
        self._make, self._staging, self._last = make, np.empty(0, np.uint8), ""

    def read(self, name: str, begin: int, end: int, out: Any) -> None:
        """Bytes of a tensor."""
        import torch

        size = self.specs[name].nbytes
        if self._last != name:
            if self._staging.size < size:  # page-locked where there is a GPU: four times faster to fill
                memory = torch.empty(size, dtype=torch.uint8, pin_memory=device() == "cuda")
                self._staging = memory.numpy()
            made = self._make(name, self.specs[name].shape).contiguous().reshape(-1).view(torch.uint8)
            torch.from_numpy(self._staging[:size]).copy_(made)
            self._last = name
        out[:] = self._staging[:size][begin:end]

    def read_small(self, names: Sequence[str]) -> list[memoryview]:
        """All bytes of some tensors, one after the other."""
        found = [np.empty(self.specs[name].nbytes, np.uint8) for name in names]
        for name, out in zip(names, found, strict=True):
            self.read(name, 0, out.size, out)
        return [out.data for out in found]

    def close(self) -> None:
        """Nothing is held that would need it."""


def tensors_of(config: Any) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a model's parameters."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    return {name: tuple(it.shape) for name, it in model.named_parameters()}


def shards_of(shapes: Mapping[str, tuple[int, ...]], limit: int = SHARD_BYTES) -> list[list[str]]:
    """Tensors by file: whole blocks, in the order of a forward pass."""
    from tpde.files.forward_order import block_of, forward_order

    files: list[list[str]] = [[]]
    filled, before = 0, None
    for name in forward_order(shapes):
        size, block = 2 * int(np.prod(shapes[name])), block_of(name)
        if filled + size > limit and (block is None or block != before) and files[-1]:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled, before = filled + size, block
    return files


def write_packed(directory: Path, config: Any, seed: int) -> dict[str, Any]:
    """Make and pack a model; returns what the report needs."""
    from tpde.files.file_writer import FileWriter
    from tpde.files.forward_order import block_of
    from tpde.files.pack_file import pack_tensors
    from tpde.files.reader import PackedFile
    from tpde.format.constants import SUFFIX, VERSION

    shapes, start = tensors_of(config), time.perf_counter()
    files, places, stored = shards_of(shapes), dict[str, str](), dict[str, int]()
    directory.mkdir(parents=True, exist_ok=True)
    for number, names in enumerate(files, 1):
        file = f"model-{number:05}-of-{len(files):05}.safetensors"
        source = Source({name: shapes[name] for name in names}, lambda name, shape: weight(name, shape, seed))
        if not (directory / file).exists():
            with FileWriter(
                directory / file,
                source.specs,
                metadata=source.container.metadata,
                source_header=source.container,
            ) as writer:
                pack_tensors(source, writer)
            note(f"packed {file}, {time.perf_counter() - start:.1f} s so far")
        with PackedFile(directory / file) as packed:
            entries = packed.container.entries
            places.update(dict.fromkeys(entries, file))
            for key, entry in entries.items():
                stored[key.removesuffix(SUFFIX)] = entry.end - entry.begin
    total = sum(stored.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    about = config.to_dict() | {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    about["quantization_config"] = {"quant_method": "tpde", "version": VERSION}
    (directory / "config.json").write_text(json.dumps(about))
    units: dict[str, int] = {}
    for name in shapes:
        if "embed" not in name:
            unit = block_of(name) or name
            units[unit] = units.get(unit, 0) + 2 * int(np.prod(shapes[name]))
    return {
        "pack_s": time.perf_counter() - start,
        "packed_bytes": total,
        "plain_bytes": sum(2 * int(np.prod(shape)) for shape in shapes.values()),
        "streamed_packed": sum(size for name, size in stored.items() if "embed" not in name),
        "streamed_plain": sum(units.values()),
        "largest_unit": max(units.values()),
    }


def plain_model(config: Any, seed: int) -> Any:
    """The same model, plain, on the device."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device(device()):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weight(name, tuple(parameter.shape), seed))
    return model.eval()
