"""What `tpde run --stats` tells of memory and of copying."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tpde.cli.common import say, size

if TYPE_CHECKING:
    import torch


def say_copies(model: Any) -> None:
    """How well the copying of streamed weights was hidden, and why not better."""
    streaming = getattr(model, "tpde_streamer", None)
    if streaming is None:
        return
    if not streaming.streamers:
        say("copies", "none: all weights fit the device")
    for device, found in streaming.stats().items():
        if "window_weights" in found:
            there = f"{found['window_weights']} weights, {size(found['window_bytes'])}"
            say(device, f"in the window layout, multiplied without being decoded: {there}")
    for device in streaming.streamers:
        for line in streaming.summary(device).text().splitlines():
            say(str(device), line)


def say_sizes(result: dict[str, Any], device: torch.device) -> None:
    """What weights take, and the most memory that there was."""
    say(
        "weights",
        f"{size(result['packed_bytes'])} packed, {size(result['unpacked_bytes'])} unpacked; "
        f"{size(result['plain_bytes'])} stored plain; loaded in {result['load_seconds']:.2f} s",
    )
    what = "of the GPU's memory beyond the context" if device.type == "cuda" else "of memory, Python included"
    say("peak", f"{size(result['peak_bytes'])} {what}")
