"""Saving and loading PyTorch tensors packed, in the manner of `safetensors.torch`.

`from tpde.torch import save_file, load_file` in the place of `from safetensors.torch import ...` is
enough to try it. Loading takes plain safetensors files too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

from tpde.access import Backend, safe_open
from tpde.errors import InvalidInput
from tpde.files.file_writer import FileWriter
from tpde.files.forward_order import forward_order
from tpde.files.given_tensors import refuse_without_bytes, require_mapping, require_module
from tpde.files.model_state import identity, load_state, place
from tpde.files.packed_header import given_metadata, is_own_key
from tpde.format.container import TensorSpec
from tpde.frameworks import torch_bytes, torch_spec
from tpde.io.sinks import BytesSink

if TYPE_CHECKING:
    import torch


def _specs(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorSpec]:
    require_mapping(tensors)
    specs = {name: torch_spec(name, tensor) for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        refuse_without_bytes(name, tensor)
        if not tensor.is_contiguous():
            raise InvalidInput(
                f"tensor `{name}` is not contiguous, and saving it would change its layout",
                hint="call `.contiguous()` first",
                where=name,
            )
    _refuse_shared(tensors)
    return specs


def _refuse_shared(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse tensors that overlap in memory; disjoint parts of one storage are fine."""
    places = sorted((str(it.device), *place(it), name) for name, it in tensors.items() if it.numel())
    for (device, at, size, name), (other_device, other_at, _, other) in pairwise(places):
        if device == other_device and other_at < at + size:
            raise InvalidInput(
                f"tensors `{name}` and `{other}` share memory, which a file cannot keep",
                hint="save only one of them, or `.clone()` one",
                where=name,
            )


def _write(tensors: Mapping[str, torch.Tensor], writer: FileWriter) -> None:
    from tpde.files.gpu_packing import packed_there

    given = ((name, tensors[name]) for name in forward_order(tensors))
    with writer:
        for made in packed_there(given, writer.codec, writer.may_pack, writer.threads):
            if made.blob is not None:
                writer.write_blob(made.name, made.blob.cpu().numpy())
            else:
                writer.write(made.name, torch_bytes(made.tensor))


def save_file(
    tensors: Mapping[str, torch.Tensor],
    filename: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
    *,
    threads: int | None = None,
) -> None:
    """Pack tensors into a file, replacing what is there.

    Parameters
    ----------
    tensors : mapping of str to torch.Tensor
        Dense and contiguous, none sharing memory with another; on any device.
    filename : path-like
        The file. It appears when it is complete.
    metadata : mapping of str to str, optional
        Kept, and restored when the file is unpacked. Its keys are not `tpde`, nor begin with `tpde.`.
    threads : int, optional
        Of the host, which encode what is there, and choose codes for what is on a GPU, to be encoded there.
        By default one for each processor; the file does not depend on it.

    Raises
    ------
    InvalidInput, UnsupportedDtype, InvalidDestination
        If a tensor cannot be saved, or the file not written.

    Examples
    --------
    >>> import torch
    >>> from tpde.torch import save_file
    >>> save_file({"weight": torch.zeros(3, 4)}, "model.safetensors")  # doctest: +SKIP
    """
    given = given_metadata(metadata)
    _write(tensors, FileWriter(filename, _specs(tensors), metadata=given, threads=threads, force=True))


def save(
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str] | None = None,
    *,
    threads: int | None = None,
) -> bytes:
    """Pack tensors into bytes; see `save_file`."""
    specs = _specs(tensors)
    sink = BytesSink(sum(spec.nbytes for spec in specs.values()) + (1 << 20))
    _write(tensors, FileWriter(sink, specs, metadata=given_metadata(metadata), threads=threads))
    return bytes(sink.data)


def load_file(
    filename: str | os.PathLike[str],
    device: str | int | torch.device = "cpu",
    *,
    threads: int | None = None,
    backend: Backend = "mmap",
) -> dict[str, torch.Tensor]:
    """Load all tensors of a packed (or plain) file.

    Parameters
    ----------
    filename : path-like
        The file.
    device : str, int or torch.device
        Where the tensors go.
    threads : int, optional
        By default one for each processor.
    backend : {"mmap", "pread"}
        As of `tpde.safe_open`.

    Returns
    -------
    dict of str to torch.Tensor
        Bit for bit what was saved.

    Raises
    ------
    Truncated, Corrupt, UnsupportedVersion, UnsupportedDtype, InvalidInput
        If the file cannot be read.
    UnsupportedDevice
        If the device is none, or not there.
    """
    with safe_open(filename, framework="pt", device=device, threads=threads, backend=backend) as file:
        return file.get_tensors()


def save_model(
    model: torch.nn.Module,
    filename: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
    force_contiguous: bool = True,
    *,
    threads: int | None = None,
) -> None:
    """Pack the state dict of a model into a file, as `safetensors.torch.save_model` saves it plain.

    Of names that share one tensor, such as tied weights, the file holds the first in alphabetical order; its
    metadata says of each other one which that is, but for `tpde` and what begins with `tpde.`: such keys are
    the format's own, and `load_model` needs none.

    Parameters
    ----------
    model : torch.nn.Module
        On any devices. Its packed weights are saved packed.
    filename : path-like
        The file. It appears when it is complete, in the place of what is there.
    metadata : mapping of str to str, optional
        Kept, beside what is said of shared tensors.
    force_contiguous : bool
        Save tensors that are not contiguous as if they were. Otherwise they are refused.
    threads : int, optional
        As of `save_file`.

    Raises
    ------
    InvalidInput, UnsupportedDtype, InvalidDestination
        If a tensor cannot be saved, or the file not written.

    Examples
    --------
    >>> tpde.torch.save_model(model, "model.safetensors")  # doctest: +SKIP
    >>> tpde.torch.load_model(model, "model.safetensors")  # doctest: +SKIP
    (set(), [])
    """
    require_module(model, "save_model")
    state, kept, said = model.state_dict(), {}, dict(metadata or {})
    first: dict[tuple[object, ...], str] = {}
    for name in sorted(state):
        tensor = state[name]
        torch_spec(name, tensor)  # which names what cannot be saved
        other = first.setdefault(identity(tensor), name)
        if tensor.numel() and other != name:
            if not is_own_key(name):
                said.setdefault(name, other)
        else:
            if tensor.is_conj() or tensor.is_neg():  # it may be there as it lies in memory, too
                tensor = tensor.resolve_conj().resolve_neg()
            kept[name] = tensor.contiguous() if force_contiguous else tensor
    save_file(kept, filename, said or None, threads=threads)


def load_model(
    model: torch.nn.Module,
    filename: str | os.PathLike[str],
    strict: bool = True,
    device: str | int | torch.device = "cpu",
    *,
    threads: int | None = None,
    backend: Backend = "mmap",
) -> tuple[set[str], list[str]]:
    """Load a packed (or plain) file into a model, as `safetensors.torch.load_model` does.

    Parameters
    ----------
    model : torch.nn.Module
        Its parameters and buffers get the file's bits, cast where they have another dtype than the file.
        Packed ones must have them already.
    filename : path-like
        The file.
    strict : bool
        Refuse a file that lacks tensors of the model, or has others.
    device : str, int or torch.device
        Where tensors are decoded before they are copied into the model.
    threads : int, optional
        By default one for each processor.
    backend : {"mmap", "pread"}
        As of `tpde.safe_open`.

    Returns
    -------
    missing : set of str
        Tensors of the model that the file lacks, but for those that lie in one that it has, and those that
        modules find under other names or do without, as `load_state_dict` says.
    unexpected : list of str
        Tensors of the file that the model does not take. Of names that are one tensor of the model, and
        differ in the file, all but one.

    Raises
    ------
    InvalidInput
        If `strict`, and there are any of them; if shapes differ; or if a tensor of the model is on the `meta`
        device, where there is no memory. The model is as it was then.
    PackedWeight
        If a packed weight has other bits: nothing is loaded then.
    Truncated, Corrupt, UnsupportedVersion, UnsupportedDtype
        If the file cannot be read.
    UnsupportedDevice
        If the device is none, or not there.

    Notes
    -----
    Takes the file's tensors beside the model; and once more the model's plain ones where names or shapes
    differ, which modules may know better: they are put back if the file is refused.
    """
    require_module(model, "load_model")
    own = model.state_dict().items()
    if (empty := next((name for name, it in own if getattr(it, "is_meta", False)), None)) is not None:
        raise InvalidInput(
            f"tensor `{empty}` of the model is on the `meta` device, where nothing can be loaded",
            hint="call `model.to_empty(device=...)` first",
            where=empty,
        )
    state = load_file(filename, device, threads=threads, backend=backend)
    return load_state(model, state, os.fspath(filename), strict)


def load(data: bytes, *, threads: int | None = None) -> dict[str, torch.Tensor]:
    """Load all tensors from the bytes of a packed (or plain) file; see `load_file`."""
    with safe_open(data, framework="pt", threads=threads) as file:
        return file.get_tensors()
