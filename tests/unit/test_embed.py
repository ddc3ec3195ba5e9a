"""Embeddings: what is pooled, in which batches, and what is refused. Model and tokenizer are made up."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")

from support.card import Card  # noqa: E402

from tpde.errors import InvalidInput, OutOfMemory  # noqa: E402
from tpde.integrations.transformers.embed import Recipe, embed, read_recipe  # noqa: E402

CPU = torch.device("cpu")
HIDDEN = torch.tensor([[[-3.0, -4.0], [-1.0, -8.0], [90.0, 90.0]], [[5.0, 1.0], [2.0, 7.0], [-8.0, 4.0]]])
MASK = torch.tensor([[1, 1, 0], [1, 1, 1]])


class Took(dict[str, Any]):
    """What a tokenizer gives."""

    def to(self, device: Any) -> Took:
        assert device == CPU
        return self


class Tokenizer:
    """Gives each text a token for each letter, and notes how it is called."""

    model_max_length, pad_token = 1000, "<pad>"

    def __init__(self) -> None:
        self.calls: list[tuple[list[str], dict[str, Any]]] = []

    def __call__(self, texts: list[str], **options: Any) -> Took:
        self.calls.append((texts, options))
        longest = max(map(len, texts))
        mask = torch.tensor([[int(i < len(text)) for i in range(longest)] for text in texts])
        return Took(input_ids=mask * 7, attention_mask=mask)


class Cutting(Tokenizer):
    """Cuts texts off."""

    def __call__(self, texts: list[str], **options: Any) -> Took:
        return super().__call__([it[: options["max_length"]] for it in texts], **options)


class Encoder:
    """Gives hidden states that tell which token of which text they are of."""

    device = CPU

    def __init__(self, hidden: Any = None, **config: Any) -> None:
        self.config, self.hidden = SimpleNamespace(**config), hidden

    def named_modules(self) -> list[tuple[str, Any]]:
        return []

    def __call__(self, input_ids: Any, attention_mask: Any) -> Any:
        assert torch.is_inference_mode_enabled()
        hidden = attention_mask.float().unsqueeze(-1) * 2 if self.hidden is None else self.hidden
        return SimpleNamespace(last_hidden_state=hidden)


def pooled(how: str, *, normalize: bool = False, dtype: Any = torch.float32) -> Any:
    class Two(Tokenizer):
        def __call__(self, texts: list[str], **options: Any) -> Took:
            return Took(input_ids=MASK, attention_mask=MASK)

    found, tokens = embed(Encoder(HIDDEN.to(dtype)), Two(), ["a", "b"], Recipe(how, normalize, None))
    assert tokens == 5
    return found


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("mean", [[-2.0, -6.0], [-1 / 3, 4.0]]),
        ("cls", [[-3.0, -4.0], [5.0, 1.0]]),
        ("max", [[-1.0, -4.0], [5.0, 7.0]]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_padding_is_not_pooled(how: str, expected: Any, dtype: Any) -> None:
    wanted = torch.tensor(expected, dtype=dtype)
    close = {"rtol": torch.finfo(dtype).eps * 4, "atol": 0}
    assert torch.allclose(pooled(how, dtype=dtype), wanted, **close)
    wanted = wanted / wanted.norm(dim=1, keepdim=True)
    assert torch.allclose(pooled(how, normalize=True, dtype=dtype), wanted, **close)


@pytest.mark.parametrize("texts", [[""], ["", ""], ["a"] * 32 + [""]])
def test_texts_without_tokens_are_refused(texts: list[str]) -> None:
    with pytest.raises(InvalidInput, match="have no tokens"):
        embed(Encoder(), Tokenizer(), texts, Recipe("mean", False, None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_text_without_tokens_is_nothing(dtype: Any) -> None:
    class Empty(Tokenizer):
        def __call__(self, texts: list[str], **options: Any) -> Took:
            mask = torch.zeros(1, 3, dtype=torch.long)
            return Took(input_ids=mask, attention_mask=mask)

    found, tokens = embed(Encoder(HIDDEN[:1].to(dtype)), Empty(), [""], Recipe("mean", False, None))
    assert (found.tolist(), tokens) == ([[0.0, 0.0]], 0)


@pytest.mark.parametrize("count", [1, 32, 33, 65])
def test_texts_come_in_batches(count: int) -> None:
    tokenizer, texts = Tokenizer(), ["x" * (1 + i % 5) for i in range(count)]
    found, tokens = embed(Encoder(), tokenizer, texts, Recipe("mean", False, 9))
    assert [len(given) for given, _ in tokenizer.calls] == [32] * (count // 32) + [count % 32] * (
        count % 32 > 0
    )
    assert [it for given, _ in tokenizer.calls for it in given] == texts
    assert found.shape == (count, 1)
    assert tokens == sum(map(len, texts))
    options = {"padding": True, "truncation": True, "max_length": 9, "return_tensors": "pt"}
    assert all(given == options for _, given in tokenizer.calls)


@pytest.mark.parametrize(
    ("recipe", "positions", "tokenizer", "limit"),
    [(8, 9, 10, 8), (10, 8, 9, 8), (9, 10, 8, 8), (None, 9, 10, 9), (9, None, 10, 9), (None, None, 10, 10)],
)
def test_the_least_of_all_limits_counts(
    recipe: int | None, positions: int | None, tokenizer: int, limit: int
) -> None:
    made = Tokenizer()
    made.model_max_length = tokenizer
    embed(Encoder(max_position_embeddings=positions), made, ["x"], Recipe("mean", False, recipe))
    assert made.calls[0][1]["max_length"] == limit


def test_positions_that_no_token_has_do_not_count() -> None:
    """RoBERTa numbers tokens from the position after the padding's."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    for kind, limit in (("Roberta", 64), ("MPNet", 64), ("Bert", 66)):
        config = getattr(transformers, f"{kind}Config")(
            vocab_size=9, max_position_embeddings=66, pad_token_id=1, **sizes
        )
        found, tokens = embed(
            getattr(transformers, f"{kind}Model")(config), Cutting(), ["x" * 100], Recipe("mean", False, None)
        )
        assert (tokens, found.shape) == (limit, (1, 8))


def test_a_model_without_hidden_states() -> None:
    model = Encoder()
    model.__class__ = type("Decoder", (Encoder,), {"__call__": lambda *_, **__: SimpleNamespace(logits=1)})
    with pytest.raises(InvalidInput, match="a Decoder gives no hidden states"):
        embed(model, Tokenizer(), ["x"], Recipe("mean", False, None))


def test_running_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory.")

    Card(monkeypatch).free = 1 << 29
    model = Encoder()
    model.__class__ = type("Large", (Encoder,), {"__call__": fail})
    with pytest.raises(OutOfMemory, match=r"embedding needs more memory more on cpu, 0\.50 GiB are free"):
        embed(model, Tokenizer(), ["x"], Recipe("mean", False, None))


POOLING = "pooling_mode_mean_tokens", "pooling_mode_cls_token", "pooling_mode_max_tokens"


@pytest.mark.parametrize(
    ("pooling", "found"),
    [
        ({POOLING[0]: True, POOLING[1]: False, POOLING[2]: False}, "mean"),
        ({POOLING[1]: True}, "cls"),
        ({POOLING[0]: False, POOLING[2]: True}, "max"),
        ({"pooling_mode": "max"}, "max"),
        ({}, "mean"),
        ({POOLING[1]: 1, POOLING[2]: "yes"}, "mean"),  # not true, and said of nothing
        (None, "mean"),
    ],
)
def test_what_a_folder_says_of_pooling(pooling: dict[str, Any] | None, found: str, tmp_path: Path) -> None:
    kinds = ["Transformer", "Pooling", "Normalize"]
    (tmp_path / "modules.json").write_text(json.dumps([{"type": f"a.{it}", "path": it} for it in kinds]))
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 16}')
    (tmp_path / "Pooling").mkdir()
    if pooling is not None:
        (tmp_path / "Pooling" / "config.json").write_text(json.dumps(pooling))
    assert read_recipe(tmp_path) == (found, True, 16)


@pytest.mark.parametrize(
    ("pooling", "said"),
    [
        ({POOLING[0]: True, POOLING[1]: True}, "the pooling mean, cls;"),
        ({"pooling_mode": "lasttoken"}, "the pooling lasttoken;"),
        ({"pooling_mode_weightedmean_tokens": True}, "the pooling pooling_mode_weightedmean_tokens;"),
    ],
)
def test_pooling_that_is_not_there(pooling: dict[str, Any], said: str, tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text('[{"type": "a.Pooling"}]')
    (tmp_path / "config.json").write_text(json.dumps(pooling))
    with pytest.raises(InvalidInput, match=said):
        read_recipe(tmp_path)
