"""A model's packed weights as the units of a streaming plan."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn

from tpde.codec.registry import codec_of
from tpde.errors import Corrupt, Truncated, UnsupportedVersion
from tpde.files.forward_order import forward_order
from tpde.format.blob_header import MAX_FIXED_BYTES, BlobHeader, align, parse_blob_header
from tpde.format.constants import MAX_PREFIX_CHUNK_WORDS, RECORD_BYTES
from tpde.io.sources import read
from tpde.loading.checkpoint_files import Stored
from tpde.loading.footprint import ALIGN
from tpde.loading.runs import Run
from tpde.loading.window_weights import windows_of
from tpde.nn.embedding import gathers
from tpde.nn.replace import block_path
from tpde.nn.routing import routes
from tpde.nn.tiles import least_tile_bytes
from tpde.planning.units import Unit

TABLES_BYTES = 16 << 10  # expanded tables of a tensor on a GPU (docs/notes/gpu-decode.md)
DESCRIPTOR_BYTES = 2 << 10  # of a tensor's pieces: a few of 136 bytes each
EXPERT_BYTES = 512  # of an expert's pieces in a fused weight
TILE_BYTES = 16 << 20  # smaller tiles of a matrix spend more on launches than on copies


def unit_of(model: Any, name: str) -> str:
    """The unit that a packed parameter belongs to: its block, or its module if it is in none.

    A parameter that is tied belongs where it is used whole: an embedding to the head that shares its weight.
    """
    path = _users(model, name)[0].rpartition(".")[0]
    return block_path(model, path) or path


def _users(model: Any, name: str) -> list[str]:
    """A parameter and those tied to it; without embeddings, if any of them is used whole."""
    names = _ties(model).get(name, [name])
    if len(names) == 1:
        return names
    return [it for it in names if not _is_rows(model, it)] or names


def _ties(model: Any) -> dict[str, list[str]]:
    """For each tied parameter those that it is tied to, in the model's order."""
    groups: dict[str, list[str]] = {}
    for target, source in getattr(model, "all_tied_weights_keys", {}).items():
        groups.setdefault(source, [source]).append(target)
    return {name: sorted(group) for group in groups.values() for name in group}


def _is_rows(model: nn.Module, name: str) -> bool:
    return gathers(type(model.get_submodule(name.rpartition(".")[0])))


def units_of(
    model: Any,
    runs: Mapping[str, Run[Stored]],
    only: Collection[str] | None = None,
    fused: Collection[str] = (),
) -> list[Unit]:
    """The units of a model, in the order of a forward pass.

    Parameters
    ----------
    model : nn.Module
        On the `meta` device.
    runs : mapping of str to Run
        Its packed parameters, as runs of `Stored`.
    only : collection of str, optional
        Parameters that count; by default all.
    fused : collection of str
        Parameters that linear layers may multiply from the window layout.

    Raises
    ------
    Truncated, Corrupt, UnsupportedVersion
        If the header of a packed tensor is damaged.
    """
    members: dict[str, list[str]] = {}
    for name in runs:
        if only is None or name in only:
            members.setdefault(unit_of(model, name), []).append(name)
    order = forward_order(f"{unit}.weight" for unit in members)
    units = (it.rpartition(".")[0] for it in order)
    return [_unit(model, runs, unit, members[unit], fused) for unit in units]


def _unit(
    model: Any, runs: Mapping[str, Run[Stored]], unit: str, names: Sequence[str], fused: Collection[str]
) -> Unit:
    stored: dict[str, Stored] = {}
    weights: dict[tuple[str, ...], int] = {}
    for name in names:
        parts = runs[name].parts
        stored.update({part.name: part for part in parts})
        weights[tuple(part.name for part in parts)] = align(runs[name].nbytes, ALIGN)
    headers = {it: header_of(it) for it in stored.values()}
    experts = sum(runs[name].shape[0] for name in names if is_routed(model, runs, name))
    users = sorted({user for name in names for user in _users(model, name)})
    tile, row = _tile(model, users)
    rows = all(_is_rows(model, it) for it in users)
    plain = sum(weights.values())
    windows = None
    if not rows and not experts:
        windows = windows_of({name: runs[name] for name in names}, fused, headers, plain)
    return Unit(
        name=unit,
        packed=sum(it.extent.size for it in stored.values()),
        plain=plain,
        index=EXPERT_BYTES * experts
        + sum(
            align(RECORD_BYTES * it.chunks, ALIGN) + TABLES_BYTES + DESCRIPTOR_BYTES
            for it in headers.values()
        ),
        rows=rows,
        tile=tile,
        row=row,
        resident=any(codec_of(it).stays for it in headers.values()),
        windows=windows,
    )


def is_routed(model: nn.Module, runs: Mapping[str, Run[Stored]], name: str) -> bool:
    """Whether a packed parameter is a fused one of experts, of which calls need some."""
    return len(runs[name].shape) == 3 and routes(type(model.get_submodule(name.rpartition(".")[0])))


def header_of(stored: Stored) -> BlobHeader:
    """A blob's header, without its index map.

    Raises
    ------
    Truncated, Corrupt, UnsupportedVersion
        If it is damaged.
    """
    extent = stored.extent
    head = read(extent.source, extent.offset, min(MAX_FIXED_BYTES, extent.size))
    try:
        return parse_blob_header(head, extent.size)
    except (Corrupt, Truncated, UnsupportedVersion) as error:
        raise error.of_tensor(stored.name) from None


def _tile(model: Any, names: Sequence[str]) -> tuple[int, int]:
    """Of a linear layer, the least room for tiles of its rows, and bytes of a row; nothing of others."""
    path, _, leaf = names[0].rpartition(".")
    module = model.get_submodule(path)
    if len(names) > 1 or not isinstance(module, nn.Linear) or block_path(model, path) is not None:
        return 0, 0
    size = getattr(module, leaf).element_size()
    least = max(TILE_BYTES, least_tile_bytes(module.in_features, size, MAX_PREFIX_CHUNK_WORDS))
    return align(least, ALIGN), module.in_features * size
