"""`tpde run` under a budget of device memory, which is simulated."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.budgets import MIXED, Opened, SimulatedMachine, every, load, placed, simulated
from support.checkpoints import Pair, checkpoint
from support.commands import invoke
from support.simulated import MemoryFeed, Ticket

from tpde.cli import app
from tpde.errors import OutOfMemory
from tpde.io.sources import Extent
from tpde.loading.machine import loading_on

pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
    """Have weights in all places, on a GPU that is simulated: what is opened for them."""
    with simulated(monkeypatch, every(*MIXED)) as found:
        yield found


def run(*args: Any) -> Any:
    return invoke("run", *args)


@pytest.mark.usefixtures("opened")
def test_command(llama: Pair, tmp_path: Path) -> None:
    args = (llama.packed, "--prompt", "Hello", "--max-new-tokens", "5")
    expected = json.loads(run(*args, "--json").stdout)
    budget = ("--vram", "1GiB", "--ram", "64MiB", "--max-tokens", "9")
    done = run(*args, *budget, "--trace", tmp_path / "trace.json", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["tokens"] == expected["tokens"]
    assert found["device"] == "cpu"
    assert found["streaming"]["cpu"]["copied_bytes"] > 0
    assert "traceEvents" in json.loads((tmp_path / "trace.json").read_text())
    done = run(*args, *budget, "--stats")
    assert done.stdout == expected["text"] + "\n"
    assert "cpu: " in done.stderr
    refused = run(*args, "--vram", "1GiB", "--max-tokens", "8")
    assert refused.exit_code == 2
    assert "1 x 9 = 9 tokens" in refused.stderr
    assert "hint: pass fewer" in refused.stderr


@pytest.mark.parametrize("more", [(), ("--stats",), ("--trace",)])
def test_times_are_noted_where_they_are_told(
    more: tuple[str, ...], opened: Opened, llama: Pair, tmp_path: Path
) -> None:
    """Noting them waits for the device."""
    more = (*more, tmp_path / "trace") if "--trace" in more else more
    done = run(llama.packed, "--prompt", "x", "--max-new-tokens", "2", "--vram", "1GiB", "--json", *more)
    assert set(opened.noted) == ({"cpu"} if more else set())
    assert ("hidden" in json.loads(done.stdout)["streaming"]["cpu"]) == bool(more)


class Terminal(io.StringIO):
    """One that draws bars; notes in a list shared with others what is written."""

    def __init__(self, name: str, log: list[str]) -> None:
        super().__init__()
        self._name, self._log = name, log

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self._log.append(f"{self._name} {text}")
        return super().write(text)


def test_the_bar_ends_with_the_first_token(llama: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory is loaded until then, and no text is written into the bar."""
    log: list[str] = []

    class Memory(MemoryFeed):
        def request(self, extent: Extent) -> Ticket:
            log.append("wanted")
            return super().request(extent)

    class Machine(SimulatedMachine):
        def memory(self, extents: Any, device: Any, progress: Any) -> Any:
            super().memory(extents, device, progress)
            return Memory()

    monkeypatch.setenv("TERM", "xterm")
    placed(monkeypatch, every("host"))
    opened = Opened()
    args = ["run", str(llama.packed), "--prompt", "Hello", "--max-new-tokens", "5"]
    expected = run(*args[1:]).stdout
    with closing(opened), loading_on(Machine(opened)):
        out = Terminal("text", log)
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", Terminal("bar", log))
        app([*args, "--vram", "1GiB"], standalone_mode=False)
        monkeypatch.undo()
    assert out.getvalue() == expected
    bar = [number for number, it in enumerate(log) if it.startswith("bar")]
    text = [number for number, it in enumerate(log) if it.startswith("text")]
    assert "loading" in "".join(log[it] for it in bar)
    assert bar[0] < log.index("wanted") < bar[-1] < text[0]


def test_a_command_of_an_encoder_and_a_decoder(opened: Opened, tmp_path: Path) -> None:
    """What there is no room for is refused before it loads, and not when the last token is wanted."""
    pair = checkpoint(tmp_path, "t5")
    args = (pair.packed, "--prompt", "Hello", "--max-new-tokens", "5", "--vram", "1GiB", "--json")
    assert run(*args, "--max-tokens", "10").exit_code == 0
    before = len(opened.devices)
    assert before
    refused = run(*args, "--max-tokens", "9")
    assert refused.exit_code == 2
    assert "1 x 10 = 10 tokens" in refused.stderr
    assert len(opened.devices) == before


def test_command_ends_with_a_check(llama: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else would see what a disk returned for the last token."""

    class Memory(MemoryFeed):
        passes = 0

        def wait(self, extent: Extent) -> int:
            if extent.name == "lm_head.weight":
                self.passes += 1
                if self.passes == 2:
                    self.whole(extent)[extent.offset + extent.size - 64] ^= 0x55
            return super().wait(extent)

    class Machine(SimulatedMachine):
        def memory(self, extents: Any, device: Any, progress: Any) -> Any:
            return Memory()

    args = (llama.packed, "--prompt", "Hello", "--vram", "1GiB", "--json")
    placed(monkeypatch, every("host"))
    opened = Opened()
    with closing(opened), loading_on(Machine(opened)):
        assert run(*args, "--max-new-tokens", "1").exit_code == 0
        done = run(*args, "--max-new-tokens", "2")
    assert done.exit_code == 3
    assert done.stdout == ""
    assert "`lm_head.weight`" in done.stderr
    assert "chunk" in done.stderr


def test_where_all_fits_nothing_is_copied(llama: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    with simulated(monkeypatch, every("plain")):
        done = run(llama.packed, "--prompt", "x", "--max-new-tokens", "2", "--vram", "1GiB", "--stats")
    assert "copies: none: all weights fit the device" in done.stderr


def test_a_text_is_one_sequence_and_vectors_are_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model whose layers keep states of each: a text needs the memory of one alone."""
    pair = checkpoint(tmp_path, "mamba")
    with simulated(monkeypatch):
        least = {}
        for batch in (1, 32):
            with pytest.raises(OutOfMemory) as caught:
                load(pair.packed, vram=1 << 20, max_tokens=64, max_batch=batch)
            least[batch] = caught.value.least
        budget = (pair.packed, "--max-tokens", "64", "--vram")
        texts = ("--prompt", "x", "--max-new-tokens", "2"), ("--embed", *"abcdefghij")
        found = [[run(*budget, least[it], *text).exit_code for it in (1, 32)] for text in texts]
    assert found == [[0, 0], [2, 0]]


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
