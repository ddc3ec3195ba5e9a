"""Products of many rows of x with experts in windows, where they beat decoding: how they are launched."""

from __future__ import annotations

import functools
from typing import NamedTuple

from tpde.cuda.capability import DeviceFacts
from tpde.cuda.expert_ways import MOST_EACH, MOST_EXPERTS, MOST_ROUTED, few_rows
from tpde.cuda.product_ways import MOST_ROWS

SOURCE, LISTED_SOURCE = "window_experts_many.cu", "window_listed.cu"
_WGMMA = (9, 0)  # the compute capability that both are made for
_LEAST_CHUNKS = 2  # of a stripe
_STAGES, _OTHER_WARPS = 4, 4  # pieces of x in shared memory, warps that do not multiply
_WARP_BYTES = 4096 + 5632 + 2048 + 128  # planes of escapes, a chunk, ended sums, matrices
_HEAD_BYTES, _BATCH_BYTES, _OCTET, _AT = 16, 32, 8, 128  # of lists; rows that lie together; where x begins
_MOST_COUNT, _STEP = 1 << 16, 64  # rows of y of a call; of how many more it is asked
_ROOM_SHARE = 4  # x once more, with lists, takes such a part of decoded experts at most
# Rows of y for each expert, on average, up to which few rows are multiplied at a time (`expert_ways`): with
# 128 experts of 768 x 2048 words, four rows take an H200 248 us, and 293 so, eight rows 357 and 299.
_FEW = 6
# Microseconds of a whole H200: of all launches; of writing x, a word; of a batch's chunk see `ManyExperts`;
# of decoding, a word; of grouped products, a word of the experts, and a word for each row of y.
_LAUNCHES, _ARRANGING, _DECODING = 12.0, 0.6e-6, 1.0e-6
_LIBRARY, _LIBRARY_ROW = 0.6e-6, 2.0e-9
_WHOLE = 132  # multiprocessors of it; a part of a GPU has as much less of all else


class RoutedRoom(NamedTuple):
    """Where kernels write lists and x for each other: byte offsets on the device, and how many bytes."""

    batches: int
    eights: int
    order: int
    x: int
    nbytes: int


class ManyExperts(NamedTuple):
    """How products are launched. Results do not depend on it.

    Attributes
    ----------
    rows : int
        Of x, of a batch.
    warps : int
        Of a block that multiply, each a stripe.
    chunk, row : float
        Microseconds for each chunk of stripes, and more for each row that there is.
    """

    rows: int
    warps: int
    chunk: float
    row: float

    @property
    def shared(self) -> int:
        """Bytes of shared memory."""
        return _STAGES * self.rows * 128 + self.warps * _WARP_BYTES + 8 * 2 * _STAGES

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * (self.warps + _OTHER_WARPS)

    def defines(self, columns: int) -> dict[str, int]:
        """Macros."""
        return {"TAIL": int(columns % 256 != 0), "NB": self.rows, "WIDE": self.warps}

    def room(self, columns: int, experts: int, count: int) -> RoutedRoom:
        """What so many rows of y take, at most."""
        some = min(experts, count)
        octets, eights = some + count // _OCTET, _HEAD_BYTES + _BATCH_BYTES * (some + count // self.rows)
        order = eights + 4 * octets
        x = -(-(order + 4 * _OCTET * octets) // _AT) * _AT
        return RoutedRoom(_HEAD_BYTES, eights, order, x, x + _OCTET * octets * 512 * -(-columns // 256))

    def tiles(self, stripes: int, experts: int, count: int) -> float:
        """How many there are, if a router spreads rows evenly: half a batch of each expert is not whole."""
        some = min(experts, count)
        return some * max(1, count / some / self.rows + 0.5) * -(-stripes // self.warps)

    def takes(self, have: DeviceFacts, columns: int, stripes: int, experts: int, count: int) -> float:
        """How long a product takes, microseconds."""
        part = _WHOLE / have.multiprocessors
        tiles, chunks = self.tiles(stripes, experts, count), -(-columns // 256)
        filled = min(self.rows, count * -(-stripes // self.warps) / tiles)
        tile = (chunks + 1) * (self.chunk + filled * self.row)
        return _LAUNCHES + part * columns * count * _ARRANGING + -(-tiles // have.multiprocessors) * tile


WAYS = ManyExperts(64, 12, 2.65, 0), ManyExperts(128, 8, 2.05, 0.0035), ManyExperts(256, 8, 2.85, 0.004)


def way_of(
    have: DeviceFacts, columns: int, stripes: int, experts: int, tokens: int, count: int
) -> ManyExperts | None:
    """How a product is launched; None if few rows are to be multiplied at a time.

    Parameters
    ----------
    have : DeviceFacts
        Of the device.
    columns, stripes : int
        Of an expert.
    experts : int
        Of the weight.
    tokens : int
        Of the call. With up to `MOST_ROWS`, rows have the same bits in all calls.
    count : int
        Rows of y: at most `most_rows`, or few.
    """
    if not ways_of(have, columns, experts) or tokens <= MOST_ROWS:
        return None
    best = _best(have, columns, stripes, experts, count)
    if not few_rows(experts, tokens, count):
        return best
    busy = best.tiles(stripes, experts, count) >= have.multiprocessors
    small = _has_room(best, columns, stripes, experts, count)
    return best if busy and small and count > _FEW * experts else None


def ways_of(have: DeviceFacts, columns: int, experts: int) -> tuple[ManyExperts, ...]:
    """All that there may be."""
    fit = experts <= MOST_EXPERTS and max(it.shared for it in WAYS) <= have.shared_bytes
    return WAYS if fit and have.capability == _WGMMA and columns > 256 * (_LEAST_CHUNKS - 1) else ()


@functools.cache
def most_rows(have: DeviceFacts, columns: int, stripes: int, experts: int) -> int:
    """Up to how many rows of y many are multiplied at a time, of more than `MOST_ROWS` tokens; 0 if never."""
    if not ways_of(have, columns, experts):
        return 0
    few, found = min(MOST_ROUTED, MOST_EACH * experts), 0
    for count in range(few + _STEP, _MOST_COUNT + 1, _STEP):
        if not _beats_decoding(have, columns, stripes, experts, count):
            break
        found = count
    return found


def _best(have: DeviceFacts, columns: int, stripes: int, experts: int, count: int) -> ManyExperts:
    return min(WAYS, key=lambda it: it.takes(have, columns, stripes, experts, count))


def _has_room(how: ManyExperts, columns: int, stripes: int, experts: int, count: int) -> bool:
    decoded = 2 * experts * 16 * stripes * columns
    return how.room(columns, experts, count).nbytes <= decoded // _ROOM_SHARE


def _beats_decoding(have: DeviceFacts, columns: int, stripes: int, experts: int, count: int) -> bool:
    best = _best(have, columns, stripes, experts, count)
    if not _has_room(best, columns, stripes, experts, count):
        return False
    words, part = experts * 16 * stripes * columns, _WHOLE / have.multiprocessors
    decoding = part * words * (_DECODING + _LIBRARY + _LIBRARY_ROW * count / experts)
    return best.takes(have, columns, stripes, experts, count) < decoding
