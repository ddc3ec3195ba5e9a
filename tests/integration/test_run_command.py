"""`tpde run` on tiny models: the plain model's text and vectors."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.checkpoints import Pair, checkpoint
from support.commands import invoke, process
from support.models import torch

from tpde.cli import common
from tpde.cli import run as run_command

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


def test_commands_that_cannot_be(llama: Pair, bert: Pair, tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text("{}")
    for args, code, error, hint in (
        ((llama.plain, "--prompt", "x"), 2, "is not packed", "tpde pack"),
        ((llama.packed,), 2, "not said what the model is to do", "--prompt"),
        ((llama.packed, "--embed"), 2, "`--embed` has no text", "--embed"),
        ((llama.packed, "--prompt", "x", "--embed", "y"), 2, "are two tasks", "one of them"),
        ((llama.packed, "--prompt", ""), 2, "no tokens", "give a text"),
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


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Give what a model would have been run with."""
    from tpde.integrations.transformers import folder, run_memory
    from tpde.loading import devices

    found: dict[str, Any] = {}
    monkeypatch.setattr(
        devices, "checked_device", lambda name, *_: found.setdefault("device", torch.device(name or "cpu"))
    )
    monkeypatch.setattr(folder, "model_directory", lambda path, **_: (Path(path), {}))
    monkeypatch.setattr(run_memory, "Peak", lambda device: PEAK)
    monkeypatch.setattr(run_command, "_generate", lambda *args: found.update(generate=args))
    monkeypatch.setattr(run_command, "_embed", lambda *args: found.update(embed=args))
    return found


def test_what_a_text_is_made_with(started: dict[str, Any], tmp_path: Path) -> None:
    assert invoke("run", "model", "--prompt", "x").exit_code == 0
    folder, device, budget, _, result, *rest = started.pop("generate")
    assert (folder, str(device), budget) == (Path("model"), "cpu", None)
    assert result == {"model": "model", "device": "cpu", "kernels": "exact", "pack": False}
    assert rest == ["x", 128, 0.0, 0, None, False, False]
    started.clear()
    options = [
        "--max-new-tokens",
        7,
        "--temperature",
        0.5,
        "--seed",
        9,
        "--stats",
        "--json",
        "--vram",
        "1GiB",
    ]
    options += ["--ram", "2GiB", "--max-tokens", 77, "--trace", tmp_path / "trace"]
    assert invoke("run", "model", "--prompt", "x", *options).exit_code == 0
    _, device, budget, _, _, *rest = started.pop("generate")
    assert str(device) == "cuda"  # a budget is of its memory
    assert (budget.vram, budget.ram, budget.max_tokens, budget.max_batch) == (1 << 30, 2 << 30, 77, 1)
    assert rest == ["x", 7, 0.5, 9, tmp_path / "trace", True, True]


def test_what_vectors_are_made_with(started: dict[str, Any]) -> None:
    from tpde.integrations.transformers.embed import BATCH

    assert invoke("run", "model", "--embed", "a", "b").exit_code == 0
    _, _, budget, _, _, *rest = started.pop("embed")
    assert (budget, rest) == (None, [["a", "b"], None, False, False])
    started.clear()
    options = ["--device", "cpu", "--vram", "1GiB", "--stats", "--json"]
    assert invoke("run", "model", "--embed", "a", *options).exit_code == 0
    _, device, budget, _, _, *rest = started.pop("embed")
    assert (str(device), budget.max_batch, rest) == ("cpu", BATCH, [["a"], None, True, True])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "continue a text with `--prompt TEXT`, or make vectors of texts with `--embed TEXT...`"),
        (["--prompt", "x", "--embed"], "`--prompt` and `--embed` are two tasks"),
        (["--prompt", "x", "--embed", "text"], "`--prompt` and `--embed` are two tasks"),
        (["--prompt", "x", "text"], "`--prompt` continues one text, and `text` is another"),
        (["--embed"], "`--embed` has no text"),
        (["text"], "it is not said what to do with the text `text`"),
        (["--prompt", "x", "--trace", "t"], "`--trace` is of weights that are streamed"),
        (["--prompt", "x", "--trace", "no/t", "--vram", "1GiB"], "cannot be written"),
        (["--prompt", "x", "--max-new-tokens", "0"], "--max-new-tokens"),
        (["--prompt", "x", "--temperature", "-1"], "--temperature"),
        (["--prompt", "x", "--seed", "-1"], "--seed"),
        (["--prompt", "x", "--seed", str(1 << 64)], "--seed"),
        (["--prompt", "x", "--vram", "1GiB", "--max-tokens", "0"], "--max-tokens"),
    ],
)
def test_runs_that_cannot_be_are_refused_before_anything(
    options: list[str], says: str, started: dict[str, Any]
) -> None:
    done = invoke("run", "model", *options)
    assert done.exit_code == common.USAGE
    assert says in done.stderr
    assert not started.keys() & {"generate", "embed"}


class Streamer:
    """What a streamed model has, as far as commands use it."""

    def __init__(self, events: list[Any], devices: tuple[str, ...] = ("cuda:0",)) -> None:
        self.events, self.streamers = events, devices

    def check(self) -> None:
        self.events.append("check")

    def trace(self, path: Path) -> None:
        self.events.append(path)

    def stats(self) -> dict[str, dict[str, int]]:
        return {"cuda:0": {"copied": 1}}

    def summary(self, device: str) -> Any:
        return SimpleNamespace(text=lambda: f"fast\nof {device}")


SIZES = {"packed_bytes": 1 << 20, "unpacked_bytes": 3 << 20, "plain_bytes": 512, "load_seconds": 1.5}
PEAK = SimpleNamespace(bytes=lambda: 5 << 20)


@pytest.mark.parametrize(("as_json", "stats"), [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("both", [False, True], ids=["decoder", "encoder and decoder"])
def test_a_text_is_written_as_it_comes_and_told_at_the_end(
    as_json: bool,
    stats: bool,
    both: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from tpde.integrations.transformers import folder, generate, tokens

    events: list[Any] = []
    flushes: list[None] = []
    monkeypatch.setattr(sys.stdout, "flush", lambda: flushes.append(None))
    model = SimpleNamespace(tpde_streamer=Streamer(events))

    def load(*args: Any) -> Any:
        bar: ExitStack = args[4]
        bar.callback(events.append, "bar closed")
        events.append(("record", args[3]))
        return model, dict(SIZES)

    def make(_: Any, __: Any, prompt: str, *, write: Any, **options: Any) -> Any:
        assert options == {"max_new_tokens": 7, "temperature": 0.5, "seed": 9}
        write("one ")
        assert bool(flushes) is not as_json  # whoever reads it need not wait for the next
        events.append("written")
        write("two")
        return generate.Generation("one two", [4, 5, 6], 3, 0.25, 12.5, 2.0)

    monkeypatch.setattr(run_command, "_load", load)
    monkeypatch.setattr(generate, "load_tokenizer", lambda _: lambda prompt: {"input_ids": [1] * len(prompt)})
    monkeypatch.setattr(generate, "generate", make)
    monkeypatch.setattr(folder, "read_config", lambda _: {"is_encoder_decoder": both})
    monkeypatch.setattr(tokens, "check_tokens", lambda *args: events.append(args))
    budget = SimpleNamespace(max_tokens=50)
    args = (
        Path("m"),
        torch.device("cpu"),
        budget,
        PEAK,
        {"model": "m", "kernels": "exact", "pack": False},
        "abc",
        7,
        0.5,
        9,
        Path("t"),
    )
    run_command._generate(*args, stats, as_json)  # type: ignore[arg-type]
    # The last token is not read, unless one that starts the decoder was.
    assert events == [(1, 3 + 6 + both, 50), ("record", True), "bar closed", "written", "check", Path("t")]
    out, err = capsys.readouterr()
    if as_json:
        found = json.loads(out)
        assert (found["text"], found["tokens"], found["prompt_tokens"]) == ("one two", [4, 5, 6], 3)
        assert (found["new_tokens"], found["tokens_per_second"], found["seconds"]) == (3, 12.5, 2.0)
        assert (found["first_token_seconds"], found["peak_bytes"], found["model"]) == (0.25, 5 << 20, "m")
        assert found["streaming"] == {"cuda:0": {"copied": 1}}
        assert found.items() >= SIZES.items()
    else:
        assert out == "one two\n"
    told = [
        "tokens: 3 read, 3 written",
        "speed: first token after 250 ms, then 12.5 tokens/s",
        "weights: 1.0 MiB packed, 3.0 MiB unpacked; 512 B stored plain; loaded in 1.50 s",
        "peak: 5.0 MiB of memory, Python included",
        "cuda:0: fast",
        "cuda:0: of cuda:0",
    ]
    assert err.splitlines() == (told if stats else [])


@pytest.mark.parametrize(("as_json", "stats"), [(False, True), (True, False)])
def test_vectors_are_told_with_all_their_digits(
    as_json: bool, stats: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tpde.integrations.transformers import embed, generate

    vectors = torch.tensor([[0.1, 1 / 3], [1e-30, float("nan")]])[: 1 if as_json else 2]
    record: list[bool] = []

    def load(*args: Any) -> Any:
        record.append(args[3])
        return SimpleNamespace(tpde_streamer=Streamer([], ())), dict(SIZES)

    monkeypatch.setattr(run_command, "_load", load)
    monkeypatch.setattr(generate, "load_tokenizer", lambda _: None)
    monkeypatch.setattr(embed, "read_recipe", lambda _: embed.Recipe("mean", True, None))
    monkeypatch.setattr(embed, "embed", lambda *_: (vectors, 11))
    run_command._embed(
        Path("m"),
        torch.device("cuda"),
        None,
        PEAK,
        {"model": "m", "kernels": "exact", "pack": False},
        ["a"],
        None,
        stats,
        as_json,  # type: ignore[arg-type]
    )
    assert record == [stats]
    out, err = capsys.readouterr()
    if as_json:
        found = json.loads(out)
        assert torch.equal(torch.tensor(found["embeddings"]), vectors)
        assert (found["pooling"], found["normalized"], found["dimensions"]) == ("mean", True, 2)
        assert (found["tokens"], found["peak_bytes"]) == (11, 5 << 20)
        assert found["tokens_per_second"] == pytest.approx(11 / found["seconds"])
        assert err == ""
        return
    rows = torch.tensor([json.loads(line) for line in out.splitlines()])
    assert torch.equal(rows.view(torch.int32)[0], vectors.view(torch.int32)[0])
    assert rows[1].isnan().tolist() == [False, True]
    lines = err.splitlines()
    assert lines[0] == "vectors: 2 of 2 dimensions, pooling mean, length 1"
    assert lines[1].startswith("speed: 11 tokens in ")
    assert lines[3] == "peak: 5.0 MiB of the GPU's memory beyond the context"
    assert lines[4:] == ["copies: none: all weights fit the device"]


def test_a_model_that_is_not_streamed_has_nothing_to_finish(capsys: pytest.CaptureFixture[str]) -> None:
    model, events = SimpleNamespace(), []  # type: ignore[var-annotated]
    assert run_command._finish_streaming(model, Path("t")) == {}
    run_command.say_copies(model)
    assert capsys.readouterr() == ("", "")
    streamed = SimpleNamespace(tpde_streamer=Streamer(events))
    assert run_command._finish_streaming(streamed, None) == {"streaming": {"cuda:0": {"copied": 1}}}
    assert events == ["check"]


@pytest.mark.parametrize("record", [False, True])
@pytest.mark.parametrize("budget", [None, SimpleNamespace()])
def test_a_streamed_model_is_recorded_where_that_is_wanted(
    record: bool, budget: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tpde.integrations.transformers import load_model, run_memory

    found: dict[str, Any] = {"record": 0}

    def recorded() -> None:
        found["record"] += 1

    def load(*args: Any, **options: Any) -> Any:
        found.update(args=args, options=options)
        return SimpleNamespace(tpde_streamer=SimpleNamespace(record=recorded))

    monkeypatch.setattr(load_model, "load_model", load)
    monkeypatch.setattr(run_memory, "weight_bytes", lambda _: {"packed_bytes": 1})
    with ExitStack() as bar:
        _, sizes = run_command._load(Path("m"), torch.device("cpu"), budget, record, bar, "kind")
    assert found["args"] == (Path("m"), torch.device("cpu"), budget)
    assert found["options"]["model_class"] == "kind"
    assert callable(found["options"]["progress"]) is (budget is not None)
    assert found["record"] == (budget is not None and record)
    assert sizes["packed_bytes"] == 1
    assert sizes["load_seconds"] > 0
