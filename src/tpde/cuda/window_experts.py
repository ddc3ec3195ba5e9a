"""Weights of experts in the window layout on a GPU: launches of the kernels of `kernels/window_experts.cu`.

Nothing here allocates on the device: callers put blobs and the table there, and pass addresses. Launches go
to the caller's stream and synchronize nothing; what a router chose is read on the device.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tpde.codec.windows import FLAG_ZERO, Window
from tpde.cuda import window_encode
from tpde.cuda.backend import Backend, KernelLaunch, current
from tpde.cuda.compiling import Asked, compile_all, submit
from tpde.cuda.expert_ways import MOST_ROUTED, SOURCE, expert_products, expert_ways, few_rows
from tpde.cuda.many_experts import LISTED_SOURCE, ManyExperts, most_rows, way_of, ways_of
from tpde.cuda.many_experts import SOURCE as MANY_SOURCE
from tpde.cuda.product_ways import MOST_ROWS, WARP_BYTES, WARPS, blocks_at_once
from tpde.cuda.window_products import X_AT
from tpde.errors import InvalidInput

_SUM_THREADS, _SUM_COLUMNS = 128, 512  # of a block of `experts_sum`
_LISTERS, _ARRANGERS, _BESIDE = 1024, 256, 8  # threads of blocks that list and arrange, and how many of these
_HELD_WORDS = 8  # of 64 bits, of a matrix in the table
_MOST_CHUNKS = 1 << 31  # that a launch counts
_ROOM_AT = 128  # what addresses of room are multiples of
_LISTING = "experts_listed", "experts_arranged"
_way_of = functools.lru_cache(maxsize=4096)(way_of)  # a model's layers ask for the same


class DeviceExperts:
    """The blobs of a weight of experts on a device, all of matrices of one shape.

    Parameters
    ----------
    matrices : sequence of (Window, int)
        What `tpde.codec.windows.validate` says of each blob, and its address, a multiple of 128. Those of
        an expert follow each other. The caller keeps them.
    experts : int
        How many there are.
    turned : bool
        Whether matrices are the experts' with rows and columns exchanged: one of each.
    device : int
        The device's number.

    Attributes
    ----------
    table : ndarray of uint64
        What kernels read of the blobs. The caller puts it on the device, and its address in `table_at`.
    parts : int
        Matrices of an expert.
    width : int
        Columns of y.
    columns : int
        Columns of x.
    most_rows : int
        Rows of y, up to which `takes` says so of many tokens.

    Raises
    ------
    InvalidInput
        If matrices differ in shape.
    """

    def __init__(
        self, matrices: Sequence[tuple[Window, int]], experts: int, turned: bool, device: int
    ) -> None:
        first = matrices[0][0]
        shapes = {(it.rows, it.columns) for it, _ in matrices}
        if len(shapes) > 1 or len(matrices) % experts or (turned and len(matrices) != experts):
            raise InvalidInput(
                f"{len(matrices)} matrices of shapes {sorted(shapes)} are no {experts} experts",
                hint="give as many of one shape for each",
            )
        if any(at % 128 for _, at in matrices):
            raise ValueError("a blob at an address that is no multiple of 128")
        self._experts, self._device, self._turned = experts, device, turned
        self.parts = len(matrices) // experts
        self.rows, self.columns = first.rows, first.columns
        self.width = self.parts * first.rows
        self._chunks = self.parts * first.stripes * first.stripe_chunks  # of an expert
        self._stripes = self.parts * first.stripes
        self.table: npt.NDArray[np.uint64] = np.zeros((len(matrices), _HELD_WORDS), np.uint64)
        self.table_at = 0
        for row, (window, at) in zip(self.table, matrices, strict=True):
            places = window.records_at, window.offsets_at, window.entries_at, window.bodies_at
            row[:4] = [at + it for it in places]
            row[4:6] = np.frombuffer(window.table, "<u8")
            row[6] = bool(window.flags & FLAG_ZERO)
        self._shape, self._facts = (self.rows, self.columns), current().facts(device)
        self.most_rows = most_rows(self._facts, self.columns, self._stripes, experts)

    def prepare(self) -> None:
        """Compile and load the kernels, for the errors that there may be, and for CUDA graphs.

        Raises
        ------
        MissingDependency, UnsupportedDevice, CompileError
            If the kernels cannot run.
        """
        _compile(current(), self.columns, self._stripes, self._experts, self._device)

    @functools.cached_property
    def _decoding(self) -> KernelLaunch:
        return _decoding(current(), self.columns % 256 != 0, self._device)

    def decode(
        self, out: int, stream: int, *, first: int = 0, count: int | None = None, numbers: int = 0
    ) -> None:
        """Decode experts, each to its place.

        Parameters
        ----------
        out : int
            Address of expert 0's place, of which nothing is written if it is not decoded.
        stream : int
            The stream's handle.
        first, count : int
            Which; by default all.
        numbers : int
            Address of their numbers, `count` integers of 32 bits, all below the number of experts; or 0, for
            those from `first` on.
        """
        count = self._experts - first if count is None else count
        step = max((_MOST_CHUNKS - 1) // self._chunks, 1)
        for at in range(0, count, step):
            some = min(step, count - at)
            self._decoding(
                stream,
                self.table_at,
                self.parts,
                *self._shape,
                numbers + 4 * at if numbers else 0,
                first + at,
                some,
                out,
                self._turned,
            )

    def takes(self, tokens: int, each: int) -> bool:
        """Whether products of so many tokens, with so many rows of y each, are computed from windows."""
        # Comparisons alone: a compiler may trace them, with a number of tokens that it does not know.
        count = tokens * each
        return few_rows(self._experts, tokens, count) or (tokens > MOST_ROWS and 0 < count <= self.most_rows)

    def room(self, tokens: int, count: int) -> int:
        """Bytes on the device that `product` takes meanwhile."""
        how = self._way(tokens, count)
        return 0 if how is None else how.room(self.columns, self._experts, count).nbytes

    def _way(self, tokens: int, count: int) -> ManyExperts | None:
        if tokens <= MOST_ROWS:
            return None
        return _way_of(self._facts, self.columns, self._stripes, self._experts, tokens, count)

    def product(
        self,
        x: int,
        x_stride: int,
        per: int,
        ids: int,
        count: int,
        y: int,
        bias: int,
        stream: int,
        *,
        wide: bool = True,
        tokens: int = 1,
        room: int = 0,
    ) -> None:
        """Multiply rows of x by the experts that they are for (windows.md 9).

        Parameters
        ----------
        x, x_stride : int
            Address of rows of `columns` words, and zeros to a multiple of 8; and how many words they are
            apart. Each lies at a multiple of `X_AT` bytes.
        per : int
            How many rows of y follow each other that have the same row of x.
        ids : int
            Address of the expert of each row of y. The number after the last one and those below 0 stand
            for none, and give zeros; others that are none's end in a trap.
        count : int
            Rows of y, as many as `takes` says, or at most `MOST_ROUTED` of up to `MOST_ROWS` tokens.
        y : int
            Address of room for them, `width` words each.
        bias : int
            Address of `width` bf16 words for each expert, or 0.
        stream : int
            The stream's handle. The kernel may start as `DeviceWindow.product` does.
        wide : bool
            Whether `ids` are integers of 64 bits; otherwise of 32.
        tokens : int
            Of the call.
        room : int
            Address of as many bytes as `self.room` gives, a multiple of 128; what follows in the stream may
            use them.

        Raises
        ------
        ValueError
            If x or the room does not lie as it must, or rows that are few at a time are too many.
        """
        if x % X_AT or x_stride * 2 % X_AT:
            raise ValueError(f"x at {x:#x}, rows {x_stride} words apart: no multiples of {X_AT} bytes")
        how = self._way(tokens, count)
        if how is not None:
            if not room or room % _ROOM_AT:
                raise ValueError(f"room for {count} rows of y at {room:#x}, not at a multiple of {_ROOM_AT}")
            self._product_of_many(how, x, x_stride, per, (ids, wide, count), y, bias, stream, room)
            return
        if not 1 <= count <= MOST_ROUTED:
            raise ValueError(f"{count} rows of y, 1 to {MOST_ROUTED} are taken at a time")
        self._launch(count)(
            stream,
            self.table_at,
            self._experts,
            self.parts,
            *self._shape,
            x,
            x_stride,
            per,
            ids,
            wide,
            count,
            y,
            bias,
        )

    def _product_of_many(
        self,
        how: ManyExperts,
        x: int,
        x_stride: int,
        per: int,
        rows: tuple[int, bool, int],
        y: int,
        bias: int,
        stream: int,
        room: int,
    ) -> None:
        at, head = how.room(self.columns, self._experts, rows[-1]), room
        batches, eights, order, to = (room + it for it in at[:-1])
        lists, arranges, multiplies = _many(current(), self.columns, self._experts, how, self._device)
        routed = *rows, self._experts
        lists(stream, *routed, how.rows, head, batches, eights, order)
        arranges(stream, x, x_stride, per, self.columns, *routed, head, eights, order, to, y, self.width)
        multiplies(stream, self.table_at, self.parts, *self._shape, head, batches, order, to, y, bias)

    def weighted(self, y: int, scores: int, tokens: int, each: int, out: int, stream: int) -> None:
        """Add up what a router's choice gave for each token, each times its score.

        Products and sums are rounded to fp32, one after the other, and the last sum to bf16.

        Parameters
        ----------
        y : int
            Address of `tokens` x `each` rows of `width` words, of products; a multiple of 8 bytes, where that
            is a multiple of 4 words.
        scores : int
            Address of as many fp32 numbers.
        tokens, each : int
            How many sums there are, and of how many rows.
        out : int
            Address of room for `tokens` rows.
        stream : int
            The stream's handle. The kernel may start as `DeviceWindow.product` does.
        """
        launch = self._adding(tokens * -(-self.width // _SUM_COLUMNS))
        launch(stream, y, scores, each, self.width, out)

    def _adding(self, blocks: int) -> KernelLaunch:
        return _adding(current(), self.columns % 256 != 0, blocks, self._device)

    def _launch(self, count: int) -> KernelLaunch:
        return _product(current(), self.columns, self._stripes, self._experts, count, self._device)


def compile_ahead(experts: int, rows: int, columns: int, device: int) -> None:
    """Compile what experts of a shape take: see `window_encode.compile_ahead`."""
    window_encode.compile_ahead(device)
    submit(_compile, (columns, -(-rows // 16), experts), device)


@functools.cache
def _compile(backend: Backend, columns: int, stripes: int, experts: int, device: int) -> None:
    """Have all kernels for experts of a shape; of more than `MOST_EXPERTS`, those that decode."""
    have, tail = backend.facts(device), {"TAIL": int(columns % 256 != 0)}
    asked = [Asked(SOURCE, name, tail) for name in ("experts_rows", "experts_sum")]
    ways = expert_ways(columns, stripes, experts, have)
    products = {tuple(it.defines.items()): it.defines for it in ways}.values()
    asked += [Asked(SOURCE, "experts_product", it) for it in products]
    many = ways_of(have, columns, experts)
    asked += [Asked(MANY_SOURCE, "experts_many", it.defines(columns), own=True) for it in many]
    if many:
        asked += [Asked(LISTED_SOURCE, name, {}, own=True) for name in _LISTING]
    compile_all(backend, asked, device)


@functools.cache
def _decoding(backend: Backend, tail: bool, device: int) -> KernelLaunch:
    kernel = backend.kernel(SOURCE, "experts_rows", {"TAIL": int(tail)}, device)
    have, shared = backend.facts(device), WARPS * WARP_BYTES
    grid = blocks_at_once(shared, have.shared_bytes) * have.multiprocessors
    return kernel.launch(grid, 32 * WARPS, shared)


@functools.cache
def _adding(backend: Backend, tail: bool, blocks: int, device: int) -> KernelLaunch:
    kernel = backend.kernel(SOURCE, "experts_sum", {"TAIL": int(tail)}, device)
    return kernel.launch(blocks, _SUM_THREADS, 0, early=_early(backend, device))


def _early(backend: Backend, device: int) -> bool:
    """Whether kernels may start before the last one has ended, as in `tpde.cuda.window_products`."""
    return backend.facts(device).capability >= (9, 0)


@functools.cache
def _product(
    backend: Backend, columns: int, stripes: int, experts: int, count: int, device: int
) -> KernelLaunch:
    """The launch for so many rows of y, for all weights of a shape."""
    have = backend.facts(device)
    how = expert_products(columns, stripes, experts, count, have)[0]
    kernel = backend.kernel(SOURCE, "experts_product", how.defines, device)
    grid = min(how.blocks * have.multiprocessors, min(count, experts) * stripes)
    return kernel.launch(grid, 32 * how.warps, how.shared, early=_early(backend, device))


@functools.cache
def _many(
    backend: Backend, columns: int, experts: int, how: ManyExperts, device: int
) -> tuple[KernelLaunch, KernelLaunch, KernelLaunch]:
    """The launches for many rows of x: which list them, arrange them and multiply."""
    every, early = backend.facts(device).multiprocessors, _early(backend, device)
    listed, arranged = (backend.kernel(LISTED_SOURCE, name, {}, device, own=True) for name in _LISTING)
    product = backend.kernel(MANY_SOURCE, "experts_many", how.defines(columns), device, own=True)
    return (
        listed.launch(1, _LISTERS, 4 * experts, early=early),
        arranged.launch(_BESIDE * every, _ARRANGERS, 0, early=early),
        product.launch(every, how.threads, how.shared, early=early),
    )
