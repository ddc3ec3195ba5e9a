"""How products of routed experts may be launched, the fastest way first by what an H100 took."""

from __future__ import annotations

from typing import NamedTuple

from tpde.cuda.capability import DeviceFacts
from tpde.cuda.product_ways import WARP_BYTES, blocks_at_once

SOURCE = "window_experts.cu"
MOST_EXPERTS = 1024  # of a weight: what shared memory has room for
# Of a call: with more, `many_experts` has a way, or all experts are decoded, and a library multiplies. With
# 128 experts of 768 x 2048 words, of which each token has 8, 512 tokens take an H100 0.78 ms, decoding 0.76
# and vLLM's products then 0.47; 1,000 tokens 1.33, and 1.29 so.
MOST_TOKENS, MOST_EACH = 512, 32  # and rows of y for each expert there is, on average
MOST_ROUTED = 4096  # rows of y in one launch: what shared memory has room for


class ExpertProduct(NamedTuple):
    """How a product is launched. Results do not depend on it.

    Attributes
    ----------
    rows : int
        Of x, that are multiplied at a time.
    alone : bool
        Whether a warp takes whole stripes; otherwise eight warps take their parts.
    warps : int
        Of a block.
    blocks : int
        Of a multiprocessor.
    defines : dict of str to int
        Macros.
    shared : int
        Bytes of shared memory.
    """

    rows: int
    alone: bool
    warps: int
    blocks: int
    defines: dict[str, int]
    shared: int


# Rows of x, whether a warp is alone, warps, and blocks of a multiprocessor at most: as many as there are
# registers for. On an H100, us for both products of 128 experts of 768 x 2048 words, of which each token has
# eight, by warps that are alone with 8, 16 and 32 rows, and by eight together with 8: one token 31.3, 33.6, -
# and 33.0, 8 tokens 141, 154, -, 140, 32 tokens 274, 296, -, 290, 64 tokens 325, 341, 410, 345, 128 tokens
# 453, 390, 450, 423, 256 tokens 742, 580, 516, 702.
_WAYS = ((8, True, 12, 1), (16, True, 8, 1), (32, True, 8, 1), (8, False, 8, 2))
_FEW_ROWS = {8: 6, 16: 12}  # of y for each expert, at most, with which so many rows of x are taken
# Stripes for each multiprocessor, from which on warps are alone: with fewer, too many wait for the last one.
_ALONE = 5


def expert_products(
    columns: int, stripes: int, experts: int, count: int, have: DeviceFacts
) -> list[ExpertProduct]:
    """How a product may be launched, the one to take first.

    Parameters
    ----------
    columns : int
        Of a matrix.
    stripes : int
        Of an expert.
    experts : int
        Of the weight, at most `MOST_EXPERTS`.
    count : int
        Rows of y, at most `MOST_ROUTED`.
    have : DeviceFacts
        What the device has.
    """
    together = min(count, experts) * stripes < _ALONE * have.multiprocessors
    best = next((rows for rows, most in _FEW_ROWS.items() if count <= most * experts), 32)
    made = []
    for rows, alone, warps, most in _WAYS:
        lists = 4 + (4 + 2) * experts + 2 * count
        sums = (3 if alone else 2) * rows // 8 * 16 * 8 * 4
        shared = warps * (WARP_BYTES + sums) + -(-lists // 16) * 16
        blocks = min(most, blocks_at_once(shared, have.shared_bytes))
        defines = {"TAIL": int(columns % 256 != 0), "NB": rows, "ALONE": int(alone), "BLOCKS": blocks}
        made.append(ExpertProduct(rows, alone, warps, blocks, defines | {"WARPS": warps}, shared))
    made.sort(key=lambda it: (it.alone is together, it.rows > best, -it.rows))
    return [it for it in made if it.shared <= have.shared_bytes]


def few_rows(experts: int, tokens: int, count: int) -> bool:
    """Whether a call of so many tokens, for so many rows of y, may be computed by these ways.

    How the router spreads them is not asked.
    """
    if experts > MOST_EXPERTS:
        return False
    return 0 < tokens <= MOST_TOKENS and 0 < count <= min(MOST_ROUTED, MOST_EACH * experts)


def expert_ways(columns: int, stripes: int, experts: int, have: DeviceFacts) -> list[ExpertProduct]:
    """The ways that are taken for any number of rows; none for more than `MOST_EXPERTS`.

    With one row fewest stripes are used; then with so many rows and more another way is taken.
    """
    if experts > MOST_EXPERTS:
        return []
    counts = 1, *(most * experts for most in _FEW_ROWS.values()), MOST_ROUTED
    return [expert_products(columns, stripes, experts, min(it, MOST_ROUTED), have)[0] for it in counts]
