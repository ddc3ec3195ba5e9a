"""`tpde.PackedWriter`: a packed file written by hand, from tensors in pieces."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

from tpde.codec.native import Bytes
from tpde.codec.selection import CodecName, sample_ranges
from tpde.errors import InvalidInput
from tpde.files.file_writer import FileWriter
from tpde.files.given_tensors import piece_bytes, require_mapping, spec_like
from tpde.files.packed_header import given_metadata
from tpde.io.paths import given_path

if TYPE_CHECKING:
    from typing_extensions import Self


class PackedWriter:
    """Writes a packed file from tensors given in pieces, so that a source may be larger than memory.

    The file appears when the writer is closed without an error, and not before; leaving the `with` block
    by an exception removes every trace of it, and so does a writer that nobody has any longer.

    Parameters
    ----------
    destination : path-like
        Where the file goes.
    tensors : mapping of str to TensorSpec, torch.Tensor or ndarray
        All tensors that will be written. Of a tensor, its dtype and shape alone are taken.
    metadata : mapping of str to str, optional
        Kept, and restored when the file is unpacked. Its keys are not `tpde`, nor begin with `tpde.`.
    threads : int, optional
        How many threads encode; by default one for each processor. The file does not depend on it.
    codec : {"auto", "prefix", "zstd"}
        Which codec to use where a tensor shrinks at all.
    force : bool
        Replace an existing file.

    Raises
    ------
    InvalidInput, UnsupportedDtype
        If a name, a tensor or the metadata is nothing that a file can hold. Nothing is written then.
    DestinationExists, InvalidDestination
        If the file cannot be written.

    Examples
    --------
    >>> from tpde import PackedWriter, TensorSpec
    >>> spec = TensorSpec("BF16", (1 << 20, 4096))
    >>> with PackedWriter("big.safetensors", {"weight": spec}) as writer:  # doctest: +SKIP
    ...     for rows in pieces:  # tensors of PyTorch in bfloat16, on any device
    ...         writer.write("weight", rows)
    """

    def __init__(
        self,
        destination: str | os.PathLike[str],
        tensors: Mapping[str, object],
        *,
        metadata: Mapping[str, str] | None = None,
        threads: int | None = None,
        codec: CodecName = "auto",
        force: bool = False,
    ) -> None:
        require_mapping(tensors)
        given_path(destination)  # and no sink
        self._file = FileWriter(
            destination,
            {name: spec_like(name, it) for name, it in tensors.items()},
            metadata=given_metadata(metadata),
            threads=threads,
            codec=codec,
            force=force,
        )

    def sample_ranges(self, name: str) -> list[tuple[int, int]]:
        """Which bytes of a tensor `plan` takes: begins and ends."""
        return sample_ranges(self._file.spec(name))

    def plan(self, name: str, sample: bytes | bytearray | memoryview | Bytes) -> bool:
        """Decide how to store a tensor before its bytes come; returns whether it will be packed.

        Without this, its first bytes are the sample.

        Parameters
        ----------
        name : str
            The tensor.
        sample : bytes-like
            The bytes that `sample_ranges` names, one range after the other.

        Raises
        ------
        InvalidArgument
            If there are more or fewer, or some of the tensor is written already.
        UnknownTensor
            If no such tensor was announced.
        """
        return self._file.plan(name, sample)

    def write(self, name: str, data: object) -> None:
        """Write a tensor's next elements.

        Tensors may come in any order, but each must be complete before the next begins.

        Parameters
        ----------
        name : str
            The tensor.
        data : torch.Tensor, ndarray or bytes-like
            Any number of elements. Tensors of PyTorch, on any device, and arrays have the dtype that was
            announced; an array of bytes, or of unsigned integers as wide, is taken as the elements' bits.

        Raises
        ------
        InvalidArgument
            If it has another dtype, or more elements than are left; if another tensor is not complete, or
            the file is, or was given up. What is right may still come.
        UnknownTensor
            If no such tensor was announced.
        OSError
            If it cannot be written. The file is given up then, and no trace of it is left.
        InvalidDestination
            If a write has failed before.
        """
        self._file.write(name, piece_bytes(name, data, self._file.spec(name)))

    def close(self) -> None:
        """Complete the file. Where that fails, nothing of it is left.

        Once it is complete, or was aborted, this does nothing.

        Raises
        ------
        InvalidArgument
            If a tensor is missing or incomplete.
        InvalidDestination
            If a write has failed.
        """
        self._file.close()

    def abort(self) -> None:
        """Leave no trace of the file, unless it is complete."""
        self._file.abort()

    def __reduce__(self) -> NoReturn:
        raise InvalidInput(
            "a `PackedWriter` writes its file in the process that made it",
            hint="make one there, or send it the tensors",
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.__exit__(kind, error, trace)
