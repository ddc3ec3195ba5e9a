"""Writing the safetensors file of a state's tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tpde.codec.native import Bytes
from tpde.files.progress import Progress, no_progress
from tpde.format.container_reader import parse_header
from tpde.io.committed import committed
from tpde.io.sinks import FileSink


def write_weights(
    path: Path,
    header: bytes,
    read: Callable[[str], Bytes],
    where: str,
    *,
    force: bool = False,
    progress: Progress = no_progress,
) -> None:
    """Write a safetensors file, which appears when it is complete.

    Parameters
    ----------
    path : Path
        The file.
    header : bytes
        Its header.
    read : callable
        Gives the bytes of a tensor by its name.
    where : str
        What the header is from, for messages.
    force : bool
        Replace an existing file.
    progress : callable
        Called with a number of bytes of tensors when they are written.
    """
    entries = parse_header(header, where).entries
    with committed(FileSink(path, force=force)) as sink:
        sink.write(0, [len(header).to_bytes(8, "little") + header])
        for name, entry in entries.items():
            data = read(name)
            sink.write(8 + len(header) + entry.begin, [data])
            progress(data.size)
