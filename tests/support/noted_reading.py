"""Plain weights decoded from a checkpoint by readers that a test notes, delays or lets fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from support.files import WatchedFile
from tpde.io.sources import Extent, FileSource
from tpde.loading.checkpoint_files import Checkpoint
from tpde.loading.plain_weights import decode_runs
from tpde.loading.reading import Reader, Reading
from tpde.loading.runs import Run

CPU = torch.device("cpu")


def runs_of(checkpoint: Checkpoint) -> dict[str, Any]:
    return {name: Run(it.spec.shape, it.dtype, [it]) for name, it in checkpoint.packed.items()}


class Complete:
    """A batch that is being read; tells when it is there."""

    def __init__(self, reading: Reading, tell: Callable[[], None]) -> None:
        self._reading, self._tell = reading, tell

    def wait(self) -> None:
        self._reading.wait()
        self._tell()


class NotedReader(Reader):
    """Tells what it is asked for, reads by a function, and tells when a batch is there to be decoded."""

    def __init__(
        self,
        device: Any,
        *,
        note: Callable[[Sequence[Any], Sequence[Extent]], None] = lambda *_: None,
        read_into: Callable[[Any, int, memoryview], None] = FileSource.read_into,
        complete: Callable[[], None] = lambda: None,
        **options: Any,
    ) -> None:
        super().__init__(device, **options)
        self._note, self._read_into, self._complete = note, read_into, complete

    def begin(self, tensors: Sequence[Any], extents: Sequence[Extent]) -> Any:
        self._note(tensors, extents)
        watched = [
            it._replace(source=WatchedFile(it.source, partial(self._read_into, it.source))) for it in extents
        ]
        return Complete(super().begin(tensors, watched), self._complete)


def decode(
    model: Any,
    checkpoint: Checkpoint,
    room: int,
    make_reader: Callable[[Any], Reader] = Reader,
    progress: Callable[[int], None] | None = None,
) -> None:
    decode_runs(model, runs_of(checkpoint), CPU, progress, room, make_reader)
