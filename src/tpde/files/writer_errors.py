"""What a writer of packed files refuses."""

from __future__ import annotations

from collections.abc import Sequence

from tpde.errors import InvalidArgument, InvalidDestination, UnknownTensor
from tpde.files.tensor_writer import TensorWriter


def unknown_codec(codec: object) -> InvalidArgument:
    """The error for a codec that is none."""
    return InvalidArgument(
        f"no codec `{codec!s:.50}`", hint="there are auto, prefix, zstd", where="codec", found=codec
    )


def unannounced(name: str) -> UnknownTensor:
    """The error for a tensor that the writer was not told of."""
    return UnknownTensor(
        f"tensor `{name}` was not announced", hint="name it in the writer's `tensors`", where=str(name)
    )


def written_already(name: str) -> InvalidArgument:
    """The error for a tensor that comes twice."""
    return InvalidArgument(f"tensor `{name}` was written already", hint="write it once", where=name)


def begun_already(name: str) -> InvalidArgument:
    """The error for a sample that comes after what it is to decide."""
    return InvalidArgument(
        f"the sample of tensor `{name}` comes when some of the tensor is written",
        hint="call `plan` before the first `write` of the tensor",
        where=name,
    )


def no_sample(name: str, found: int, needed: int) -> InvalidArgument:
    """The error for a sample of another size."""
    return InvalidArgument(
        f"a sample of tensor `{name}` has {needed} bytes, {found} were given",
        hint="take the bytes that `sample_ranges` names, one range after the other",
        where=name,
        found=found,
        needed=needed,
    )


def too_late(name: str) -> InvalidArgument:
    """The error for a tensor that comes after the end."""
    why = f"tensor `{name}` comes when the file is complete, or was given up"
    return InvalidArgument(why, hint="write it to a new file", where=name)


def missing_tensors(names: Sequence[str]) -> InvalidArgument:
    """The error for tensors that are not there at the end."""
    return InvalidArgument(
        f"tensor `{names[0]}` is not complete ({len(names)} are not)",
        hint="write all that was announced, or call `abort`",
        where=names[0],
    )


def too_many(name: str, found: int, needed: int) -> InvalidArgument:
    """The error for more bytes than a tensor has."""
    return InvalidArgument(
        f"tensor `{name}` has {needed} bytes, {found} were given",
        hint="announce the shape that it has",
        where=name,
        found=found,
        needed=needed,
    )


def incomplete(name: str, tensor: TensorWriter, following: str) -> InvalidArgument:
    """The error for a tensor that begins before another is complete."""
    return InvalidArgument(
        f"tensor `{name}` has {tensor.size} of {tensor.spec.nbytes} bytes so far",
        hint=f"complete it before `{following}` begins",
        where=name,
        found=tensor.size,
        needed=tensor.spec.nbytes,
    )


def given_up(name: str, error: BaseException) -> InvalidDestination:
    """The error for a file that could not be written before."""
    why = str(error) or type(error).__name__
    return InvalidDestination(
        f"`{name}` was given up when a write failed ({why})",
        hint="remove the cause, or choose another destination, and write all of it anew",
        where=name,
    )
