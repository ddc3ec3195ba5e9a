"""The table of `tpde tune` that fused products follow: a result says which, and a run may leave it out."""

from __future__ import annotations

import argparse
import os

from benchmarks.harness.report import Page

_FACT = "Ways of fused products"


def option(parser: argparse.ArgumentParser) -> None:
    """Let a run leave the table out."""
    parser.add_argument(
        "--untuned", action="store_true", help="launch fused products as without a table of `tpde tune`"
    )


def follow(options: argparse.Namespace, page: Page) -> None:
    """Say which table is followed; if that was asked for, leave it out, in processes that are started, too.

    It is the first GPU's. A file is named without its folder, which may be in a home.
    """
    from tpde.cuda import tuning
    from tpde.cuda.backend import current
    from tpde.cuda.product_ways import KERNELS

    if options.untuned:
        os.environ[tuning.VARIABLE] = tuning.OFF
    table = tuning.table_of(current().facts(0), KERNELS)
    count = sum(map(len, table.choices.values()))
    page.facts[_FACT] = f"`{table.path.name}` of `tpde tune`, {count} products" if count else "built in"
