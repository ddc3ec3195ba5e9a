"""Loading the kernels of PyTorch and its libraries while weights are brought to a device.

A kernel is loaded when it is first launched, and cuBLAS and cuDNN begin with whole files of them. In the
first forward pass everything waits for that, 0.3 s; while files are read, processors have time.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from transformers.activations import ACT2FN

from tpde.integrations.transformers.internals import attention_of
from tpde.loading.footprint import FIXED_BYTES, OUTSIDE_BYTES
from tpde.memory.allowance import held

log = logging.getLogger(__name__)

_left: dict[torch.device, int] = {}  # bytes, by those whose models were not loaded in the end

TOKENS = 8  # of the pass: more than one, for which there are other kernels
WIDTH = 512  # of a row: all that is allocated at a time fits the allocator's smallest segment


class Warmup:
    """Does a little of what most models do, in a thread of its own.

    Allocates less than what plans keep for libraries (`FIXED_BYTES`), in which their own memory is.

    Parameters
    ----------
    config : PretrainedConfig
        Of the model's text part.
    device : torch.device
        A CUDA device with its number.
    dtype : torch.dtype
        Of activations.
    work : callable, optional
        What is done, with these three: `run_typical` by default.

    Attributes
    ----------
    device : torch.device
        The same.
    reserved : int
        What `Held.counted` was there before, but for what a warm-up in vain has left.
    """

    def __init__(
        self,
        config: Any,
        device: torch.device,
        dtype: torch.dtype,
        work: Callable[[Any, torch.device, torch.dtype], None] | None = None,
    ) -> None:
        self.device = device
        self.reserved = max(held(device).counted - _left.pop(device, 0), 0)
        # Libraries keep memory for each stream: it must be the one that the model will run on.
        self._stream = torch.cuda.current_stream(device)
        self._work = work or run_typical
        self._thread = threading.Thread(target=self._run, args=(config, device, dtype), name="tpde-warmup")
        self._thread.start()

    def _run(self, config: Any, device: torch.device, dtype: torch.dtype) -> None:
        try:
            with torch.cuda.stream(self._stream):
                self._work(config, device, dtype)
        except Exception as error:  # nobody needs the results, and what is broken says so where it is needed
            log.debug("kernels were not loaded ahead: %s", error)

    def abandon(self) -> None:
        """Wait for it where loading has failed. What libraries keep now is for the next model on the device.

        Otherwise it would count as what the process had allocated before, and a model would be refused in the
        very budget that the error before had named.
        """
        self.wait()
        kept = held(self.device).counted - self.reserved
        _left[self.device] = min(max(kept, 0), FIXED_BYTES - OUTSIDE_BYTES)

    def wait(self) -> None:
        """Wait for it: then this thread gets the handles of libraries that the other one has made."""
        self._thread.join()


@torch.no_grad()
def run_typical(config: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Run what layers of transformers are made of, on zeros: for a prompt, and for one token.

    No embedding: rows of packed ones are read by a kernel of ours, and PyTorch's takes 0.07 s to load.

    Parameters
    ----------
    config : PretrainedConfig
        Its kind of attention, the heads' width and the activation function count.
    device : torch.device
        Where.
    dtype : torch.dtype
        Of weights and activations.
    """
    # All dtypes are named: transformers sets the default one while it builds a model, for all threads.
    weight = torch.zeros(WIDTH, WIDTH, dtype=dtype, device=device)
    prompt = torch.zeros(1, TOKENS, WIDTH, dtype=dtype, device=device)
    positions = torch.arange(TOKENS, device=device)[None, None].float()
    frequencies = torch.ones(1, WIDTH // 8, 1, dtype=torch.float32, device=device)
    angles = (frequencies @ positions).transpose(1, 2)
    both = torch.cat((angles, angles), -1)
    turns = both.cos().to(dtype), both.sin().to(dtype)
    activation = getattr(config, "hidden_act", None)
    for x in (prompt, prompt[:, :1]):
        wide = x.float()
        normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(dtype)
        y = functional.linear(x * normed + x, weight)
        if activation in ACT2FN:
            y = ACT2FN[activation](y) * y
        half = y[..., : WIDTH // 4].chunk(2, -1)
        cos, sin = (it[:, : x.shape[1]] for it in turns)
        y[..., : WIDTH // 4] * cos + torch.cat((-half[1], half[0]), -1) * sin
        y.argmax(-1)
    _attend(config, device, dtype)


def _attend(config: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Attention to a prompt, the way that the model does it, if it is PyTorch's own.

    Once, for cuDNN to load its libraries: what it plans for a length, in 0.04 to 0.07 s, is of no use to
    other lengths.
    """
    heads = getattr(config, "num_attention_heads", None)
    if attention_of(config) not in (None, "sdpa") or not isinstance(heads, int):
        return
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    query, key = (torch.zeros(1, heads, TOKENS, width, dtype=dtype, device=device) for _ in range(2))
    functional.scaled_dot_product_attention(query, key, key, is_causal=True)
