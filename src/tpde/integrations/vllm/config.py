"""What vLLM takes packed models for: quantized ones, by a configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from tpde.errors import InvalidInput
from tpde.format.constants import METHOD, SUFFIX, VERSION
from tpde.integrations.vllm.report import LoadReport
from tpde.loading.quantized import PackedConfig

if TYPE_CHECKING:
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

_KNOWN = ("kernels", "quant_method", "source", "version")
_LM_HEAD = "lm_head.weight"


class TpdeConfig(QuantizationConfig):  # type: ignore[misc]
    """The `quantization_config` of a model whose weights are to be packed, or are packed in its files.

    Parameters
    ----------
    kernels : {"fused", "exact"}
        How linear layers are computed: see `tpde.nn.set_kernels`.
    version : int
        Of the format of packed files.
    source : dict, optional
        The `quantization_config` of the model that was packed.

    Raises
    ------
    InvalidInput
        If `kernels` is something else, or the model was quantized otherwise before it was packed.
    UnsupportedVersion
        If the weights were packed by a newer tpde.

    Attributes
    ----------
    report : LoadReport
        What was gained so far, in this process.
    """

    def __init__(self, kernels: str = "fused", version: int = VERSION, source: Any = None) -> None:
        super().__init__()
        from tpde.integrations.vllm import loader
        from tpde.integrations.vllm.expert_stacks import Room
        from tpde.nn.kernels import check_kernels

        PackedConfig(version, source)
        self.kernels = check_kernels(kernels)
        self.report = LoadReport(self.kernels)
        self._room = Room()
        self._has_copy = False
        loader.register()

    def __setstate__(self, state: dict[str, Any]) -> None:
        from tpde.integrations.vllm import loader

        self.__dict__.update(state)
        loader.register()  # in a worker, which gets its configuration so, before it asks for a loader

    def __repr__(self) -> str:
        return f"TpdeConfig(kernels={self.kernels!r})"

    @classmethod
    def get_name(cls) -> str:
        """The name of the method."""
        return METHOD

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """Dtypes of models."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Compute capability that the kernels need."""
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: all is in `config.json`, and a plain model needs nothing."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> TpdeConfig:
        """Of a `quantization_config` in `config.json` or `--hf-overrides`.

        Raises
        ------
        InvalidInput
            If it has keys that nobody reads.
        """
        unknown = sorted(set(config) - set(_KNOWN))
        if unknown:
            raise InvalidInput(
                f"`quantization_config` has `{unknown[0]}`, which tpde does not know",
                hint='leave it out; what can be said is `"kernels": "fused"` or `"exact"`',
                where="quantization_config",
                found=unknown[0],
            )
        return cls(**{key: value for key, value in config.items() if key != "quant_method"})

    def maybe_update_config(
        self, model_name: str, hf_config: Any = None, revision: str | None = None
    ) -> None:
        """See to what the model's files say, of which vLLM did not tell all.

        `quantization_config` in `--hf-overrides` takes the place of the file's, with all that it says. And a
        head is not tied to the embeddings where packed files have one of its own: vLLM looks for that in
        plain files, from 0.29 on; packed ones have other names. Heads that turn out to be a copy are tied
        again, by vLLM only where they are plain.

        Raises
        ------
        InvalidInput
            If the model is quantized otherwise, or was before it was packed.
        UnsupportedVersion
            If the weights were packed by a newer tpde.
        """
        from tpde.integrations.vllm import internals, refusals

        said = internals.quantization_of_files(model_name, revision)
        if said is not None and str(said.get("quant_method")).lower() != METHOD:  # vLLM takes it so, too
            raise refusals.quantized(said)
        if said is not None:
            PackedConfig(**said)
        if not getattr(hf_config, "tie_word_embeddings", False):
            return
        if not internals.unties_heads():
            return
        names = internals.names_in_files(model_name, revision)
        self._has_copy = any(it.endswith((_LM_HEAD, _LM_HEAD + SUFFIX)) for it in names)
        if any(it.endswith(_LM_HEAD + SUFFIX) for it in names):
            hf_config.tie_word_embeddings = False
            hf_config.get_text_config().tie_word_embeddings = False

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """How a layer's weights are held; None if as without tpde.

        Raises
        ------
        InvalidInput
            If the model is to be run in a way that does not work with packed weights.
        """
        from vllm.model_executor.layers.linear import LinearBase, RowParallelLinear
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        from tpde.integrations.vllm import internals, refusals
        from tpde.integrations.vllm.embedding_method import TpdeEmbeddingMethod
        from tpde.integrations.vllm.experts_method import TpdeExpertsMethod
        from tpde.integrations.vllm.linear_method import TpdeLinearMethod
        from tpde.integrations.vllm.whole_rows_method import WholeRowsMethod

        # Of attention vLLM asks again when weights are reloaded, and 0.26 sets no configuration for that.
        if not isinstance(layer, LinearBase | VocabParallelEmbedding | internals.RoutedExperts):
            return None
        refusals.check()
        invariant = self.kernels == "fused" and internals.is_batch_invariant()
        if invariant and isinstance(layer, RowParallelLinear):
            return WholeRowsMethod(self.report, prefix)
        if isinstance(layer, LinearBase):
            return TpdeLinearMethod(self.report, prefix)
        if isinstance(layer, VocabParallelEmbedding):
            if internals.head_classifies():
                return None
            return TpdeEmbeddingMethod(self.report, prefix, may_share=self._has_copy)
        if isinstance(layer, internals.RoutedExperts) and refusals.can_pack_experts():
            plain = internals.UnquantizedFusedMoEMethod(layer.moe_config)
            return TpdeExpertsMethod(self.report, plain, self._room, prefix)
        return None
