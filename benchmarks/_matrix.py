"""One linear layer of any size: made tile by tile on the GPU, and packed into a model directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from _machine import note
from _synthetic import weight

NAME = "linear.weight"
TILE_BYTES = 1 << 30  # of the weight that is made at a time


def tile_rows(columns: int) -> int:
    """Rows that are made at a time."""
    return max(TILE_BYTES // (2 * columns), 1)


def tile(number: int, rows: int, columns: int, seed: int) -> Any:
    """A tile of the weight, as any process makes it again."""
    step = tile_rows(columns)
    begin = number * step
    return weight(NAME, (rows, columns), seed, (begin, min(begin + step, rows)))


def tiles(rows: int, columns: int) -> int:
    """How many tiles there are."""
    return -(-rows // tile_rows(columns))


def write(folder: Path, rows: int, columns: int, seed: int) -> dict[str, Any]:
    """Pack the layer piece by piece; returns sizes."""
    import torch

    import tpde
    from tpde.format.constants import SUFFIX, VERSION
    from tpde.packing.reader import PackedFile

    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "model.safetensors"
    if not file.exists():
        size = 2 * columns * tile_rows(columns)
        staging = torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        spec = tpde.TensorSpec("BF16", (rows, columns))
        with tpde.PackedWriter(file, {NAME: spec}, metadata={"format": "pt"}) as writer:
            for number in range(tiles(rows, columns)):
                made = tile(number, rows, columns, seed).reshape(-1).view(torch.uint8)
                piece = staging[: made.numel()]
                piece.copy_(made)
                writer.write(NAME, piece.numpy())
                if number % 16 == 15:
                    note(f"packed {number + 1} of {tiles(rows, columns)} tiles")
    about = {"architectures": ["Matrix"], "dtype": "bfloat16", "rows": rows, "columns": columns}
    about |= {"model_type": "matrix", "quantization_config": {"quant_method": "tpde", "version": VERSION}}
    (folder / "config.json").write_text(json.dumps(about))
    with PackedFile(file) as packed:
        entry = packed.container.entries[NAME + SUFFIX]
    return {"plain": 2 * rows * columns, "packed": entry.end - entry.begin}


def matrix_class() -> Any:
    """A model of transformers that is the layer, so that `tpde.from_pretrained` loads it."""
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel

    class MatrixConfig(PretrainedConfig):  # type: ignore[misc]
        model_type = "matrix"

        def __init__(self, rows: int = 1, columns: int = 1, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.rows, self.columns = rows, columns

    class Matrix(PreTrainedModel):  # type: ignore[misc]
        config_class = MatrixConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.linear = nn.Linear(config.columns, config.rows, bias=False)
            self.post_init()

        def forward(self, inputs_embeds: Any) -> Any:
            return self.linear(inputs_embeds)

    return Matrix
