"""Attack files, directories and the writing of them for some seconds; 1 if anything is found."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `support`, as for every test

from . import shim
from .campaign import KINDS, Tally, run

_MEMORY = Path("/dev/shm")  # where syncs cost nothing


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.attack", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="for all kinds together")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="by default the time")
    parser.add_argument("--only", choices=KINDS, nargs="+", default=KINDS, help="these kinds of attacks")
    parser.add_argument("--case", help="one attack of a kind, as a finding names it")
    parser.add_argument("--keep", type=Path, default=Path("build/attack"), help="where findings are written")
    options = parser.parse_args()
    if options.case is not None and len(options.only) != 1:
        parser.error("`--case` needs one kind: `--only`")
    if why := shim.missing():
        print(f"skipped: {why}")
        return 0
    tallies = []
    for kind in options.only:
        share = options.seconds / len(options.only)
        print(f"{kind}, seed {options.seed}, {share:.0f} s", flush=True)
        with tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None) as folder:
            tally = run(kind, Path(folder), options.keep, options.seed, share, options.case)
        _report(tally, options.seed, options.keep)
        tallies.append(tally)
    print(f"\n{'attacks':8} {'tried':>9} {'of':>9} {'seconds':>8} {'found':>6}")
    for it in tallies:
        print(f"{it.kind:8} {it.tried:9} {it.of or '':>9} {it.seconds:8.0f} {len(it.findings):6}")
    return int(any(it.findings for it in tallies))


def _report(tally: Tally, seed: int, keep: Path) -> None:
    """Print what was found and how to see it again, and write it down."""
    lines = [
        f"{it.text}\n  again: python -m tests.attack --only {tally.kind} --seed {seed} --case {it.case}\n"
        for it in tally.findings
    ]
    if lines:
        keep.mkdir(parents=True, exist_ok=True)
        with (keep / f"{tally.kind}-{seed}.txt").open("a") as file:
            file.writelines(lines)
        print("".join(lines), end="", flush=True)


if __name__ == "__main__":
    sys.exit(main())
