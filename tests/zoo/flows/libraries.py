"""Compilers, trainers, pipelines, and what else takes a model as it is."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..architecture import ids, left_padded
from ..bits import kept
from ..case import seeded
from ..shrink import Absent
from .adapters import adapted
from .tools import Bits, Flow, Made, Pack, trained


def _compiled(backend: str, name: str = "llama", dtype: str = "bf16") -> Flow:
    def flow(pack: Pack) -> Bits:
        made = Made(name, dtype)
        model = pack(made())
        torch._dynamo.reset()
        return made.outputs(torch.compile(model, backend=backend, fullgraph=True))

    return flow


def _compiled_blocks(pack: Pack) -> Bits:
    made = Made()
    model = pack(made())
    torch._dynamo.reset()
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    return made.outputs(model)


def _compiled_training(pack: Pack) -> Bits:
    torch._dynamo.reset()
    model = adapted(pack(Made()()))
    return trained(torch.compile(model, backend="aot_eager"))


def _exported(strict: bool) -> Flow:
    def flow(pack: Pack) -> Bits:
        model = pack(Made()())

        class Logits(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = model

            def forward(self, tokens: Any) -> Any:
                return self.model(input_ids=tokens, use_cache=False).logits

        with torch.no_grad():
            program = torch.export.export(Logits().eval(), (ids(),), strict=strict)
            return {"logits": program.module()(ids())}

    return flow


def _traced(pack: Pack) -> Bits:
    model = pack(Made("bert")())
    model.config.return_dict = False
    with torch.no_grad():
        traced = torch.jit.trace(model, (ids(),), strict=False, check_trace=False)
        return kept(traced(ids()))


def _autocast(pack: Pack) -> Bits:
    made = Made(dtype="fp32")
    model = pack(made())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return made.outputs(model)


def _inference(pack: Pack) -> Bits:
    made = Made()
    model = pack(made())
    with torch.inference_mode():
        out = kept(model(**left_padded()))
    return out | {f"after {name}": it for name, it in made.outputs(model).items()}


def _static_cache(pack: Pack) -> Bits:
    model = pack(Made()())
    out = model.generate(
        **left_padded(),
        max_new_tokens=4,
        do_sample=False,
        pad_token_id=0,
        cache_implementation="static",
        disable_compile=True,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return kept({"tokens": out.sequences, "logits": out.logits})


def _generated(**options: Any) -> Flow:
    def flow(pack: Pack) -> Bits:
        model = pack(Made()())
        seeded()
        return {"tokens": model.generate(**left_padded(), max_new_tokens=4, pad_token_id=0, **options)}

    return flow


def _assisted(pack: Pack) -> Bits:
    made = Made()
    model, other = pack(made()), pack(made())
    tokens = ids(batch=1)
    out = model.generate(tokens, assistant_model=other, max_new_tokens=4, do_sample=False, pad_token_id=0)
    return {"tokens": out}


def _dataset() -> list[dict[str, Any]]:
    return [{"input_ids": row, "labels": row} for row in ids(batch=4, length=8).tolist()]


def _trainer(pack: Pack, resume: bool = False) -> Bits:
    from transformers import Trainer, TrainingArguments

    made = Made()
    with tempfile.TemporaryDirectory() as folder:

        def train(steps: int, checkpoint: Any = None) -> Any:
            model = adapted(pack(made()))
            arguments = TrainingArguments(
                folder,
                max_steps=steps,
                per_device_train_batch_size=2,
                learning_rate=0.01,
                lr_scheduler_type="constant",
                save_steps=1,
                report_to=[],
                use_cpu=True,
                disable_tqdm=True,
                seed=3,
            )
            trainer = Trainer(model=model, args=arguments, train_dataset=_dataset())
            trainer.train(resume_from_checkpoint=checkpoint)
            return model

        if resume:
            train(1)
            model = train(2, str(Path(folder) / "checkpoint-1"))
        else:
            model = train(2)
        bits = {name: it.detach().clone() for name, it in model.named_parameters() if it.requires_grad}
        return bits | made.outputs(model.eval())


def _trainer_evaluates(pack: Pack) -> Bits:
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(folder, report_to=[], use_cpu=True, disable_tqdm=True)
        found = Trainer(model=pack(Made()()), args=arguments, eval_dataset=_dataset()).evaluate()
    return {"loss": torch.tensor(found["eval_loss"], dtype=torch.float64)}


def _tokenizer() -> Any:
    tests = str(Path(__file__).resolve().parents[2])
    if tests not in sys.path:
        sys.path.append(tests)
    from support.checkpoints import byte_tokenizer

    return byte_tokenizer()


def _text_pipeline(pack: Pack) -> Bits:
    from transformers import pipeline

    pipe = pipeline("text-generation", model=pack(Made()()), tokenizer=_tokenizer(), device="cpu")
    out = pipe("the exponent", max_new_tokens=4, do_sample=False, return_tensors=True)
    return {"tokens": torch.tensor(out[0]["generated_token_ids"])}


def _feature_pipeline(pack: Pack) -> Bits:
    from transformers import pipeline

    pipe = pipeline(
        "feature-extraction", model=pack(Made("bert_embeddings")()), tokenizer=_tokenizer(), device="cpu"
    )
    return {"features": torch.tensor(pipe("the exponent", return_tensors=False), dtype=torch.float64)}


def _embedder(pack: Pack) -> Bits:
    try:
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.models import Pooling, Transformer
    except ImportError as error:
        raise Absent("sentence-transformers is not installed") from error
    with tempfile.TemporaryDirectory() as folder:
        Made("bert_embeddings", "fp32")().save_pretrained(folder)
        _tokenizer().save_pretrained(folder)
        word = Transformer(folder, max_seq_length=32)
        model = SentenceTransformer(
            modules=[word, Pooling(word.get_word_embedding_dimension())], device="cpu"
        )
    pack(model)
    return {"embeddings": torch.from_numpy(model.encode(["a sentence", "another one, longer"]))}


def _offloaded(act: Callable[[Any, str], Any]) -> Flow:
    def flow(pack: Pack) -> Bits:
        made = Made()
        with tempfile.TemporaryDirectory() as folder:
            model = act(pack(made()), folder)
            return made.outputs(model)

    return flow


def _cpu_offload(model: Any, folder: str) -> Any:
    from accelerate import cpu_offload

    return cpu_offload(model, execution_device=torch.device("cpu"))


def _disk_offload(model: Any, folder: str) -> Any:
    from accelerate import disk_offload

    return disk_offload(model, folder, execution_device=torch.device("cpu"))


def _dispatched(model: Any, folder: str) -> Any:
    from accelerate import dispatch_model

    return dispatch_model(model, {"model": "cpu", "lm_head": "cpu"}, main_device="cpu", force_hooks=True)


def _mapped(model: Any, folder: str) -> Any:
    """`infer_auto_device_map` must see sizes, and `dispatch_model` take the map."""
    from accelerate import dispatch_model, infer_auto_device_map

    limits = {"cpu": "1GiB"}
    kinds = ["LlamaDecoderLayer"]
    return dispatch_model(
        model, infer_auto_device_map(model, limits, no_split_module_classes=kinds), force_hooks=True
    )


def _prepared(pack: Pack) -> Bits:
    from accelerate import Accelerator

    model = adapted(pack(Made()()))
    accelerator = Accelerator(cpu=True)
    return trained(accelerator.prepare(model))


def _quantized(pack: Pack) -> Bits:
    """PyTorch's dynamic quantization takes weights from modules."""
    made = Made("bert", "fp32")
    model = torch.ao.quantization.quantize_dynamic(pack(made()), {torch.nn.Linear}, dtype=torch.qint8)
    return made.outputs(model)


def _saved_by_transformers(pack: Pack) -> Bits:
    made = Made()
    model = pack(made())
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        import tpde.integrations.transformers  # noqa: F401

        return made.outputs(type(made()).from_pretrained(folder, dtype="auto").eval())


def _summed(pack: Pack) -> Bits:
    """Gradients with respect to embeddings that are given, as attributions do."""
    model = pack(Made()())
    given = model.get_input_embeddings()(ids()).detach().requires_grad_()
    model(inputs_embeds=given).logits.float().square().sum().backward()
    return {"gradient": given.grad.clone()}


LIBRARIES: dict[str, Flow] = {
    "compile_eager": _compiled("eager"),
    "compile_aot_eager": _compiled("aot_eager"),
    "compile_aot_eager_fp32": _compiled("aot_eager", dtype="fp32"),
    "compile_bert": _compiled("aot_eager", "bert"),
    "compile_resnet": _compiled("aot_eager", "resnet"),
    "compile_mixtral": _compiled("aot_eager", "mixtral"),
    "compile_blocks": _compiled_blocks,
    "compile_lora_training": _compiled_training,
    "export": _exported(strict=False),
    "export_strict": _exported(strict=True),
    "jit_trace": _traced,
    "autocast": _autocast,
    "inference_mode": _inference,
    "generate_static_cache": _static_cache,
    "generate_sampling": _generated(do_sample=True),
    "generate_beams": _generated(do_sample=False, num_beams=3),
    "generate_assisted": _assisted,
    "trainer_lora": _trainer,
    "trainer_lora_resumed": lambda pack: _trainer(pack, resume=True),
    "trainer_evaluate": _trainer_evaluates,
    "pipeline_text": _text_pipeline,
    "pipeline_features": _feature_pipeline,
    "sentence_transformers": _embedder,
    "accelerate_cpu_offload": _offloaded(_cpu_offload),
    "accelerate_disk_offload": _offloaded(_disk_offload),
    "accelerate_dispatch": _offloaded(_dispatched),
    "accelerate_device_map": _offloaded(_mapped),
    "accelerate_prepare": _prepared,
    "quantize_dynamic": _quantized,
    "save_pretrained": _saved_by_transformers,
    "input_gradients": _summed,
}
