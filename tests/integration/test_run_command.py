"""`tpde run` on tiny models: the plain model's text and vectors."""

from __future__ import annotations

import io
import json
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import Pair, byte_tokenizer, checkpoint, write
from support.commands import invoke, process
from support.models import make, torch

from tpde.cli import app, common
from tpde.cli.run_stats import say_sizes

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
    pooling = {"word_embedding_dimension": 64, "pooling_mode_mean_tokens": True}
    pooling["pooling_mode_cls_token"] = False
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


@pytest.mark.parametrize("eos", ["<eos>", None])
def test_vectors_of_a_model_whose_tokenizer_does_not_pad(eos: str | None, tmp_path: Path) -> None:
    pair = checkpoint(tmp_path, "llama", torch.float32)
    tokenizer = byte_tokenizer()
    tokenizer.pad_token, tokenizer.eos_token = None, eos
    tokenizer.save_pretrained(pair.packed)
    found = [
        torch.tensor(json.loads(invoke("run", pair.packed, "--embed", *it, "--json").stdout)["embeddings"])
        for it in (TEXTS, TEXTS[:1], TEXTS[1:2], TEXTS[2:])
    ]
    assert torch.allclose(found[0], torch.cat(found[1:]), atol=1e-6)
    model = transformers.AutoModel.from_pretrained(pair.plain)
    with torch.inference_mode():
        alone = model(**byte_tokenizer()(TEXTS[0], return_tensors="pt")).last_hidden_state.mean(1)
    assert torch.equal(found[1], alone)


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


def test_commands_that_cannot_be(llama: Pair, bert: Pair, tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text("{}")
    for args, code, error, hint in (
        ((llama.plain, "--prompt", "x"), 2, "is not packed", "tpde pack"),
        ((llama.packed,), 2, "not said what the model is to do", "--prompt"),
        ((llama.packed, "--embed"), 2, "`--embed` has no text", "--embed"),
        ((llama.packed, "--prompt", "x", "--embed", "y"), 2, "are two tasks", "one of them"),
        ((llama.packed, "--prompt", ""), 2, "no tokens", "give a text"),
        ((llama.packed, "--embed", ""), 2, "no tokens", "not empty"),
        ((bert.packed, "--prompt", "x"), 2, "generates no text", "--embed"),
        ((llama.packed, "--prompt", "x", "--device", "tpu9"), 2, "no device", "cuda"),
        ((llama.packed.parent / "none", "--prompt", "x"), 2, "does not exist", "path"),
        ((tmp_path, "--prompt", "x"), 2, "no `config.json`", "pipeline of diffusers"),
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


# ---- what it is told, and what it says


def test_what_a_text_is_made_with(llama: Pair) -> None:
    """By default, greedily, and up to 128 tokens."""
    made = json.loads(invoke("run", llama.packed, "--prompt", "x", "--json", "--device", "cpu").stdout)
    asked = {"model": str(llama.packed), "device": "cpu", "kernels": "exact", "pack": False}
    assert made.items() >= asked.items()
    assert made["tokens"] == _generated(llama, "x", max_new_tokens=128, do_sample=False)
    assert made["new_tokens"] == len(made["tokens"]) > 12
    assert "streaming" not in made
    for more in (["--kernels", "fused"], ["--pack"]):
        done = invoke("run", llama.packed, "--prompt", "x", "--json", "--device", "cpu", *more)
        other = json.loads(done.stdout)
        assert (other["kernels"] == "fused", other["pack"]) == (more[0] == "--kernels", more == ["--pack"])
        assert other["tokens"] == made["tokens"]
        assert ("multiplies by packed weights on a GPU only" in done.stderr) == (more[0] == "--kernels")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "continue a text with `--prompt TEXT`, or make vectors of texts with `--embed TEXT...`"),
        (["--prompt", "x", "--embed"], "`--prompt` and `--embed` are two tasks"),
        (["--prompt", "x", "--embed", "text"], "`--prompt` and `--embed` are two tasks"),
        (["--prompt", "x", "text"], "`--prompt` continues one text, and `text` is another"),
        (["--embed"], "`--embed` has no text"),
        (["--prompt", "a\udcff"], r"the text `a\udcff` is not UTF-8"),  # as Python gives the byte 0xff
        (["--embed", "text", "\udcff\udcfe"], r"the text `\udcff\udcfe` is not UTF-8"),
        (["text"], "it is not said what to do with the text `text`"),
        (["--prompt", "x", "--trace", "t"], "`--trace` is of weights that are streamed"),
        (["--embed", "x", "--trace", "t"], "`--trace` is of weights that are streamed"),
        (["--prompt", "x", "--trace", "no/t", "--vram", "1GiB"], "cannot be written"),
        (["--prompt", "x", "--max-new-tokens", "0"], "--max-new-tokens"),
        (["--prompt", "x", "--temperature", "-1"], "--temperature"),
        (["--prompt", "x", "--temperature", "1e-40"], "1e-40 makes numbers that overflow"),
        (["--prompt", "x", "--temperature", "9e-5"], "or 0.0001 and more"),
        (["--prompt", "x", "--temperature", "nan"], "--temperature"),
        (["--prompt", "x", "--seed", "-1"], "--seed"),
        (["--prompt", "x", "--seed", str(1 << 64)], "--seed"),
        (["--prompt", "x", "--vram", "1GiB", "--max-tokens", "0"], "--max-tokens"),
    ],
)
def test_runs_that_cannot_be_are_refused_before_anything(options: list[str], says: str) -> None:
    """Before the model is looked for: there is none."""
    done = invoke("run", "no-such-model", *options)
    assert done.exit_code == common.USAGE
    assert says in done.stderr
    assert "no-such-model" not in done.stderr


class Terminal(io.StringIO):
    """Notes what is written, and when it is flushed."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str | None] = []

    def write(self, text: str) -> int:
        self.log.append(text)
        return super().write(text)

    def flush(self) -> None:
        self.log.append(None)


@pytest.mark.parametrize(("as_json", "stats"), [(False, False), (False, True), (True, False), (True, True)])
def test_a_text_is_written_as_it_comes_and_told_at_the_end(
    as_json: bool,
    stats: bool,
    llama: Pair,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    args = ["run", str(llama.packed), "--prompt", "abc", "--max-new-tokens", "7", "--device", "cpu"]
    app([*args, *["--stats"] * stats, *["--json"] * as_json], standalone_mode=False)
    expected = _generated(llama, "abc", max_new_tokens=7, do_sample=False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(llama.plain)
    if as_json:
        found = json.loads(out.getvalue())
        assert found["text"] == tokenizer.decode(expected, skip_special_tokens=True)
        assert (found["tokens"], found["prompt_tokens"], found["new_tokens"]) == (expected, 3, 7)
        assert 0 < found["first_token_seconds"] < found["seconds"]
        assert found["load_seconds"] > 0
    else:
        assert out.getvalue() == tokenizer.decode(expected, skip_special_tokens=True) + "\n"
        assert len([it for it in out.log if it is not None]) > 7, "as tokens come"
        # Whoever reads it need not wait for the next.
        assert all(after is None for it, after in pairwise(out.log) if it is not None)
    told = [
        "tokens: 3 read, 7 written",
        r"speed: first token after \d+ ms, then \d+\.\d tokens/s",
        r"weights: \d+\.\d KiB packed, \d+\.\d KiB unpacked; 896 B stored plain; loaded in \d+\.\d\d s",
        r"peak: .* of memory, Python included",
    ]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == stats * len(told), "without a budget, nothing is said of copies"
    assert all(re.fullmatch(pattern, line) for pattern, line in zip(told, lines, strict=False)), lines


@pytest.mark.parametrize("task", [["--prompt", "abc"], ["--embed", "abc"]])
def test_stdout_that_is_closed(task: list[str], llama: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """As other commands: what nobody reads goes nowhere, JSON is missed."""
    monkeypatch.setattr(sys, "stdout", None)
    args = ["run", str(llama.packed), *task, "--device", "cpu"]
    assert app(args, standalone_mode=False) in (None, 0)
    assert app([*args, "--json"], standalone_mode=False) == common.IO_ERROR


def test_vectors_are_told_with_all_their_digits(tmp_path: Path) -> None:
    """Of what is no number, too."""
    model = make("bert", torch.float32)
    tokenizer = byte_tokenizer()
    (token,) = tokenizer("x")["input_ids"]
    with torch.no_grad():
        model.embeddings.word_embeddings.weight[token] = float("nan")
    pair = write(tmp_path, model)
    ids = torch.tensor([tokenizer(text)["input_ids"] for text in ("y", "x")])
    with torch.inference_mode():
        expected = model(ids).last_hidden_state[0, 0]
    args = ("run", pair.packed, "--embed", "y", "x", "--device", "cpu")
    done = invoke(*args, "--stats")
    rows = torch.tensor([json.loads(line) for line in done.stdout.splitlines()])
    assert torch.equal(rows[0].view(torch.int32), expected.view(torch.int32))
    assert rows[1].isnan().all()
    lines = done.stderr.splitlines()
    assert lines[0] == "vectors: 2 of 64 dimensions, pooling mean"
    assert lines[1].startswith("speed: 2 tokens in ")
    assert lines[3].startswith("peak: ")
    assert len(lines) == 4
    done = invoke(*args, "--json")
    found = json.loads(done.stdout)
    assert torch.equal(torch.tensor(found["embeddings"][0]), expected)
    assert found["embeddings"][1] == [None] * 64, "JSON has no such numbers"
    assert (found["pooling"], found["normalized"], found["dimensions"]) == ("mean", False, 64)
    assert found["tokens"] == 2
    assert found["tokens_per_second"] == pytest.approx(2 / found["seconds"])
    assert found["peak_bytes"] > 50 << 20
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("device", "what"),
    [("cpu", "of memory, Python included"), ("cuda", "of the GPU's memory beyond the context")],
)
def test_what_sizes_are_of(device: str, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"packed_bytes": 1 << 20, "unpacked_bytes": 3 << 20, "plain_bytes": 512, "load_seconds": 1.5}
    say_sizes(sizes | {"peak_bytes": 5 << 20}, torch.device(device))
    assert capsys.readouterr().err.splitlines() == [
        "weights: 1.0 MiB packed, 3.0 MiB unpacked; 512 B stored plain; loaded in 1.50 s",
        f"peak: 5.0 MiB {what}",
    ]
