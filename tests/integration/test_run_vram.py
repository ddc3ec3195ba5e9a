"""`tpde run` under a budget of device memory, which is simulated."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.budgets import MIXED, every, simulated
from support.checkpoints import Pair, checkpoint
from support.commands import invoke
from support.models import torch

from tpde.errors import Corrupt

pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Run the command with the simulated device for `cuda`."""
    from tpde.integrations.transformers import load_model
    from tpde.loading import devices

    def cpu(*_: object) -> torch.device:
        return torch.device("cpu")

    monkeypatch.setattr(devices, "checked_device", cpu)
    monkeypatch.setattr(load_model, "checked_device", cpu)
    monkeypatch.setattr(load_model, "_check_gpus", lambda _: None)
    with simulated(monkeypatch, every(*MIXED)):
        yield lambda *args: invoke("run", *args)


def test_command(run: Callable[..., Any], llama: Pair, tmp_path: Path) -> None:
    args = (llama.packed, "--prompt", "Hello", "--max-new-tokens", "5")
    expected = json.loads(run(*args, "--json").stdout)
    budget = ("--vram", "1GiB", "--ram", "64MiB", "--max-tokens", "9")
    done = run(*args, *budget, "--trace", tmp_path / "trace.json", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["tokens"] == expected["tokens"]
    assert found["streaming"]["cpu"]["copied_bytes"] > 0
    assert "traceEvents" in json.loads((tmp_path / "trace.json").read_text())
    done = run(*args, *budget, "--stats")
    assert done.stdout == expected["text"] + "\n"
    assert "cpu: " in done.stderr
    refused = run(*args, "--vram", "1GiB", "--max-tokens", "8")
    assert refused.exit_code == 2
    assert "1 x 9 = 9 tokens" in refused.stderr
    assert "hint: pass fewer" in refused.stderr


def test_the_bar_ends_with_the_first_token(
    run: Callable[..., Any], llama: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host memory is loaded until then, and no text is written into the bar."""
    from tpde.integrations.transformers import generate as generating

    log: list[str] = []
    generate = generating.generate

    @contextmanager
    def bar(*_: Any) -> Iterator[Callable[[int], None]]:
        log.append("bar")
        yield lambda _: None
        log.append("no bar")

    def made(*args: Any, write: Callable[[str], None], **kwargs: Any) -> Any:
        def told(text: str) -> None:
            log.append("token")
            write(text)
            log.append("written")

        log.append("generate")
        return generate(*args, write=told, **kwargs)

    monkeypatch.setattr("tpde.cli.run.progress_bar", bar)
    monkeypatch.setattr(generating, "generate", made)
    done = run(llama.packed, "--prompt", "Hello", "--max-new-tokens", "5", "--vram", "1GiB")
    assert done.exit_code == 0, done.output
    assert log[:5] == ["bar", "generate", "token", "no bar", "written"]
    assert log.count("no bar") == 1


def test_a_command_of_an_encoder_and_a_decoder(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What there is no room for is refused before it loads, and not when the last token is wanted."""
    pair = checkpoint(tmp_path, "t5")
    args = (pair.packed, "--prompt", "Hello", "--max-new-tokens", "5", "--vram", "1GiB", "--json")
    assert run(*args, "--max-tokens", "10").exit_code == 0
    monkeypatch.delattr("tpde.cli.run._load")
    refused = run(*args, "--max-tokens", "9")
    assert refused.exit_code == 2
    assert "1 x 10 = 10 tokens" in refused.stderr


def test_command_ends_with_a_check(
    run: Callable[..., Any], llama: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tpde.integrations.transformers.streamed import ModelStreaming

    def check(_: object) -> None:
        raise Corrupt("`lm_head.weight`: chunk 0 is damaged; fetch the file again")

    monkeypatch.setattr(ModelStreaming, "check", check)
    done = run(llama.packed, "--prompt", "Hello", "--max-new-tokens", "2", "--vram", "1GiB", "--json")
    assert done.exit_code == 3
    assert done.stdout == ""
    assert "chunk 0 is damaged" in done.stderr


def test_commands_that_cannot_be(llama: Pair) -> None:
    for args, error in (
        (("--ram", "1GiB"), "`ram` is a part of a budget"),
        (("--max-tokens", "9"), "`max_tokens` is a part of a budget"),
        (("--trace", "x.json"), "`--trace` is of weights that are streamed"),
        (("--vram", "1GiB", "--trace", "nowhere/x.json"), "`nowhere/x.json` cannot be written"),
        (("--vram", "1GiB", "--trace", "."), "`.` cannot be written: Is a directory"),
        (("--vram", "a lot"), "is no size"),
        (("--vram", "1GiB", "--device", "cpu"), "goes to `cpu`"),
    ):
        done = invoke("run", llama.packed, "--prompt", "x", *args)
        assert done.exit_code == 2
        assert error in done.stderr
        assert "hint:" in done.stderr
