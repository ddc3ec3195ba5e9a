"""Tiny random models of many architectures, run packed and plain side by side, and compared bit by bit.

`python -m tests.zoo` runs everything, prints a table, and writes a page of results with `--out`.
"""
