"""Layouts and table sections as the core takes them, for the tensor of `support.craft`."""

from __future__ import annotations

from support.craft import SPEC
from tpde.codec import native, reference
from tpde.codec.selection import base_header, core_layout
from tpde.format.constants import CODEC_PREFIX


def layout_of(tables: int = 1) -> native.CoreLayout:
    """Give a layout of which no plane has a table."""
    layout = core_layout(base_header(SPEC, CODEC_PREFIX, 512))
    layout.tables = tables
    return layout


def section_of(*tables: bytes) -> bytes:
    """Give a section of tables, padded."""
    data = b"".join(tables)
    return data.ljust(reference.align(len(data), 16), b"\0")


def coded_layout() -> native.CoreLayout:
    """Give a layout whose plane of exponents has the one table."""
    layout = layout_of()
    layout.first_table[1], layout.table_count[1] = 0, 1
    return layout
