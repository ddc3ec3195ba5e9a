"""Text from a model: how it is asked, what is told of it. Model, tokenizer and clock are made up."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")

from support.card import Card  # noqa: E402

from tpde.errors import InvalidInput, OutOfMemory  # noqa: E402
from tpde.integrations.transformers.generate import Generation, generate, load_tokenizer  # noqa: E402

CPU = torch.device("cpu")


class Took(dict[str, Any]):
    """What a tokenizer gives."""

    def to(self, device: Any) -> Took:
        assert device == CPU
        return self


class Tokenizer:
    """A token for each word of a prompt; its tokens are numbers."""

    pad_token_id: int | None = None
    eos_token_id: int | None = None

    def __call__(self, text: str, **options: Any) -> Took:
        assert options == {"return_tensors": "pt", "return_token_type_ids": False}
        ids = torch.arange(len(text.split()))[None]
        return Took(input_ids=ids, attention_mask=torch.ones_like(ids))

    def decode(self, ids: Any, **options: Any) -> str:
        assert options.get("skip_special_tokens") is True
        return "".join(f"{it} " for it in ids if it != 99)


class Model:
    """Tells a streamer of a prompt and some tokens, and notes how it is asked."""

    device, text = CPU, True

    def __init__(self, tokens: list[int], pad: int | None = None) -> None:
        self.tokens, self.generation_config = tokens, SimpleNamespace(pad_token_id=pad)
        self.options: dict[str, Any] = {}
        self.drawn = 0.0

    def can_generate(self) -> bool:
        return self.text

    def generate(self, input_ids: Any, attention_mask: Any, streamer: Any, **options: Any) -> None:
        assert torch.is_inference_mode_enabled()
        self.options, self.drawn = options, float(torch.rand(()))
        streamer.put(input_ids)
        for it in self.tokens:
            streamer.put(torch.tensor([it]))
        streamer.end()


def clock() -> Callable[[], float]:
    """Each look at it takes two seconds."""
    return map(float, itertools.count(100, 2)).__next__


def ask(model: Model, tokenizer: Any = None, prompt: str = "a b c", **options: Any) -> tuple[Generation, str]:
    written: list[str] = []
    given = {"max_new_tokens": 7, "temperature": 0.0, "seed": 5} | options
    made = generate(model, tokenizer or Tokenizer(), prompt, write=written.append, **given)
    return made, "".join(written)


@pytest.mark.parametrize(
    ("tokens", "first", "rate", "seconds"),
    [([], 2.0, None, 2.0), ([4], 2.0, None, 4.0), ([4, 5], 2.0, 0.5, 6.0), ([4, 99, 6, 7], 2.0, 0.5, 10.0)],
)
def test_what_is_told_of_a_text(tokens: list[int], first: float, rate: float | None, seconds: float) -> None:
    """Tokens without text count; the prompt is neither among them nor written."""
    made, written = ask(Model(tokens), clock=clock())
    assert made.text == written == "".join(f"{it} " for it in tokens if it != 99)
    assert (made.tokens, made.prompt_tokens) == (tokens, 3)
    assert (made.first_token_seconds, made.tokens_per_second, made.seconds) == (first, rate, seconds)


def test_text_is_written_as_it_comes() -> None:
    seen: list[list[str]] = []
    written: list[str] = []

    class Watching(Model):
        def generate(self, input_ids: Any, attention_mask: Any, streamer: Any, **options: Any) -> None:
            for it in ([1, 2, 3], [4], [5]):
                streamer.put(torch.tensor([it]) if len(it) > 1 else torch.tensor(it))
                seen.append(list(written))

    model = Watching([])
    generate(model, Tokenizer(), "a", max_new_tokens=1, temperature=0, seed=0, write=written.append)
    assert [len("".join(it)) for it in seen] == [0, 2, 4]


def test_how_a_model_is_asked() -> None:
    greedy, drawing = Model([1]), Model([1])
    for model, temperature in ((greedy, 0.0), (drawing, 0.5)):
        ask(model, temperature=temperature)
        assert len(model.options.pop("logits_processor")) == 1
    assert greedy.options == {
        "do_sample": False,
        "temperature": None,
        "top_k": None,
        "top_p": None,
        "max_new_tokens": 7,
        "pad_token_id": 0,
    }
    assert drawing.options == {
        "do_sample": True,
        "temperature": 0.5,
        "max_new_tokens": 7,
        "pad_token_id": 0,
    }


def test_draws_follow_the_seed() -> None:
    models = [Model([1]) for _ in range(3)]
    for model, seed in zip(models, (5, 5, 6), strict=True):
        ask(model, seed=seed)
    assert models[0].drawn == models[1].drawn != models[2].drawn


@pytest.mark.parametrize(
    ("pad", "model", "eos", "used"),
    [(0, 4, 5, 0), (3, 4, 5, 3), (None, 4, 5, 4), (None, 0, 5, 0), (None, None, 5, 5), (None, None, None, 0)],
)
def test_a_padding_token(pad: int | None, model: int | None, eos: int | None, used: int) -> None:
    tokenizer, made = Tokenizer(), Model([1], model)
    tokenizer.pad_token_id, tokenizer.eos_token_id = pad, eos
    ask(made, tokenizer)
    assert made.options["pad_token_id"] == used


def test_what_gives_no_text() -> None:
    with pytest.raises(InvalidInput, match="the prompt has no tokens"):
        ask(Model([1]), prompt=" ")
    silent = Model([1])
    silent.text = False
    with pytest.raises(InvalidInput, match="a Model generates no text"):
        ask(silent)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_scores_that_are_no_numbers_are_refused(bad: float, temperature: float) -> None:
    """Of a tiny model, whose head gives them from some token on."""
    sizes = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(
        **sizes, num_attention_heads=2, num_key_value_heads=2, eos_token_id=None
    )
    model = transformers.LlamaForCausalLM(config).eval()
    assert len(ask(model, temperature=temperature)[0].tokens) == 7
    with torch.no_grad():
        model.lm_head.weight[3] = bad
    with pytest.raises(InvalidInput, match="scores after 3 tokens are no numbers: some are NaN or infinite"):
        ask(model, temperature=temperature)


def test_running_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has")

    Card(monkeypatch).free = 1 << 29
    monkeypatch.setattr(Model, "generate", fail)
    with pytest.raises(OutOfMemory, match=r"generating needs 2\.50 GiB more on cpu, 0\.50 GiB are free"):
        ask(Model([1]))


@pytest.mark.parametrize("error", [OSError, ValueError, KeyError, TypeError])
def test_a_folder_without_a_tokenizer(
    error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(folder: Path) -> None:
        assert folder == tmp_path
        raise error("there is none\nat all")

    transformers.T5Config().save_pretrained(tmp_path)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", fail)
    with pytest.raises(
        InvalidInput, match=r"has no tokenizer that transformers can load .*there is none"
    ) as caught:
        load_tokenizer(tmp_path)
    assert error is KeyError or "at all" not in str(caught.value)


@pytest.mark.parametrize("kind", ["Bert", "T5", "GPT2", "Qwen2"])
def test_a_tokenizer_made_of_nothing_is_refused(kind: str, tmp_path: Path) -> None:
    """As transformers 5 makes one for some kinds of models without files: all texts would be the same."""
    getattr(transformers, f"{kind}Config")().save_pretrained(tmp_path)
    with pytest.raises(InvalidInput, match="has no tokenizer that transformers can load") as caught:
        load_tokenizer(tmp_path)
    assert "tokenizer.json" in str(caught.value.hint)


def test_a_configuration_that_has_no_tokenizer_loaded_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "t5", "dtype": "unheard"}')
    with pytest.raises(InvalidInput, match=r"makes no model of .*config\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_a_folder_whose_name_is_not_utf8(tmp_path: Path) -> None:
    """Whatever tokenizer is there, transformers cannot name its file."""
    folder = tmp_path / os.fsdecode(b"model\xff")
    folder.mkdir()
    transformers.LlamaConfig().save_pretrained(folder)
    with pytest.raises(InvalidInput, match="whose path is not UTF-8") as caught:
        load_tokenizer(folder)
    assert caught.value.hint == "rename what is not UTF-8 in it"


@pytest.mark.parametrize("text", ["[]", "5", '{"model": 5}'])
def test_a_tokenizer_that_is_none(text: str, tmp_path: Path) -> None:
    transformers.LlamaConfig().save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(InvalidInput, match="has no tokenizer that transformers can load"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_of_bytes_is_taken(tmp_path: Path) -> None:
    """It has no file of words."""
    transformers.ByT5Tokenizer().save_pretrained(tmp_path)
    transformers.T5Config().save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path)("a")["input_ids"] == [100, 1]
