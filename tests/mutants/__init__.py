"""Faults that are made on purpose, one at a time, in copies of the package, to see whether tests notice.

`python -m tests.mutants` puts each into a copy, and runs the tests there that should fail.
"""
