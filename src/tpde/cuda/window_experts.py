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
from tpde.cuda.expert_ways import MOST_ROUTED, SOURCE, expert_products, expert_ways
from tpde.cuda.product_ways import WARP_BYTES, WARPS, blocks_at_once
from tpde.cuda.window_products import X_AT
from tpde.errors import InvalidInput

_SUM_THREADS, _SUM_COLUMNS = 128, 512  # of a block of `experts_sum`
_HELD_WORDS = 8  # of 64 bits, of a matrix in the table
_MOST_CHUNKS = 1 << 31  # that a launch counts


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
        self._shape = self.rows, self.columns

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
            Rows of y, at most `MOST_ROUTED`.
        y : int
            Address of room for them, `width` words each.
        bias : int
            Address of `width` bf16 words for each expert, or 0.
        stream : int
            The stream's handle. The kernel may start as `DeviceWindow.product` does.
        wide : bool
            Whether `ids` are integers of 64 bits; otherwise of 32.

        Raises
        ------
        ValueError
            If x does not lie as it must, or there are too many rows.
        """
        if x % X_AT or x_stride * 2 % X_AT:
            raise ValueError(f"x at {x:#x}, rows {x_stride} words apart: no multiples of {X_AT} bytes")
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
    compile_all(backend, [*asked, *(Asked(SOURCE, "experts_product", it) for it in products)], device)


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
