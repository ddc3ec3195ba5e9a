"""Which launches a product from windows takes, for all matrices of a shape."""

from __future__ import annotations

import functools
from typing import NamedTuple

from tpde.codec.windows import Window, sections
from tpde.cuda.backend import Backend, KernelLaunch
from tpde.cuda.many_rows import MOST, beats_decoding, blocks_of, many_way
from tpde.cuda.product_ways import KERNELS, MOST_ROWS, PARTS, TOGETHER, WARPS, Product, ways_of
from tpde.cuda.tuning import table_of

_ARRANGERS, _BESIDE = 256, 8  # threads of a block of `arrange`, and blocks of a multiprocessor at most


class ProductLaunch(NamedTuple):
    """How a product with some rows of x is launched.

    `rows` are of x, at most. If there is `arrange`, it first writes x to `room` bytes, which `product` reads.
    """

    rows: int
    product: KernelLaunch
    arrange: KernelLaunch | None = None
    room: int = 0


class ProductStep(NamedTuple):
    """A launch for some rows of x: of which one on, and how many."""

    first: int
    rows: int
    launch: ProductLaunch


class ProductSteps(NamedTuple):
    """All launches of a product, one after the other, and the most room that one of them takes."""

    launches: tuple[ProductStep, ...]
    room: int


NO_STEPS = ProductSteps((), 0)


def steps_by(launch: ProductLaunch, count: int) -> ProductSteps:
    """One launch again and again for so many rows of x."""
    firsts = range(0, count, launch.rows)
    steps = (ProductStep(first, min(count - first, launch.rows), launch) for first in firsts)
    return ProductSteps(tuple(steps), launch.room)


def tuned_ways(backend: Backend, window: Window, count: int, device: int) -> list[Product]:
    """How a product may be launched, first the way that the device's table names, if there is a table."""
    have, shape = backend.facts(device), (window.rows, window.columns)
    return table_of(have, KERNELS).ordered(shape, count, lambda it: ways_of(have, window, it))


def steps_of(backend: Backend, window: Window, count: int, device: int) -> ProductSteps:
    """The launches for so many rows of x; none if the matrix is to be decoded for them."""
    if count > MOST:
        return NO_STEPS
    return _steps(backend, window.rows, window.columns, window.flags, count, device)


@functools.cache
def _steps(backend: Backend, rows: int, columns: int, flags: int, count: int, device: int) -> ProductSteps:
    window = sections(rows, columns)._replace(flags=flags)
    if count <= MOST_ROWS:
        made = (launch_of(backend, window, how, device) for how in tuned_ways(backend, window, count, device))
        return steps_by(next(it for it in made if it is not None), count)
    have = backend.facts(device)
    if not beats_decoding(have, window, count):
        return NO_STEPS
    launch = launch_of(backend, window, many_way(have, window, count), device)
    assert launch is not None  # it has no clusters
    return steps_by(launch, count)


def launch_of(backend: Backend, window: Window, how: Product, device: int) -> ProductLaunch | None:
    """The launch; None if the device never runs a cluster of it at a time, as a part of one may not."""
    kernel = backend.kernel(how.source, how.name, how.defines, device, own=how.own)
    have, stripes, more = backend.facts(device), window.stripes, dict[str, int]()
    if how.grouped:
        most = kernel.clusters_at_once(how.cluster, 32 * how.warps, how.shared)
        grid, more = how.cluster * min(most, -(-stripes // TOGETHER)), {"cluster": how.cluster}
        if not grid:
            return None
    elif how.room:
        grid = blocks_of(have, window, how.rows)
    else:
        beside = WARPS // min(window.stripe_chunks, PARTS)  # stripes that a block takes at a time
        grid = min(how.blocks * have.multiprocessors, -(-stripes // beside))
    early = have.capability >= (9, 0)  # kernels start while those before them end
    launch = kernel.launch(grid, 32 * how.warps, how.shared, early=early, **more)
    return ProductLaunch(how.rows, launch, _arrange(backend, window, how, device), how.room)


def _arrange(backend: Backend, window: Window, how: Product, device: int) -> KernelLaunch | None:
    """What writes x as a product takes it, if that does not take x as it is."""
    if not how.room:
        return None
    kernel = backend.kernel(how.source, "arrange", how.defines, device, own=True)
    grid = min(how.room // (16 * _ARRANGERS), _BESIDE * backend.facts(device).multiprocessors)
    return kernel.launch(grid, _ARRANGERS, 0, early=True)
