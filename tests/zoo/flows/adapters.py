"""Adapters by PEFT: losses and gradients of two steps, and what comes after training."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch

from ..bits import kept
from ..case import seeded
from .tools import Bits, Flow, Made, Pack, trained

_LINEAR = ["q_proj", "v_proj", "down_proj"]
_METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("LoraConfig", {"r": 4}),
    "lora_dora": ("LoraConfig", {"r": 4, "use_dora": True}),
    "lora_rslora": ("LoraConfig", {"r": 4, "use_rslora": True}),
    "lora_dropout": ("LoraConfig", {"r": 4, "lora_dropout": 0.1}),
    "lora_bias": ("LoraConfig", {"r": 4, "lora_bias": True}),
    "lora_pissa": ("LoraConfig", {"r": 4, "init_lora_weights": "pissa"}),
    "lora_olora": ("LoraConfig", {"r": 4, "init_lora_weights": "olora"}),
    "lora_all_linear": ("LoraConfig", {"r": 4, "target_modules": "all-linear"}),
    "lora_embedding": ("LoraConfig", {"r": 4, "target_modules": ["embed_tokens", "q_proj"]}),
    "lora_head": ("LoraConfig", {"r": 4, "target_modules": ["lm_head", "q_proj"]}),
    "lora_modules_to_save": ("LoraConfig", {"r": 4, "modules_to_save": ["lm_head"]}),
    "lora_modules_to_save_embedding": ("LoraConfig", {"r": 4, "modules_to_save": ["embed_tokens"]}),
    "lora_trainable_tokens": ("LoraConfig", {"r": 4, "trainable_token_indices": [5, 6]}),
    "lora_layers": ("LoraConfig", {"r": 4, "layers_to_transform": [0]}),
    "adalora": ("AdaLoraConfig", {"total_step": 10, "tinit": 0, "tfinal": 2, "deltaT": 1}),
    "adamss": ("AdamssConfig", {}),
    "beft": ("BeftConfig", {}),
    "boft": ("BOFTConfig", {"boft_block_size": 4}),
    "c3a": ("C3AConfig", {"block_size": 8}),
    "deft": ("DeftConfig", {}),
    "delora": ("DeloraConfig", {"r": 4}),
    "fourierft": ("FourierFTConfig", {"n_frequency": 16}),
    "frod": ("FrodConfig", {}),
    "glora": ("GloraConfig", {"r": 4}),
    "gralora": ("GraloraConfig", {"r": 4, "gralora_k": 2}),
    "hira": ("HiraConfig", {"r": 4}),
    "hra": ("HRAConfig", {"r": 4}),
    "ia3": ("IA3Config", {"feedforward_modules": ["down_proj"]}),
    "lily": ("LilyConfig", {"r": 4}),
    "ln_tuning": ("LNTuningConfig", {"target_modules": ["input_layernorm"]}),
    "loha": ("LoHaConfig", {"r": 4}),
    "lokr": ("LoKrConfig", {"r": 4}),
    "miss": ("MissConfig", {"r": 4}),
    "oft": ("OFTConfig", {"oft_block_size": 8, "r": 0}),
    "osf": ("OSFConfig", {}),
    "p_tuning": ("PromptEncoderConfig", {"num_virtual_tokens": 3, "target_modules": None}),
    "peanut": ("PeanutConfig", {}),
    "poly": ("PolyConfig", {"r": 4, "n_tasks": 1, "n_skills": 2}),
    "prefix_tuning": ("PrefixTuningConfig", {"num_virtual_tokens": 3, "target_modules": None}),
    "prompt_tuning": ("PromptTuningConfig", {"num_virtual_tokens": 3, "target_modules": None}),
    "cpt": (
        "CPTConfig",
        {"cpt_token_ids": [5, 6], "cpt_mask": [1, 1], "cpt_tokens_type_mask": [1, 2], "target_modules": None},
    ),
    "adaption_prompt": (
        "AdaptionPromptConfig",
        {"adapter_len": 3, "adapter_layers": 1, "target_modules": None},
    ),
    "psoft": ("PsoftConfig", {"r": 4}),
    "pvera": ("PveraConfig", {"r": 4}),
    "randlora": ("RandLoraConfig", {"r": 4}),
    "road": ("RoadConfig", {"group_size": 8}),
    "shira": ("ShiraConfig", {"r": 4}),
    "supertuning": ("SupertuningConfig", {}),
    "tinylora": ("TinyLoraConfig", {}),
    "trainable_tokens": (
        "TrainableTokensConfig",
        {"token_indices": [5, 6], "target_modules": ["embed_tokens"]},
    ),
    "unilora": ("UniLoraConfig", {"r": 4}),
    "vblora": ("VBLoRAConfig", {"r": 4, "num_vectors": 16, "vector_length": 16}),
    "vera": ("VeraConfig", {"r": 4}),
    "waveft": ("WaveFTConfig", {"n_frequency": 16}),
}


def _config(method: str) -> Any:
    import peft

    kind, options = _METHODS[method]
    given = {"task_type": "CAUSAL_LM", "target_modules": _LINEAR} | options
    return getattr(peft, kind)(**{name: value for name, value in given.items() if value is not None})


def adapted(model: Any, method: str = "lora") -> Any:
    """Put an adapter onto a model, the same one each time, that changes what the model computes."""
    from peft import get_peft_model

    seeded()
    model = get_peft_model(model, _config(method))
    seeded()
    with torch.no_grad():
        for parameter in model.parameters():
            if (
                parameter.requires_grad and not parameter.any()
            ):  # what starts at zero hides what flows through it
                parameter.normal_(0, 0.02)
    return model


def _training(method: str, name: str = "llama", dtype: str = "bf16") -> Flow:
    def flow(pack: Pack) -> Bits:
        return trained(adapted(pack(Made(name, dtype)()), method), given=_task if method == "poly" else None)

    return flow


def _task() -> dict[str, Any]:
    from ..architecture import ids

    tokens = ids(length=8)
    return {"input_ids": tokens, "labels": tokens, "task_ids": torch.zeros(2, dtype=torch.long)}


def _packed_after(pack: Pack) -> Bits:
    return trained(pack(adapted(Made()())))


def _after(act: Callable[[Any], Any]) -> Flow:
    def flow(pack: Pack) -> Bits:
        made = Made()
        model = adapted(pack(made()))
        trained(model)
        return made.outputs(act(model).eval())

    return flow


def _merged_and_back(model: Any) -> Any:
    model.merge_adapter()
    model.unmerge_adapter()
    return model


def _disabled(pack: Pack) -> Bits:
    made = Made()
    model = adapted(pack(made())).eval()
    with model.disable_adapter():
        return made.outputs(model)


def _saved(pack: Pack) -> Bits:
    from peft import PeftModel

    made = Made()
    model = adapted(pack(made()))
    trained(model)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = PeftModel.from_pretrained(pack(made()), folder)
        return made.outputs(again.eval())


def _two(pack: Pack) -> Bits:
    """Two adapters, one of them chosen."""
    made = Made()
    model = adapted(pack(made()))
    model.add_adapter("other", _config("lora_dora"))
    model.set_adapter("other")
    return trained(model) | made.outputs(model.eval())


def _generated(pack: Pack) -> Bits:
    from ..architecture import left_padded

    model = adapted(pack(Made()())).eval()
    out = model.generate(
        **left_padded(),
        max_new_tokens=4,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return kept({"tokens": out.sequences, "logits": out.logits})


def _experts(pack: Pack) -> Bits:
    """LoRA on the fused experts of a Mixtral."""
    from peft import LoraConfig, get_peft_model

    model = pack(Made("mixtral")())
    seeded()
    config = LoraConfig(
        r=4,
        target_modules=["q_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    return trained(get_peft_model(model, config))


def _on(name: str, targets: list[str], **more: Any) -> Flow:
    def flow(pack: Pack) -> Bits:
        from peft import LoraConfig, get_peft_model

        made = Made(name)
        model = pack(made())
        seeded()
        adapter = get_peft_model(model, LoraConfig(r=4, target_modules=targets, **more))
        return trained(adapter, given=lambda: made.case.cast(made.case.architecture.inputs()))

    return flow


ADAPTERS: dict[str, Flow] = {
    **{f"peft_{method}": _training(method) for method in _METHODS},
    "peft_lora_fp32": _training("lora", dtype="fp32"),
    "peft_lora_fp16": _training("lora", dtype="fp16"),
    "peft_lora_tied": _training("lora_all_linear", "qwen2_tied"),
    "peft_trainable_tokens_tied": _training("trainable_tokens", "qwen2_tied"),
    "peft_lora_trainable_tokens_tied": _training("lora_trainable_tokens", "qwen2_tied"),
    "peft_modules_to_save_tied": _training("lora_modules_to_save", "qwen2_tied"),
    "peft_lora_embedding_tied": _training("lora_embedding", "qwen2_tied"),
    "peft_lora_experts": _experts,
    "peft_lora_gpt2_conv1d": _on("gpt2", ["c_attn", "c_proj"], fan_in_fan_out=True),
    "peft_lora_bert": _on("bert", ["query", "value"]),
    "peft_lora_resnet_conv2d": _on("resnet", ["convolution"]),
    "peft_lora_unet": _on("unet2d_condition", ["to_q", "to_v", "conv1"]),
    "peft_packed_after": _packed_after,
    "peft_merge_and_unload": _after(lambda model: model.merge_and_unload()),
    "peft_unload": _after(lambda model: model.unload()),
    "peft_merge_and_unmerge": _after(_merged_and_back),
    "peft_disable_adapter": _disabled,
    "peft_save_and_load": _saved,
    "peft_two_adapters": _two,
    "peft_generate": _generated,
}
