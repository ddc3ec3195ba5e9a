"""Transformers models under a budget of device memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import torch

from tpde.errors import OutOfMemory
from tpde.integrations.transformers.activations import Activations, activations_of
from tpde.integrations.transformers.budget_plan import plan_streaming
from tpde.integrations.transformers.expert_modules import cache_size, routed_modules
from tpde.integrations.transformers.model_footprint import activation_dtype
from tpde.integrations.transformers.tokens import limit_tokens
from tpde.integrations.transformers.warmup import Warmup
from tpde.integrations.transformers.weight_map import WeightMap
from tpde.loading.budgeted import Streaming
from tpde.loading.checkpoint_files import Checkpoint
from tpde.nn import route_experts
from tpde.nn.routing import fused
from tpde.planning.budget import Budget
from tpde.planning.shortages import too_little_ram
from tpde.planning.stream_plan import StreamPlan
from tpde.streaming.experts import ExpertStore


class ModelStreaming(Streaming):
    """What brings a transformers model's weights to its devices.

    Parameters
    ----------
    budget : Budget
        Of each device; `ram` is shared by those that have packed weights.
    progress : callable, optional
        As of `Streaming`.
    warmup : Warmup, optional
        What loads kernels meanwhile; `begin` waits for it.
    fused : collection of str
        As of `Streaming`.

    Attributes
    ----------
    experts : dict of torch.device to ExpertStore
        Of the devices that routed experts are fetched to.
    """

    def __init__(
        self,
        budget: Budget,
        progress: Callable[[int], None] | None = None,
        *,
        warmup: Warmup | None = None,
        fused: Collection[str] = (),
    ) -> None:
        super().__init__(budget, progress, fused=fused)
        self.experts: dict[torch.device, ExpertStore] = {}
        self._activations: Activations | None = None  # until it is planned with
        self._warmup = warmup

    def plan(
        self, model: Any, checkpoint: Checkpoint, weights: WeightMap, where: Mapping[str, torch.device]
    ) -> None:
        """Take the budget of each device, and decide where its weights go. Nothing is read.

        Parameters
        ----------
        model : PreTrainedModel
            On the `meta` device.
        checkpoint : Checkpoint
            Its files.
        weights : WeightMap
            Which of their tensors make up its parameters.
        where : mapping of str to torch.device
            The devices of parameters and buffers, packed or not. What is not named may be on any.

        Raises
        ------
        OutOfMemory
            If a budget is not free, or too small, or holds no model such as this one.
        """
        budget = self.budget
        self._activations = activations_of(model, activation_dtype(model.parameters()).itemsize)
        devices = sorted(set(where.values()), key=str)  # also those that keep all of theirs plain
        names = [
            name for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
        ]
        shares = max(len({where[name] for name in weights.runs}), 1)  # others need no host memory
        ram = None if budget.ram is None else budget.ram // shares
        for device in devices:
            only = {name for name in names if where.get(name, device) == device}

            def decide(vram: int, only: set[str] = only) -> StreamPlan:
                share = replace(budget, vram=vram, ram=ram)
                return plan_streaming(model, checkpoint, weights, share, only=only, fused=self._fused)

            warmup = self._warmup if self._warmup is not None and self._warmup.device == device else None
            try:
                self.decide(device, decide, None if warmup is None else warmup.reserved)
            except OutOfMemory as error:
                if error.budget != "ram" or error.least is None or budget.ram is None:
                    raise
                raise too_little_ram(error.least * shares, budget.ram) from None

    def route(self, model: torch.nn.Module) -> None:
        """Let experts in host memory be fetched as routed to, through what memory is left for a cache."""
        for device, streamer in self.streamers.items():
            plan, modules = self.plans[device], routed_modules(model, streamer)
            if not modules:
                continue
            size, room = cache_size(modules, plan.piece, plan.parts["experts"], plan.vram - plan.used)
            if not size:
                continue  # not even one fits: they come with their blocks
            cache = self.machine.device(device, size, streamer.device)
            streamer.own(cache)
            store = self.experts[device] = ExpertStore(cache, 0, size, room, plan.piece)
            for module in modules:
                route_experts(module, store.module(fused(module)))

    def attach(self, model: Any) -> None:
        """Belong to a model that is loaded, and hold it to its numbers of tokens and sequences."""
        assert self._activations is not None
        super().attach(model)
        limit_tokens(model, self.budget.max_tokens, self.budget.max_batch, self._activations)

    def begin(self, model: Any) -> None:
        """Bring what stays in host memory when kernels are there: the first token needs all of those."""
        if self._warmup is not None:
            self._warmup.wait()
        super().begin(model)

    def record(self) -> None:
        """Start to note when things happen: see `Streaming.record`."""
        super().record()
        for device, store in self.experts.items():
            store.record(self.streamers[device].device.trace)

    def check(self) -> None:
        """Make sure that all weights that were used so far were sound: see `Streaming.check`."""
        super().check()
        for store in self.experts.values():
            store.check()

    def stats(self) -> dict[str, Any]:
        """For each device, what was copied so far: see `Streaming.stats`."""
        found = super().stats()
        for device, store in self.experts.items():
            found[str(device)] |= store.stats()
        return found
