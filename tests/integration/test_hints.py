"""No refusal names a command that refuses, too: every hint is followed."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.checkpoints import Pair, checkpoint
from support.commands import invoke
from support.models import torch

import tpde.torch
from tpde.format.constants import MANIFEST

pytest.importorskip("transformers", minversion="5.13", reason="needs transformers 5.13")

MODEL = "model.safetensors"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A tiny Llama, plain and packed."""
    return checkpoint(tmp_path_factory.mktemp("llama"), "llama")


def _plain(llama: Pair, at: Path) -> None:
    shutil.copytree(llama.plain, at)


def _packed(llama: Pair, at: Path) -> None:
    shutil.copytree(llama.packed, at)


def _plain_file(llama: Pair, at: Path) -> None:
    shutil.copy(llama.plain / MODEL, at)


def _packed_file(llama: Pair, at: Path) -> None:
    shutil.copy(llama.packed / MODEL, at)


def _text_file(_: Pair, at: Path) -> None:
    at.write_text("no safetensors file")


def _empty(_: Pair, at: Path) -> None:
    at.mkdir()


def _pickled(llama: Pair, at: Path) -> None:
    shutil.copytree(llama.plain, at)
    torch.save(tpde.torch.load_file(at / MODEL), at / "pytorch_model.bin")
    (at / MODEL).unlink()


def _other_pickle(llama: Pair, at: Path) -> None:
    _pickled(llama, at)
    (at / "pytorch_model.bin").rename(at / "consolidated.00.pth")


def _config_of_packed(llama: Pair, at: Path) -> None:
    shutil.copy(llama.packed / "config.json", at)


def _stale(llama: Pair, at: Path) -> None:
    _plain(llama, at)
    _config_of_packed(llama, at)


def _stale_pickle(llama: Pair, at: Path) -> None:
    _pickled(llama, at)
    _config_of_packed(llama, at)


def _resaved(llama: Pair, at: Path) -> None:
    _packed(llama, at)
    (at / MANIFEST).unlink()


def _packed_without_saying_so(llama: Pair, at: Path) -> None:
    _resaved(llama, at)
    shutil.copy(llama.plain / "config.json", at)


def _packed_file_in_a_folder(llama: Pair, at: Path) -> None:
    at.mkdir()
    shutil.copy(llama.packed / MODEL, at)


def _packed_folder_in_a_folder(llama: Pair, at: Path) -> None:
    _packed(llama, at / "inner")


def _adapter(_: Pair, at: Path) -> None:
    at.mkdir()
    (at / "adapter_config.json").write_text("{}")
    tpde.torch.save_file({"a": torch.randn(64, 64).bfloat16()}, at / "p")
    tpde.unpack(at / "p", at / "adapter_model.safetensors")
    (at / "p").unlink()


def _adapter_in_a_pickle(llama: Pair, at: Path) -> None:
    _adapter(llama, at)
    (at / "adapter_model.safetensors").unlink()
    torch.save({"a": torch.zeros(3)}, at / "adapter_model.bin")


def _missing_shard(llama: Pair, at: Path) -> None:
    _plain(llama, at)
    index = {"metadata": {}, "weight_map": {"w": "gone.safetensors"}}
    (at / "model.safetensors.index.json").write_text(json.dumps(index))


def _taken_name(llama: Pair, at: Path) -> None:
    _pickled(llama, at)
    (at / MODEL).mkdir()


STATES = [
    *(_plain, _packed, _plain_file, _packed_file, _text_file, _empty, _pickled, _other_pickle),
    *(_stale, _stale_pickle, _resaved, _packed_without_saying_so, _packed_file_in_a_folder),
    *(_packed_folder_in_a_folder, _adapter, _adapter_in_a_pickle, _missing_shard, _taken_name),
]
NEEDS_TARGET = ("pack", "unpack")


def _try(*args: object) -> tuple[int, str]:
    """Run a command: its exit code, and its hint."""
    done = invoke(*args)
    assert "Traceback" not in done.stderr, done.stderr
    assert done.exit_code in (0, 1, 2, 3), (args, done.output, done.exception)
    lines = [line for line in done.stderr.splitlines() if line.startswith("hint: ")]
    return done.exit_code, lines[0] if lines else ""


def _follow(hint: str, at: Path, targets: list[Path]) -> None:
    """Do what a hint says."""
    for name in re.findall(r"such as `([^`]+)`, to pack", hint):
        target = at.with_name(f"out{len(targets)}")
        targets.append(target)
        assert _try("pack", name, target)[0] == 0, hint
    for command in re.findall(r"`tpde ([^`]+)`", hint):
        name, *args = shlex.split(command)
        if not args:
            target = at.with_name(f"out{len(targets)}")
            args = [str(at), *([str(target)] if name in NEEDS_TARGET else [])]
        elif name in NEEDS_TARGET:
            args[-1] = str(at.with_name(f"out{len(targets)}"))
        targets.append(Path(args[-1]))
        assert _try(name, *args)[0] == 0, f"{hint}\n{_try(name, *args)[1]}"
        if "and pack that" in hint:
            targets.append(at.with_name(f"out{len(targets)}"))
            assert _try("pack", targets[-2], targets[-1])[0] == 0, hint


@pytest.mark.parametrize("state", STATES, ids=lambda it: it.__name__.strip("_"))
def test_every_hint_works(state: Callable[[Pair, Path], None], llama: Pair, tmp_path: Path) -> None:
    at, targets = tmp_path / "it", list[Path]()
    state(llama, at)
    for command in (
        ("pack", at, tmp_path / "t"),
        ("unpack", at, tmp_path / "u"),
        ("verify", at),
        ("inspect", at),
        ("run", at, "--prompt", "a", "--max-new-tokens", "1"),
        ("plan", at, "--vram", "4GiB", "--copy-rate", "55", "--memory-rate", "4200"),
    ):
        code, hint = _try(*command)
        assert code in (0, 1) or hint, command  # verify lists what is wrong
        if code:
            _follow(hint, at, targets)


@pytest.mark.parametrize("there", [_plain, _packed, _plain_file, _text_file, _empty, _adapter, _resaved])
@pytest.mark.parametrize("source", [_plain, _plain_file, _packed, _packed_file])
def test_force_is_named_only_where_it_does(
    source: Callable[[Pair, Path], None], there: Callable[[Pair, Path], None], llama: Pair, tmp_path: Path
) -> None:
    source(llama, tmp_path / "it")
    there(llama, tmp_path / "there")
    command = "unpack" if source in (_packed, _packed_file) else "pack"
    code, hint = _try(command, tmp_path / "it", tmp_path / "there")
    assert code == 2
    if "with `--force`" in hint:
        assert _try(command, tmp_path / "it", tmp_path / "there", "--force")[0] == 0, hint


def test_the_source_itself_is_not_offered_to_be_replaced(llama: Pair, tmp_path: Path) -> None:
    for state, command in ((_plain, "pack"), (_plain_file, "pack"), (_packed, "unpack")):
        at = tmp_path / state.__name__
        state(llama, at)
        code, hint = _try(command, at, at)
        assert (code, "--force" in hint) == (2, False)
