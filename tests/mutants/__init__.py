"""Faults that are made on purpose, one at a time, in copies of the package: what tests do not notice, they miss.

`python -m tests.mutants` puts each into a copy, and runs the tests there that should fail.
"""
