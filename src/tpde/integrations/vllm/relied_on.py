"""What of vLLM, beyond what its documentation has plugins use, `internals` relies on."""

from __future__ import annotations

# Names in vLLM, of attributes of instances, too, each with what does not work without it.
RELIED_ON = {
    "config.VllmConfig": "refusals: it has `offload_config`, `model_config`, `load_config`, `lora_config`",
    "config.ModelConfig.enable_sleep_mode": "plain tensors that several threads copy",
    "config.ModelConfig.head_dtype": "refusals: heads of another dtype",
    "config.ModelConfig.sleep_mode_backend": "sleeping, which asks the configuration by that name",
    "config.ParallelConfig.enable_eplb": "refusals: experts that move between devices",
    "config.ParallelConfig.enable_expert_parallel": "plain tensors that several threads copy",
    "config.ParallelConfig.use_ubatching": "experts: two halves of a batch at a time",
    "config.ParallelConfig.world_size": "plain tensors that several threads copy",
    "config.CompilationConfig.cudagraph_mode": "other weights for a model that serves",
    "config.PassConfig.fuse_allreduce_rms": "a warning that results depend on the number of GPUs",
    "config.get_current_vllm_config_or_none": "what the KV cache has room for, and CUDA graphs",
    "device_allocator.sleep_mode_backend.CuMemBackend.suspend": "sleeping",
    "device_allocator.sleep_mode_backend.CuMemBackend.discard": "sleeping",
    "device_allocator.sleep_mode_backend.SleepModeBackendFactory.register_backend": "sleeping",
    "distributed.tensor_model_parallel_all_gather": "results that do not depend on the number of GPUs",
    "envs.VLLM_BATCH_INVARIANT": "results that do not depend on the batch",
    "model_executor.layers.fused_moe.FusedMoEMethodBase.is_monolithic": "experts: which `apply` is called",
    "model_executor.layers.fused_moe.FusedMoEMethodBase.maybe_roundup_sizes": "experts of odd sizes",
    "model_executor.layers.fused_moe.RoutedExperts": "experts: they would stay plain",
    "model_executor.layers.fused_moe.activation.apply_moe_activation": "experts: products from windows",
    "model_executor.layers.fused_moe.oracle.unquantized.UnquantizedMoeBackend.TRITON": "the same",
    "model_executor.layers.fused_moe.unquantized_fused_moe_method.UnquantizedFusedMoEMethod": "experts",
    "model_executor.layers.quantization.base_config.QuantizationConfig.maybe_update_config": "untied heads",
    "model_executor.layers.quantization.base_config.QuantizeMethodBase.uses_meta_device": "packing by layers",
    "model_executor.model_loader.DefaultModelLoader._prepare_weights": "damage in what is stored plain",
    "model_executor.model_loader.DefaultModelLoader.get_all_weights": "packed files",
    "model_executor.model_loader.DefaultModelLoader.load_weights": "telling that files lack weights",
    "model_executor.model_loader.DummyModelLoader.load_weights": "refusing to save random weights",
    "model_executor.model_loader.reload.layerwise.get_layerwise_info": "telling that a layer has no values",
    "model_executor.model_loader.reload.layerwise.initialize_online_processing": "packing by layers",
    "model_executor.offloader.prefetch.PrefetchOffloader.module_offloaders": "packed weights in host memory",
    "model_executor.offloader.prefetch.PrefetchOffloader.wrap_modules": "the same",
    "model_executor.offloader.prefetch._CpuParamOffloader._cpu_storage": "the same",
    "model_executor.offloader.prefetch._CpuParamOffloader._param": "the same",
    "model_executor.offloader.prefetch._ModuleOffloader._param_offloaders": "the same",
    "platforms.current_platform": "exact products in compiled code",
    "transformers_utils.config.get_safetensors_params_metadata": "untied heads",
    "transformers_utils.repo_utils.get_hf_file_to_dict": "refusals, of what `--hf-overrides` hide",
    "utils.torch_utils.direct_register_custom_op": "compiled code",
}
# Versions before which there is nothing of some of these names to rely on.
SINCE = {"device_allocator.sleep_mode_backend.CuMemBackend.discard": (0, 31)}
# Classes of models and layers that compute with tensors from files before layers take them.
COMPUTING = (
    "model_executor.layers.mamba.mamba_mixer.MambaMixer",
    "model_executor.models.bailing_moe.BailingMoeForCausalLM",
    "model_executor.models.jina.JinaEmbeddingsV5DecoderModel",
    "model_executor.models.jina.JinaEmbeddingsV5EncoderModel",
    "model_executor.models.mllama4.Llama4ForConditionalGeneration",
    "model_executor.models.molmo.MolmoForCausalLM",
    "model_executor.models.molmo2.Molmo2ForConditionalGeneration",
    "model_executor.models.sarvam.SarvamMLAForCausalLM",
)
