"""What is seen to once a model was made, before its weights are read."""

from __future__ import annotations

from typing import Any

from torch import nn
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from tpde.integrations.vllm import internals, refusals
from tpde.integrations.vllm.blob_parameter import BlobParameter
from tpde.integrations.vllm.embedding_method import TpdeEmbeddingMethod
from tpde.integrations.vllm.experts_method import TpdeExpertsMethod
from tpde.integrations.vllm.linear_method import TpdeLinearMethod
from tpde.nn.pack_model import MIN_BYTES


def prepare(model: nn.Module) -> None:
    """Have a model refuse to be saved, and settle what its layers share."""
    _tie(model)
    _pair(model)
    refuse_saving(model)


def count_values(model: nn.Module) -> None:
    """Give parameters of packed layers loaders that count values, and pack a layer when the last has come.

    Not when these were created. vLLM then notes parameters for loading them anew, with their loaders, and
    would never let go of layers that these know. It gives layers their biases, whose names sort before the
    weights': uncounted, their layers would wait for them until all files are read, with decoded weights on
    the device (of a GPT-2, 86 % of the model). Some models give weights other loaders, as mixers of Mamba 2
    do: no values would be counted, and none be packed.
    """
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, TpdeLinearMethod | TpdeExpertsMethod) and method.uses_meta_device:
            internals.initialize_online_processing(layer)


def count_plain(model: nn.Module) -> None:
    """Count what stays plain since its layer has no method of ours: vLLM made it without asking for one.

    The report is that of the others' methods: vLLM's configuration may be another model's, as of a draft.
    """
    asked, report = set[int](), None
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, TpdeLinearMethod | TpdeExpertsMethod):
            asked |= {id(it) for it in layer.parameters(recurse=False)}
            report = method.report
    if report is None:
        return
    for it in model.parameters():
        if id(it) not in asked and not it.is_meta and it.is_floating_point() and it.nbytes >= MIN_BYTES:
            report.plain(it.nbytes, "their layers have no method of tpde's")


def refuse_saving(model: nn.Module) -> None:
    """Have a model refuse to be saved as it is in memory, if it has packed weights by then."""
    model.register_state_dict_pre_hook(_refuse_saving)  # type: ignore[no-untyped-call]


def _refuse_saving(model: nn.Module, *_: Any) -> None:
    """Refuse to give the tensors of a model with packed weights, as `save_sharded_state` asks for them.

    Raises
    ------
    PackedWeight
        If it has some.
    """
    for name, it in model.named_parameters():
        if isinstance(it, BlobParameter):
            raise refusals.no_saving(name)


def _tie(model: nn.Module) -> None:
    """Put the embedding itself where a model gave its weight to a head.

    As `tie_weights` does, which not all models call. Values come for the embedding alone, and the head would
    keep a parameter that has none.
    """
    first: dict[int, Any] = {}
    for it in sorted(model.modules(), key=lambda it: isinstance(it, ParallelLMHead)):
        if _is_packed(it):
            first.setdefault(id(it.weight), it)
    for parent in list(model.modules()):
        for name, head in list(parent._modules.items()):
            if isinstance(head, ParallelLMHead) and _is_packed(head) and first[id(head.weight)] is not head:
                setattr(parent, name, head.quant_method.tie_weights(head, first[id(head.weight)]))


def _pair(model: nn.Module) -> None:
    """Tell an embedding and a head of each other, of which files may hold the same values.

    Of models that have one of each, as vLLM ties plain ones.
    """
    found: list[Any] = [it for it in model.modules() if _is_packed(it)]
    heads = [it for it in found if isinstance(it, ParallelLMHead)]
    embeddings = [it for it in found if not isinstance(it, ParallelLMHead)]
    if len(heads) == len(embeddings) == 1 and heads[0].weight.shape == embeddings[0].weight.shape:
        heads[0].quant_method.pair(embeddings[0])
        embeddings[0].quant_method.pair(heads[0])


def _is_packed(layer: nn.Module) -> bool:
    return isinstance(getattr(layer, "quant_method", None), TpdeEmbeddingMethod)
