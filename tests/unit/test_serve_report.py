"""What `python -m benchmarks serve` makes of a model's shape, and of its rows."""

from __future__ import annotations

import argparse
import math
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.harness.report import Page
from benchmarks.harness.texts import Text, perplexity, units, windows_of
from benchmarks.serve import cards_of, check, model_of, options, reading, room_of, served, turns
from benchmarks.serve.measured import take
from benchmarks.serve.models import make, shapes_of, sizes_of
from benchmarks.serve.tables import compare, judge, perplexities, report


def row(speed: float) -> dict[str, Any]:
    figures = {"output_throughput": speed, "median_ttft_ms": 9, "median_itl_ms": 3, "median_tpot_ms": 4}
    return {"start": "12.3", "kv": "1,024", "weights": "3.0 MiB", "1": figures, "8": figures}


def test_tables() -> None:
    page = Page("Serving", {})
    loads = {"read": "5.583827", "again": "-"}  # vLLM says no more of the second
    report(
        page, {"bf16": row(100), "tpde": row(150) | loads, "glyd": {"problem": "no glyd"}}, [1, 8], (32, 16)
    )
    text = page.markdown()
    assert "| 5.58 | " in " ".join(text.split())
    assert "150.0 (1.50)" in text
    assert "no glyd" in text
    assert text.count("| Glyd ") == 1  # with its reason alone


def test_tables_of_latency() -> None:
    """They have what was measured, and no other figures."""
    page = Page("Serving", {})
    rows = {way: {"start": "-", "1": {"latency_ms": ms}} for way, ms in {"bf16": 20.0, "tpde": 16.0}.items()}
    report(page, rows, [1], (32, 16))
    text = page.markdown()
    assert "16.0 (0.80)" in text
    assert "bench latency" in text
    assert "first token" not in text


@pytest.mark.parametrize(("shape", "layers"), [("tiny", None), ("tiny", 3), ("tiny-experts", 1)])
def test_made_models_are_what_transformers_expects(shape: str, layers: int | None, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    total = make(tmp_path, shape, 0, layers)
    model, found = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
    assert not found["mismatched_keys"]
    assert sum(it.nbytes for it in model.parameters()) == total
    assert model.config.num_hidden_layers == (layers or 2)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer(tokenizer.decode([5, 6, 700]))["input_ids"] == [5, 6, 700]


def test_made_files_are_the_stock_library_s(tmp_path: Path) -> None:
    """Byte by byte what it writes of the same tensors."""
    from safetensors.torch import load_file, save_file

    make(tmp_path, "tiny-experts", 0)
    [made] = tmp_path.glob("*.safetensors")
    save_file(load_file(made), tmp_path / "again", {"format": "pt"})
    assert made.read_bytes() == (tmp_path / "again").read_bytes()


def test_sizes() -> None:
    """What the guide says of them."""
    for shape, count in {"llama-8b": 8.03e9, "qwen3-30b-a3b": 30.5e9}.items():
        found = sum(math.prod(it) for it in shapes_of(sizes_of(shape, None)).values())
        assert found == pytest.approx(count, rel=0.005)


def test_bars() -> None:
    page = Page("Serving", {})
    plain, ours, packed = row(100) | {"read": "4.0"}, row(120) | {"read": "5.0"}, row(120) | {"read": "3.0"}
    judge(page, {"bf16": plain, "tpde": ours}, [1, 8])
    assert [met for _, met in page.bars] == [False, True, True, False]  # speeds, first token, loading
    judge(page, {"bf16": plain, "tpde": {"problem": "no"}, "tpde-packed": packed}, [1])
    assert [met for _, met in page.bars[4:]] == [True], "what was not measured meets no bar"


def test_a_second_load_is_a_bar_of_its_own_where_it_was_measured() -> None:
    page = Page("Serving", {})
    plain, ours = (row(100) | {"read": "4.0", "again": it} for it in ("4.0", "4.4"))
    judge(page, {"bf16": plain, "tpde": ours | {"read": "5.0"}, "tpde-packed": row(1) | {"read": "3.0"}}, [1])
    assert [met for what, met in page.bars if "loading" in what] == [False, True, True]
    report(page, {"bf16": plain, "tpde": ours, "fp8": {"problem": "no"}}, [1], (32, 16))
    text = page.markdown()
    assert "once more, of bf16's time" in text
    assert "| once more, s |" in text
    judge(page, {"bf16": plain, "tpde": {"problem": "no"}}, [1])
    assert "loading, tpde, of bf16's time" in page.markdown().rsplit("| bar ", 1)[1]


def test_tokens_that_fit_are_a_bar_within_24_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    for tokens, met in (("93,616", True), ("92,000", False)):
        page = Page("Serving", {})
        rows = {"bf16": row(100) | {"kv": "58,128"}, "tpde": row(200) | {"kv": tokens}}
        judge(page, rows, [1], room=24.0)
        assert page.bars[1] == ("tokens in the KV cache, of bf16's", met)
    for room in (None, 72.0):
        judge(page := Page("Serving", {}), rows, [1], room=room)
        assert not [what for what, _ in page.bars if "KV" in what]
    judge(page := Page("Serving", {}), {"bf16": row(100), "tpde": {"problem": "no"}}, [1], room=24.0)
    assert "not measured" in page.markdown().split("KV cache")[1].splitlines()[0]
    facts = SimpleNamespace(total_memory=80 << 30)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: facts)
    monkeypatch.setattr("benchmarks.serve.device", lambda: "cuda")
    assert room_of("--enforce-eager --gpu-memory-utilization 0.3") == pytest.approx(24.0)
    assert room_of("--enforce-eager") is None


def test_bars_of_two_gpus() -> None:
    """Only tokens a second of one request have one."""
    assert [cards_of(it) for it in ("", "--tensor-parallel-size 2 --enforce-eager", "-tp=2")] == [1, 2, 2]
    page = Page("Serving", {})
    judge(page, {"bf16": row(100), "tpde": row(116)}, [1, 8], cards=2)
    judge(page, {"bf16": row(100), "tpde": row(114)}, [1, 8], cards=2)
    assert [met for _, met in page.bars] == [True, False]


@pytest.mark.parametrize("same", [True, False])
def test_tokens_of_exact_kernels_are_those_of_plain_weights(same: bool) -> None:
    page = Page("Serving", {})
    plain = [[[5, 6], [7, 8]], [[5, 6], [7, 9]]]
    ours = plain if same else [plain[0], [[5, 6], [7, 8]]]
    rows = {"bf16": {"tokens": plain}, "tpde-exact": {"tokens": ours}, "tpde": {"tokens": plain[::-1]}}
    compare(page, rows, invariant=False)
    assert [met for _, met in page.bars] == [same]
    assert "as bf16, 32" in page.markdown()


@pytest.mark.parametrize("other", [5, 6])
@pytest.mark.parametrize("batched", [5, 6])
def test_tokens_that_depend_on_no_batch_and_no_number_of_gpus(other: int, batched: int) -> None:
    page = Page("Serving", {})
    rows = {"tpde": {"tokens": [[[5]], [[batched]]]}, "tpde-2": {"tokens": [[[other]], [[batched]]]}}
    compare(page, rows, invariant=True)
    assert [met for _, met in page.bars] == [batched == 5, other == batched, other == 5]
    assert f"| tpde, two GPUs | {int(other == batched)} " in " ".join(page.markdown().split())
    assert "as tpde, 32" in page.markdown()


def test_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ways take the GPUs that the caller named."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    ways = ["bf16", "fp8", "tpde"]
    assert list(turns(ways, 2, False)) == [[("bf16", "4"), ("fp8", "7")], [("tpde", "4")]]
    assert list(turns(ways, 1, False)) == [[(way, None)] for way in ways]
    assert list(turns(ways, 2, True)) == [[("bf16", None), ("fp8", None)], [("tpde", None)]]
    for beside in (0, 3):
        with pytest.raises(SystemExit, match="needs as many GPUs, 2 are there"):
            list(turns(ways, beside, False))


def text_of(sums: list[float], tokens: int = 100) -> Text:
    return {"tokens": tokens, "window": 50, "step": 64, "sums": sums}


def test_perplexities() -> None:
    """Seven digits, the difference with its error, and a bar at half a unit of the fifth."""
    page = Page("Serving", {})
    plain = text_of([-120.0, -130.0])
    rows = {
        "bf16": {"text": plain},
        "fp8": {"text": text_of([-121.0, -132.0])},
        "tpde": {"text": text_of([-120.0002, -130.0001])},
        "tpde-exact": {"text": text_of([-120.01, -130.0])},
        "tpde-packed": {"problem": "no"},
    }
    perplexities(page, rows)
    text = page.markdown()
    assert f"{math.exp(2.5):.5f}" == "12.18249"
    assert "12.18249" in text
    assert "3.0e-02 |        1.0e-02" in text
    assert [met for _, met in page.bars] == [True, False], "FP8 has no bar, what was not measured meets none"
    assert perplexity(plain) == pytest.approx(math.exp(2.5), rel=1e-12)


@pytest.mark.parametrize(("found", "apart"), [(12.1825, 0), (12.1835, 1), (12.1820, 0.5)])
def test_units_of_the_fifth_digit(found: float, apart: float) -> None:
    assert units(found, 12.1825) == pytest.approx(apart, abs=1e-9)
    assert units(found / 100, 0.121825) == pytest.approx(apart, abs=1e-9)


def test_windows() -> None:
    """Each token but the first of a window is predicted, and none twice."""
    assert windows_of([5, 6, 7, 8, 9], 2) == [[5, 6], [7, 8]]
    assert windows_of([5, 6, 7, 8, 9], 3) == [[5, 6, 7], [8, 9]]
    with pytest.raises(ValueError, match="less than two tokens"):
        windows_of([5], 2)


def given(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    options(parser)
    return parser.parse_args(arguments)


def test_comparing_has_a_run_of_its_own() -> None:
    chosen = given("--offline", "--compare", "20")
    check(chosen)
    assert chosen.concurrent == []
    with pytest.raises(SystemExit, match="`--compare` needs a run of its own, without `--concurrent`"):
        check(given("--offline", "--compare", "20", "--concurrent", "1"))
    with pytest.raises(SystemExit, match="leave it out of `--serve`"):
        check(given("--offline", "--compare", "20", "--serve=--compilation-config {}"))


def test_a_way_on_two_gpus_has_none_beside_it() -> None:
    with pytest.raises(SystemExit, match="`bf16-invariant` is for `--perplexity`"):
        check(given("--offline", "--ways", "bf16", "bf16-invariant"))
    with pytest.raises(SystemExit, match="`tpde-2` needs two"):
        check(given("--offline", "--ways", "tpde", "tpde-2", "--beside", "2"))


def test_a_perplexity_has_a_run_of_its_own(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a b")
    of = ("--dir", str(tmp_path))
    with pytest.raises(SystemExit, match="needs a trained model and its tokenizer"):
        check(given("--offline", "--perplexity", str(text), *of))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SystemExit, match="needs a trained model and its tokenizer"):
        check(given("--offline", "--perplexity", str(text)))
    chosen = given("--offline", "--perplexity", str(text), *of)
    check(chosen)
    assert chosen.concurrent == []
    for more in ("--concurrent=1", "--compare=2"):
        with pytest.raises(SystemExit, match="needs a run of its own"):
            check(given("--offline", "--perplexity", str(text), more))
    with pytest.raises(SystemExit, match="`--perplexity` needs `--offline`"):
        check(given("--perplexity", str(text)))
    with pytest.raises(SystemExit, match="is not there"):
        check(given("--offline", "--perplexity", str(tmp_path / "other")))
    for more in (["--engines=0", "--perplexity", str(text), *of], ["--engines=2"]):
        with pytest.raises(SystemExit, match="`--engines` is of those that read a text"):
            check(given("--offline", *more))
    check(given("--offline", "--perplexity", str(tmp_path), "--engines=2", *of))
    chosen = given("--latency")
    check(chosen)
    assert chosen.concurrent == [1, 8, 32, 128]


def test_engines_read_a_share_each(tmp_path: Path) -> None:
    """Their sums come in the text's order, whatever the number of engines."""

    class Fake:
        def __init__(self, *sums: float) -> None:
            self.sums = list(sums)

        def perplexity(self, text: Path, share: int, shares: int) -> Text:
            assert (text, shares) == (tmp_path, 3)
            return {"tokens": 10 * len(self.sums), "window": 11, "step": 4, "sums": [share, *self.sums[1:]]}

    engines: Any = [Fake(0.0, 3.0), Fake(0.0, 4.0), Fake(0.0)]
    assert reading(engines, tmp_path) == {"tokens": 50, "window": 11, "step": 4, "sums": [0, 1, 2, 3.0, 4.0]}


def a_run(path: Path, way: str, sums: list[float], **facts: str) -> Path:
    """What `--json` writes of one way."""
    usual = {"Command": way, "Date": f"of {way}", "GPU": "one", "Versions": "1"}
    page = Page("Serving", usual | facts, json=path)
    page.data = {way: {"start": "9.0", "text": text_of(sums)}}
    page.save()
    return path


def test_ways_that_earlier_runs_have_measured(tmp_path: Path) -> None:
    """They are not run again; with all ways there, the page is of their machine."""
    plain = a_run(tmp_path / "plain.json", "bf16", [-120.0, -130.0])
    ours = a_run(tmp_path / "ours.json", "tpde", [-120.0002, -130.0001])
    page = Page("Serving", {"Command": "of both", "GPU": "another"})
    rows = take([plain, ours], ["bf16", "tpde"], page)
    assert page.facts["GPU"] == "one"
    assert (page.facts["Command"], page.facts["Date"]) == ("bf16; tpde", "of bf16; of tpde")
    perplexities(page, rows)
    assert page.bars[0][1], "within half a unit"
    here = Page("Serving", {"Command": "this", "Date": "now", "GPU": "one", "Versions": "1"})
    assert list(take([plain], ["bf16", "tpde"], here)) == ["bf16"]
    assert here.facts["Command"] == "bf16; this"
    assert take([plain, ours], ["bf16"], Page("Serving", {})).keys() == {"bf16"}
    untouched = Page("Serving", {"GPU": "another"})
    assert (take([], ["bf16"], untouched), untouched.facts) == ({}, {"GPU": "another"})


def test_runs_that_cannot_be_compared(tmp_path: Path) -> None:
    plain = a_run(tmp_path / "plain.json", "bf16", [-120.0, -130.0])
    other = a_run(tmp_path / "other.json", "tpde", [-120.0, -130.0], Versions="2")
    shorter = a_run(tmp_path / "shorter.json", "tpde", [-120.0])
    both = ["bf16", "tpde"]
    with pytest.raises(SystemExit, match="has Versions '1', the run beside it '2'"):
        take([plain, other], both, Page("Serving", {}))
    with pytest.raises(SystemExit, match="has GPU 'one', the run beside it None"):
        take([plain], both, Page("Serving", {"Versions": "1"}))
    with pytest.raises(SystemExit, match="read other texts"):
        take([plain, shorter], both, Page("Serving", {}))
    bad = tmp_path / "bad.json"
    for text in ("", "[]", "{}", '{"facts": {}, "data": null}'):
        bad.write_text(text)
        with pytest.raises(SystemExit, match="is no result of `--perplexity --json`"):
            take([bad], both, Page("Serving", {}))
    with pytest.raises(SystemExit, match="`--measured` is for `--perplexity`"):
        check(given("--offline", "--measured", str(plain)))


def test_a_model_of_the_caller_s(tmp_path: Path) -> None:
    """It is used, and nothing is written beside it."""
    mine, scratch = tmp_path / "mine", tmp_path / "scratch"
    mine.mkdir()
    (mine / "config.json").write_text("{}")
    assert model_of(given("--dir", str(mine)), scratch) == (mine, scratch / "mine-packed")
    made = tmp_path / "tiny-3-layers"
    made.mkdir()
    (made / "config.json").write_text("{}")
    chosen = given("--dir", str(tmp_path), "--shape", "tiny", "--layers", "3")
    assert model_of(chosen, scratch) == (made, tmp_path / "tiny-3-layers-packed")


@pytest.mark.skipif(find_spec("glyd") is not None, reason="Glyd is installed")
def test_glyd_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="Glyd is not installed"):
        served("glyd", (tmp_path, tmp_path), tmp_path / "log", {}, given())
