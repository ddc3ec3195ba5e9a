"""Several matrices of one shape into a stack of window blobs, on CPU or GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tpde.codec import window_plan, windows
from tpde.codec.window_stacks import HEAD_BYTES, Stack, head, stacked
from tpde.errors import InvalidInput
from tpde.files.thread_count import default_threads
from tpde.weights import windowing
from tpde.weights.encode_launches import EncodeLaunches


class EncodedStack(NamedTuple):
    """A stack of window blobs, one-dimensional and uint8, and what it holds."""

    blob: Tensor
    stack: Stack


def encode_together(
    matrices: Sequence[Tensor], *, turned: bool = False, spare: bool = False
) -> EncodedStack | None:
    """Matrices of one shape as a stack of window blobs, on their device.

    Parameters
    ----------
    matrices : sequence of torch.Tensor
        Each as `tpde.weights.windowing.encode` takes it.
    turned : bool
        What the stack says of them.
    spare : bool
        On a GPU, leave room for more entries of each: as `tpde.weights.windowing.encode`.

    Returns
    -------
    EncodedStack or None
        None if one has no window layout.

    Notes
    -----
    On a GPU the host waits once between the launches of all, instead of once for each. Beside the matrices
    and the stack they take some bytes for each row and chunk.
    """
    try:
        windows.sections(*matrices[0].shape)
        if matrices[0].is_cuda:
            return _together_on_gpu(matrices, turned, spare)
        return _together_on_host(matrices, turned)
    except InvalidInput:
        return None


def _together_on_host(matrices: Sequence[Tensor], turned: bool) -> EncodedStack:
    threads, found = default_threads(), []
    plans = [window_plan.WindowPlan(it.view(torch.int16).numpy(), threads) for it in matrices]
    size = HEAD_BYTES + sum(it.nbytes for it in plans)
    blob = torch.empty(size, dtype=torch.uint8, device="cpu")
    data, at = blob.numpy(), HEAD_BYTES
    data[:at] = head(len(plans), turned)
    for plan in plans:
        part = data[at : at + plan.nbytes]
        plan.encode(part, threads)
        found.append(windows.header(part))
        at += plan.nbytes
    return EncodedStack(blob, stacked(found, turned))


def without_spare(blob: Tensor, stack: Stack) -> Tensor:
    """The bytes of a stack as others read it."""
    both = zip(stack.windows, stack.starts, strict=True)
    parts = [windowing.without_spare(blob[at : at + it.nbytes], it) for it, at in both]
    if all(part.numel() == it.nbytes for part, it in zip(parts, stack.windows, strict=True)):
        return blob
    return torch.cat([blob[:HEAD_BYTES], *parts])


def encode_again(matrices: Sequence[Tensor], stack: Stack, blob: Tensor) -> Stack | None:
    """Put other matrices where a stack's are: as `tpde.weights.windowing.encode_again`.

    None if there is no room for the escapes of one; then nothing was changed. The host waits as often as for
    one.
    """
    first = blob.data_ptr()
    found = windowing.encode_all_again(matrices, stack.windows, [first + at for at in stack.starts])
    return None if found is None else stack._replace(windows=tuple(found))


def _together_on_gpu(matrices: Sequence[Tensor], turned: bool, spare: bool) -> EncodedStack:
    with EncodeLaunches(matrices) as launches:
        both = zip(launches.encoders, launches.counts(), strict=True)
        chosen = [encoder.choose(counts) for encoder, counts in both]
        if spare:
            chosen = [it._replace(window=windowing.with_spare(it.window)) for it in chosen]
        stack = stacked([it.window for it in chosen], turned)
        end = stack.starts[-1] + stack.windows[-1].nbytes
        blob = torch.empty(end, dtype=torch.uint8, device=matrices[0].device)
        blob[:HEAD_BYTES].copy_(torch.from_numpy(head(len(chosen), turned)))
        first = blob.data_ptr()
        launches.encode(chosen, [first + at for at in stack.starts])
    return EncodedStack(blob, stack)
