"""What the JSON of a container's header holds (docs/format.md 1): its entries and metadata, each sound.

The stock library offers neither a tensor's offset nor the header's own bytes, and both are needed to
stream tensors and to restore files byte for byte; so the header's JSON is read here, with the checks
that the stock library makes.
"""

from __future__ import annotations

import json
import operator
import re
from itertools import repeat

from tpde.errors import Corrupt, NotSafetensors, UnsupportedDtype
from tpde.format.constants import DTYPES, MAX_DIMS
from tpde.format.container import METADATA, Entry, TensorSpec, check_texts, tensor_spec

_KEYS = {"dtype", "shape", "data_offsets"}
# An entry as writers write it, with the comma behind it: its name, dtype and shape, begin and end.
_ENTRY = re.compile(
    r' ?"([^"\\\x00-\x1f]*)": ?\{("dtype": ?"[^"\\\x00-\x1f]*", ?"shape": ?\[[0-9, ]*\])'
    r', ?"data_offsets": ?\[(0|[1-9][0-9]{0,18}), ?(0|[1-9][0-9]{0,18})\]\},'
)
_METADATA_LEAD = re.compile(rf'\{{ ?"{METADATA}": ?')
BLOCK = 1 << 20  # characters whose entries are found at once: what is made meanwhile stays small


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """What an object of the JSON holds, none of whose names may occur twice."""
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name occurs twice")
    return result


_UNIQUE = json.JSONDecoder(object_pairs_hook=_unique)


class _Entries:
    """Reads the entries of one header, and says what is wrong with them."""

    def __init__(self, where: str) -> None:
        self._where, self._sound = where, True

    def of_object(self, pairs: list[tuple[str, object]]) -> Entry | dict[str, object]:
        """What an object of the JSON is: an entry if it is a sound one, which spares many objects.

        Anything else is a dictionary, for `read` to say what is wrong with it, and by name.
        """
        result = _unique(pairs)
        if self._sound and "data_offsets" in result:
            try:
                return self.read("", result)
            except (Corrupt, UnsupportedDtype):
                self._sound = False  # all is in vain then: errors for a million entries would take seconds
        return result

    def read(self, name: str, info: object) -> Entry:
        """An entry that `of_object` left. Unknown keys are passed over, as the stock library does."""
        if not isinstance(info, dict) or not info.keys() >= _KEYS:
            raise self._corrupt(name, "lacks one of dtype, shape, data_offsets")
        shape, offsets = info["shape"], info["data_offsets"]
        spec = self._spec(name, info["dtype"], shape)
        if not (isinstance(offsets, list) and len(offsets) == 2 and _are_sizes(offsets)):
            raise self._corrupt(name, f"has the offsets {_short(offsets)}")
        begin, end = offsets
        if end - begin != spec.nbytes:
            raise self._corrupt(
                name,
                f"has {end - begin} bytes by its offsets, {spec.nbytes} by its dtype {spec.dtype} and shape "
                f"{_short(shape)}",
                found=end - begin,
                needed=spec.nbytes,
            )
        return Entry(spec, begin, end)

    def _spec(self, name: str, dtype: object, shape: object) -> TensorSpec:
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise UnsupportedDtype(
                f"{self._where}: tensor `{name}` has dtype `{_short(dtype)}`, which this version does not "
                f"know; known are {', '.join(DTYPES)}",
                hint="upgrade tpde, or fetch the file again if it is damaged",
                where=name,
                found=_short(dtype),
                needed=tuple(DTYPES),
            )
        if not (isinstance(shape, list) and len(shape) <= MAX_DIMS and _are_sizes(shape)):
            raise self._corrupt(name, f"has the shape {_short(shape)}")
        try:
            return tensor_spec(dtype, tuple(shape))
        except ValueError as error:
            raise self._corrupt(name, f"is impossible: {error}") from None

    def _corrupt(self, name: str, what: str, *, found: object = None, needed: object = None) -> Corrupt:
        return Corrupt(f"{self._where}: tensor `{name}` {what}", tensor=name, found=found, needed=needed)


def _short(value: object) -> str:
    """What JSON held, as messages show it."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if any(isinstance(it, (list, dict)) for it in inside):
        return f"a nested {type(value).__name__}"  # which may be too deep to be written
    return str(value)[:200]


def _are_sizes(values: list[object]) -> bool:
    return all([type(n) is int and n >= 0 for n in values])  # noqa: C419 - half the time, for short lists


Parsed = tuple[dict[str, Entry], dict[str, str]]  # entries and metadata


def parse_usual(header: bytes, block: int = BLOCK) -> Parsed | None:
    """Parse a header that is written as usual; None for any other, and for one that is not sound.

    Usual are metadata in front, keys in the order of the stock library, and names without escapes. Blocks of
    such entries take half the time of entries one by one.

    Parameters
    ----------
    header : bytes
        The JSON with its padding.
    block : int
        Characters whose entries are found at once. A longer entry is not usual.
    """
    try:
        text = header.rstrip(b" ").decode()
        lead = _METADATA_LEAD.match(text)
        metadata, at = _UNIQUE.raw_decode(text, lead.end()) if lead else ({}, 0)
        last = len(text) - 1
        if text[at : at + 1] != ("," if lead else "{") or text[last:] != "}" or at + 1 >= last:
            return None
        at, count = at + 1, 0
        entries: dict[str, Entry] = {}
        specs: dict[str, TensorSpec] = {}
        while at < last:
            whole = at + block >= last
            stop = last if whole else text.rfind("},", at, at + block) + 2
            parts = _ENTRY.split(text[at:stop] + "," * whole)
            gaps, names, kinds, begins, ends = (parts[i::5] for i in range(5))
            if any(gaps) or not names:
                return None
            new = list(set(kinds).difference(specs))
            for kind, info in zip(new, json.loads(f"[{{{'},{'.join(new)}}}]") if new else (), strict=True):
                specs[kind] = tensor_spec(info["dtype"], tuple(info["shape"]))
            found = [specs[kind] for kind in kinds]
            first, behind = list(map(int, begins)), list(map(int, ends))
            if list(map(operator.sub, behind, first)) != [spec.nbytes for spec in found]:
                return None
            # In C: a call of `Entry` for each would take a quarter of the time.
            made = map(tuple.__new__, repeat(Entry), zip(found, first, behind, strict=True))
            entries.update(zip(names, made, strict=True))
            at, count = stop, count + len(names)
        metadata = {} if metadata is None else metadata
        check_texts(entries, metadata)
    except (ValueError, RecursionError, UnsupportedDtype):
        return None
    return (entries, metadata) if len(entries) == count else None  # else a name occurs twice


def parse_any(header: bytes, where: str) -> Parsed:
    """Parse any header, or say what is wrong with it: see `tpde.format.container_reader.parse_header`."""
    reader = _Entries(where)
    try:
        parsed = json.loads(header.decode(), object_pairs_hook=reader.of_object)
    except (ValueError, RecursionError) as error:
        raise NotSafetensors(
            f"{where}: the header is not JSON ({error}), so this is not a safetensors file, or it is damaged"
        ) from None
    if not isinstance(parsed, dict):
        raise NotSafetensors(f"{where}: the header is not a JSON object, so this is not a safetensors file")
    metadata = parsed.pop(METADATA, None)
    metadata = {} if metadata is None else metadata
    try:
        check_texts(parsed, metadata)
    except ValueError as error:
        raise Corrupt(f"{where}: {error}") from None
    entries = {
        name: info if type(info) is Entry else reader.read(name, info) for name, info in parsed.items()
    }
    return entries, metadata
