"""`tpde run` on tiny models: the plain model's text and vectors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import Pair, checkpoint
from support.commands import invoke, process
from support.models import torch

transformers = pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Give a tiny BERT with what sentence-transformers would keep beside it."""
    pair = checkpoint(tmp_path_factory.mktemp("bert"), "bert", torch.float32)
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
    ]
    pooling = {
        "word_embedding_dimension": 64,
        "pooling_mode_cls_token": False,
        "pooling_mode_mean_tokens": True,
    }
    for folder in (pair.plain, pair.packed):
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_Pooling").mkdir()
        (folder / "2_Normalize").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
        (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 16, "do_lower_case": false}')
    return pair


def _generated(pair: Pair, prompt: str, **options: Any) -> list[int]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(pair.plain)
    model = pair.kind.from_pretrained(pair.plain)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    torch.manual_seed(5)
    made = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)
    return made[0, ids.shape[1] :].tolist()  # type: ignore[no-any-return]


def test_text(llama: Pair) -> None:
    expected = _generated(llama, "Größe: ", max_new_tokens=12, do_sample=False)
    args = (llama.packed, "--prompt", "Größe: ", "--max-new-tokens", "12", "--device", "cpu")
    done = process("run", *args, "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    result = json.loads(done.stdout)
    assert result["tokens"] == expected
    assert (result["new_tokens"], result["prompt_tokens"], result["device"]) == (12, 9, "cpu")
    assert 0 < result["packed_bytes"] < result["unpacked_bytes"]
    assert result["plain_bytes"] == 7 * 64 * 2  # the norms
    assert result["tokens_per_second"] > 0
    assert result["peak_bytes"] > 50 << 20
    streamed = invoke("run", *args, "--stats")
    assert streamed.stdout == result["text"] + "\n"
    assert "9 read, 12 written" in streamed.stderr
    assert "tokens/s" in streamed.stderr
    assert "packed" in streamed.stderr


def test_draws_follow_the_seed(llama: Pair) -> None:
    expected = _generated(llama, "hi", max_new_tokens=8, do_sample=True, temperature=1.5)
    args = ("run", llama.packed, "--prompt", "hi", "--max-new-tokens", "8", "--device", "cpu", "--json")
    made = json.loads(invoke(*args, "--temperature", "1.5", "--seed", "5").stdout)
    assert made["tokens"] == expected
    assert json.loads(invoke(*args, "--temperature", "1.5", "--seed", "6").stdout)["tokens"] != expected


TEXTS = ["a sentence", "another one that is longer than sixteen bytes", "x"]


def _vectors(pair: Pair) -> Any:
    """Mean over the tokens, length 1, in plain PyTorch."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(pair.plain)
    model = transformers.AutoModel.from_pretrained(pair.plain)
    took = tokenizer(TEXTS, padding=True, truncation=True, max_length=16, return_tensors="pt")
    with torch.inference_mode():
        hidden = model(**took).last_hidden_state
    mask = took["attention_mask"].unsqueeze(-1).expand(hidden.size()).to(hidden.dtype)
    mean = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1e-9)
    return torch.nn.functional.normalize(mean, p=2, dim=1)


def test_vectors(bert: Pair) -> None:
    args = ("run", bert.packed, "--embed", *TEXTS, "--device", "cpu")
    done = process(*args)
    assert done.returncode == 0, done.stderr
    found = torch.tensor([json.loads(line) for line in done.stdout.splitlines()], dtype=torch.float32)
    expected = _vectors(bert)
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
    result = json.loads(invoke(*args, "--json").stdout)
    assert (result["pooling"], result["normalized"], result["dimensions"]) == ("mean", True, 64)
    assert result["embeddings"] == [json.loads(line) for line in done.stdout.splitlines()]


def test_vectors_are_those_of_sentence_transformers(bert: Pair) -> None:
    library = pytest.importorskip("sentence_transformers", reason="needs sentence-transformers")
    expected = library.SentenceTransformer(str(bert.plain), device="cpu").encode(
        TEXTS, convert_to_tensor=True
    )
    assert torch.allclose(_vectors(bert), expected, atol=1e-6)  # it sorts texts by length, so padding differs


@pytest.mark.parametrize(
    ("modules", "pooling", "match"),
    [
        (["Transformer", "Pooling", "Dense"], {}, "asks for a `Dense`"),
        (["Transformer", "Pooling"], {"pooling_mode_weightedmean_tokens": True}, "weightedmean"),
        (
            ["Transformer", "Pooling"],
            {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
            "mean, cls",
        ),
    ],
)
def test_recipes_that_are_not_there(modules: list[str], pooling: Any, match: str, tmp_path: Path) -> None:
    from tpde.errors import InvalidInput
    from tpde.integrations.transformers.embed import read_recipe

    (tmp_path / "modules.json").write_text(json.dumps([{"type": f"a.{m}", "path": m} for m in modules]))
    (tmp_path / "Pooling").mkdir()
    (tmp_path / "Pooling" / "config.json").write_text(json.dumps(pooling))
    with pytest.raises(InvalidInput, match=match):
        read_recipe(tmp_path)


def test_recipes(tmp_path: Path) -> None:
    from tpde.integrations.transformers.embed import read_recipe

    assert read_recipe(tmp_path) == ("mean", False, None)
    (tmp_path / "modules.json").write_text('[{"type": "a.Transformer"}, {"type": "a.Pooling", "path": "p"}]')
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "config.json").write_text('{"pooling_mode": "cls"}')
    assert read_recipe(tmp_path) == ("cls", False, None)


def test_commands_that_cannot_be(llama: Pair, bert: Pair) -> None:
    for args, code, error, hint in (
        ((llama.plain, "--prompt", "x"), 2, "is not packed", "tpde pack"),
        ((llama.packed,), 2, "nothing to do", "--prompt"),
        ((llama.packed, "--embed"), 2, "nothing to do", "--embed"),
        ((llama.packed, "--prompt", "x", "--embed", "y"), 2, "too much", "--prompt"),
        ((llama.packed, "--prompt", ""), 2, "no tokens", "give a text"),
        ((bert.packed, "--prompt", "x"), 2, "generates no text", "--embed"),
        ((llama.packed, "--prompt", "x", "--device", "tpu9"), 2, "no device", "cuda"),
        ((llama.packed.parent / "none", "--prompt", "x"), 2, "does not exist", "path"),
    ):
        done = invoke("run", *args)
        assert (done.exit_code, done.stdout) == (code, ""), (args, done.output)
        assert error in done.stderr.splitlines()[0], done.stderr
        assert "hint:" in done.stderr, done.stderr
        assert hint in done.stderr, done.stderr


def test_damage_has_its_exit_code(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, "llama").packed / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-9000])
    done = process("run", path.parent, "--prompt", "x", "--device", "cpu")
    assert done.returncode == 3, done.stderr
    assert done.stderr.startswith("error: ")
    assert "hint: " in done.stderr
    assert "Traceback" not in done.stderr
