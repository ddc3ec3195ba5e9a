"""More than one process: forked, spawned, distributed."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ..bits import kept
from ..case import Case
from .adapters import adapted
from .tools import Bits, Flow, Made, Pack, as_plain, trained

_WAIT = 90  # seconds that a process may take


def _forward_elsewhere(model: Any, out: Path) -> None:
    torch.set_num_threads(1)
    torch.save(Made().outputs(model), out)


def _elsewhere(pack: Pack, method: str, share: bool = False) -> Bits:
    """The model is an argument of a process; what that computes comes back in a file."""
    model = pack(Made()())
    if share:
        model.share_memory()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.pt"
        process = mp.get_context(method).Process(target=_forward_elsewhere, args=(model, out))
        process.start()
        process.join(_WAIT)
        if process.exitcode is None:
            process.kill()
        if process.exitcode != 0:
            raise RuntimeError(f"the process that was given the model ended with {process.exitcode}")
        return torch.load(out)  # type: ignore[no-any-return]


def _queued(pack: Pack) -> Bits:
    """The model goes through a queue into another process of this one's kind."""
    context = mp.get_context("fork")
    queue: Any = context.SimpleQueue()
    model = pack(Made()())
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.pt"
        process = context.Process(target=_forward_from_queue, args=(queue, out))
        process.start()
        queue.put(model)
        process.join(_WAIT)
        if process.exitcode != 0:
            process.kill()
            raise RuntimeError(f"the process that was given the model ended with {process.exitcode}")
        return torch.load(out)  # type: ignore[no-any-return]


def _forward_from_queue(queue: Any, out: Path) -> None:
    _forward_elsewhere(queue.get(), out)


def _member(rank: int, work: Callable[[bool], Bits], packed: bool, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        torch.save(work(packed), f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


def _distributed(work: Callable[[bool], Bits]) -> Flow:
    def flow(pack: Pack) -> Bits:
        packed = pack is not as_plain  # functions of ours cannot be sent to other processes
        with tempfile.TemporaryDirectory() as folder:
            context = mp.spawn(_member, (work, packed, folder), nprocs=2, join=False)
            try:
                end = time.monotonic() + _WAIT
                while not context.join(timeout=1):  # false, too, when the first of them ends
                    if time.monotonic() > end:
                        raise RuntimeError(f"two processes still run after {_WAIT} s")
            except mp.ProcessRaisedException as error:
                raise _first_cause(error) from error
            finally:
                for process in context.processes:
                    process.kill()
            bits: Bits = {}
            for rank in range(2):
                found = torch.load(f"{folder}/{rank}.pt")
                bits |= {f"rank {rank} {name}": it for name, it in found.items()}
            return bits

    return flow


def _first_cause(error: Exception) -> Exception:
    """The error of the process, by its type if it is one of ours."""
    import tpde.errors

    last = str(error).strip().splitlines()[-1]
    name, _, text = last.partition(": ")
    kind = getattr(tpde.errors, name.rpartition(".")[2], None)
    return kind(text) if name.startswith("tpde.") and kind is not None else RuntimeError(last)


def _packed(model: Any, packed: bool) -> Any:
    return Case.pack(model) if packed else model


def _ddp(packed: bool, adapter: bool, ready: bool) -> Bits:
    model = Made()()
    if not adapter:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("norm" in name)
    model = _packed(model, packed)
    if adapter:
        model = adapted(model)
    if ready:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    return trained(torch.nn.parallel.DistributedDataParallel(model))


def _fsdp(packed: bool) -> Bits:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    made = Made()
    model = made()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    model = _packed(model, packed)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with torch.no_grad():
        from ..architecture import ids

        return kept(model(input_ids=ids(), use_cache=False))


def _synchronized(packed: bool) -> Bits:
    """Parameters and buffers are broadcast by hand, as many trainers do."""
    made = Made()
    model = _packed(made(), packed)
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)
    return made.outputs(model)


PROCESSES: dict[str, Flow] = {
    "fork": lambda pack: _elsewhere(pack, "fork"),
    "spawn": lambda pack: _elsewhere(pack, "spawn"),
    "spawn_shared": lambda pack: _elsewhere(pack, "spawn", share=True),
    "queue": _queued,
    "ddp_norms": _distributed(partial(_ddp, adapter=False, ready=False)),
    "ddp_lora": _distributed(partial(_ddp, adapter=True, ready=False)),
    "ddp_lora_checkpointing": _distributed(partial(_ddp, adapter=True, ready=True)),
    "fsdp2": _distributed(_fsdp),
    "broadcast_parameters": _distributed(_synchronized),
}
