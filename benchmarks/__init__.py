"""Measurements of tpde: `python -m benchmarks --list` names them, `python -m benchmarks NAME` runs one.

Each module here, or package that is none of the three rooms below, is a benchmark and says what is measured,
on which data, beside which peers, against which bars. `harness` runs them, times, watches memory and writes
results; `data` makes what is measured; `peers` has other libraries that several compare with, or that take
some code: all of them are optional, and imported where they are used.
"""
