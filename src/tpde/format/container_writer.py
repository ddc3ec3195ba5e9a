"""Writing the header of a safetensors container (docs/format.md 1): whole, or its parts one by one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from tpde.format.constants import DTYPES
from tpde.format.container import METADATA, TensorSpec

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_encode_text = json.encoder.encode_basestring  # what it does to texts, in C


def names_bytes(names: Iterable[str]) -> int:
    """Bytes that names take in a header, without their quotes."""
    return len(_encode("".join(names)).encode()) - 2


def entry_json(name: str, spec: TensorSpec, begin: int, end: int) -> str:
    """One tensor's part of a header, without a comma."""
    return f'{_encode_text(name)}:{{{spec.json},"data_offsets":[{begin},{end}]}}'


def metadata_json(metadata: Mapping[str, str]) -> str:
    """The metadata's part of a header, without a comma; empty if there is none."""
    return f'"{METADATA}":{_encode(dict(metadata))}' if metadata else ""


def join_header(metadata: Mapping[str, str], entries: Iterable[str]) -> bytes:
    """Put a header's parts together, without padding."""
    parts = [part for part in (metadata_json(metadata), *entries) if part]
    return ("{" + ",".join(parts) + "}").encode()


def canonical_header(specs: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> bytes:
    """Write the header that the stock library would write for these tensors.

    Tensors are sorted by dtype, descending in the order of docs/format.md 2.1, then by name; the header is
    padded with spaces to a multiple of 8 bytes. The metadata's order is the mapping's own.

    Parameters
    ----------
    specs : mapping of str to TensorSpec
        The tensors.
    metadata : mapping of str to str
        May be empty.

    Returns
    -------
    bytes
        The JSON with its padding, without the 8 bytes of its length.
    """
    # Texts compare by code points, in the order of their UTF-8 bytes.
    order = sorted(specs, key=lambda name: (-DTYPES[specs[name].dtype].code, name))
    at, entries = 0, []
    for name in order:
        entries.append(entry_json(name, specs[name], at, at + specs[name].nbytes))
        at += specs[name].nbytes
    header = join_header(metadata, entries)
    return header + b" " * (-len(header) % 8)
