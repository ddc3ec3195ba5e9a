"""What goes to each device, sorted by how a plan keeps it there, and bringing what stays on the device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch import nn

from tpde.files.forward_order import forward_order
from tpde.loading.checkpoint_files import Checkpoint, Stored
from tpde.loading.model_units import header_of, unit_of
from tpde.loading.plain_weights import decode_runs
from tpde.loading.runs import Run
from tpde.loading.window_weights import bring_windows, window_room
from tpde.planning.stream_plan import StreamPlan
from tpde.planning.units import Placement
from tpde.weights.source import Source


def _nothing(nbytes: int) -> None:
    """Tell nobody what was read."""


class Home:
    """What goes to one device.

    Attributes
    ----------
    runs, plain : dict of str to Run
        Its parameters, and those of them that it keeps plain.
    stored : dict of Placement to dict of str to Stored
        The tensors that they are made of, by where these stay.
    windows : dict of str to Stored
        Those of parameters that go to the window layout.
    found : dict of str to Source
        Those that have been opened.
    """

    def __init__(self) -> None:
        self.runs: dict[str, Run[Stored]] = {}
        self.plain: dict[str, Run[Stored]] = {}
        self.stored: dict[Placement, dict[str, Stored]] = {it: {} for it in Placement}
        self.windows: dict[str, Stored] = {}
        self.found: dict[str, Source] = {}

    def bring(
        self,
        model: nn.Module,
        checkpoint: Checkpoint,
        device: torch.device,
        plan: StreamPlan,
        progress: Callable[[int], None] | None,
    ) -> None:
        """Bring what stays on the device.

        Plain weights come first, the largest of them at the start: while they are decoded, their packed form
        is on the device as well, and then there is room for it. Those in the window layout are next, for the
        same reason.

        Parameters
        ----------
        model : nn.Module
            Which is given the plain weights.
        checkpoint : Checkpoint
            Its files.
        device : torch.device
            The device.
        plan : StreamPlan
            What it has room for.
        progress : callable, optional
            Called with numbers of bytes read.
        """
        read = _nothing if progress is None else progress
        # What the plan keeps for all that is not there yet.
        room = plan.vram - sum(plan.parts[it] for it in ("plain", "fixed", "pages", "index", "decoded"))
        decode_runs(model, self.plain, device, progress, room)
        rooms = {it: window_room(it, header_of(it)) for it in self.windows.values()}
        self.found |= bring_windows(rooms, device, room - plan.parts["windows"], read)
        resident = list(self.stored[Placement.PACKED].values())
        for tensor, it in zip(checkpoint.read(resident, device), resident, strict=True):
            self.found[it.name] = tensor
            read(it.extent.size)


def homes_of(
    model: nn.Module,
    runs: Mapping[str, Run[Stored]],
    where: Mapping[str, torch.device],
    plans: Mapping[torch.device, StreamPlan],
    fused: Collection[str],
) -> dict[torch.device, Home]:
    """Sort a model's packed parameters.

    Parameters
    ----------
    model : nn.Module
        On the `meta` device.
    runs : mapping of str to Run
        Its packed parameters.
    where : mapping of str to torch.device
        The device of each.
    plans : mapping of torch.device to StreamPlan
        Of these devices.
    fused : collection of str
        Parameters that go to the window layout where a plan says so of their units.
    """
    homes: dict[torch.device, Home] = {}
    for name in forward_order(runs):  # the first forward pass waits for files that come to host memory
        run, home = runs[name], homes.setdefault(where[name], Home())
        kept = plans[where[name]].placements[unit_of(model, name)]
        home.runs[name] = run
        if kept is Placement.WINDOWS:
            part = run.parts[0]
            if name in fused and window_room(part, header_of(part)):
                home.windows[name] = part
                continue
            kept = Placement.PACKED  # beside those of its unit that can be there
        home.stored[kept] |= {part.name: part for part in run.parts}
        if kept is Placement.PLAIN:
            home.plain[name] = run
    return homes
