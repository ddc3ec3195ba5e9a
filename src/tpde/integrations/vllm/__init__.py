"""vLLM serves packed models: a plugin that it finds by itself, with no change to vLLM.

How it fits together:

- `register` is the entry point. vLLM calls it in each of its processes. It names the quantization method
  `tpde`, and imports next to nothing: what else there is, is imported where a model uses it.
- `config.TpdeConfig` is what vLLM makes of `--quantization tpde` or of a packed model's `config.json`. It
  gives each linear layer, embedding and mixture of experts a method: `linear_method`, `embedding_method`,
  `experts_method`. With `VLLM_BATCH_INVARIANT`, `whole_rows_method` is that of layers whose sums vLLM splits
  over GPUs.
- A method creates weights on the `meta` device, in the shapes that plain vLLM has. vLLM's own loaders then
  shard and merge what comes from the files, layer by layer, so that tensor parallelism and merged projections
  need nothing here. When a layer is complete, `process_weights_after_loading` packs it (`weights.hold`).
- What is at rest is a `weights.Weight`: packed, or plain where it would not shrink. Its module has the blob
  as its `weight` (`blob_parameter`), and a handle, a buffer of 16 bytes. Compiled code sees the handle alone
  (`handle_operators`), and depends on no number, size or form of a weight: all layers share it, vLLM's cache
  of compiled code holds for the next process, and CUDA graphs keep addresses that stay.
- What is computed from decoded weights goes through the method that the plain layer would have, with its
  kernels and bits. Only products from the window layout (`kernels="fused"`, on GPUs) are ours: of linear
  layers, and of experts (`internals.why_decoded` says of which not).
- Decoded weights are in fresh memory each time. vLLM runs layers on several streams, which one workspace
  would have to keep apart; PyTorch's allocator does. Profiling sees that memory, and graphs share a pool.
  Experts alone share one room (`expert_stacks`): theirs is large, and all layers run them on one stream.
- `loader` decodes packed files tensor by tensor, before a model looks at names. It is vLLM's default loader
  but for that, and takes its place where vLLM has a `TpdeConfig`; for other models it is that loader. Models
  do things to layers that these do not hear of: `before_reading` sees to that before the first tensor.
- `internals` has what differs between versions of vLLM, and all that its documentation does not describe.
- `refusals` names what does not work, `sleep_mode` what of vLLM's sleep does, `report` says what was gained.
"""

from __future__ import annotations

from tpde.format.constants import METHOD
from tpde.integrations.vllm.report import log


def register() -> None:
    """Name tpde's quantization method to vLLM: its entry point, called in every process, maybe twice."""
    try:
        from vllm.model_executor.layers.quantization import register_quantization_config

        from tpde.integrations.vllm.config import TpdeConfig
    except ImportError as error:  # of a vLLM that is another inside: it goes on without
        log.warning("tpde: this vLLM cannot use the plugin (%s); models that are not packed run", error)
        return
    register_quantization_config(METHOD)(TpdeConfig)
