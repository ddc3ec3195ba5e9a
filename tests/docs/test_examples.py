"""What guides tell readers to run runs, page by page, in the order of the page."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import DOCS, ROOT, blocks

pytestmark = [
    pytest.mark.filterwarnings("default"),  # those of libraries are not the pages'
    pytest.mark.usefixtures("place"),
]

PAGES = sorted(
    it.relative_to(ROOT).as_posix()
    for it in (
        ROOT / "README.md",
        *DOCS.glob("*.md"),
        *DOCS.glob("guides/*.md"),
        *DOCS.glob("reference/*.md"),
    )
    if it.name not in ("practice.md", "install.md")  # a fixture runs the one, the other installs
)


# What the small models have learnt, and pages make them say.
SAID = {
    "docs/index.md": ["carries 2.6 bits."],
    "docs/guides/run.md": ["carries 2.6 bits."] * 4,
    "docs/guides/fused.md": ["carries 2.6 bits."] * 2,
    "docs/guides/several-fine-tunes.md": ["two make four.", "must be kept.", "carries 2.6 bits."],
    "docs/guides/requests.md": ["two make four.", "carries 2.6 bits.", "must be kept."],
    "docs/guides/fine-tune.md": [" is right."],
}


@pytest.fixture
def place(practice: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the small models in it, and nothing else."""
    for it in practice.iterdir():
        if it.is_dir():
            shutil.copytree(it, tmp_path / it.name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # one way for all machines
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.parametrize("page", PAGES)
def test_what_a_block_needs_is_said_where_readers_see_it(page: str) -> None:
    text = (ROOT / page).read_text("utf-8")
    hidden = re.findall(r"<!-- not run: (.+?) -->", text)
    assert not [why for why in hidden if re.search("need|GPU", why)]
    shown = [it.not_run for it in blocks(ROOT / page) if it.not_run is not None]
    assert len(shown) == len(re.findall(r"^\*Needs .+\*$", text, re.MULTILINE)) + len(hidden)
    for it in blocks(ROOT / page):
        if re.search(r"--vram|vram=|\"cuda\"", it.code) and "tpde plan" not in it.code:
            assert it.not_run is None or "GPU" in it.not_run, f"{page}:{it.line}"


def test_guides_go_in_any_order() -> None:
    """What several of them make in the same folder, each replaces."""
    made = re.compile(r"^tpde (?:pack|unpack|diff|patch|ckpt export) [^#\n]*", re.M)
    places: dict[str, list[tuple[str, bool]]] = {}
    for page in PAGES:
        for it in blocks(ROOT / page) if page.startswith("docs/guides/") else ():
            for command in made.findall(it.code) if not it.not_run else ():
                place = command.partition(" --")[0].split()[-1]  # options come last
                places.setdefault(place, []).append((page, "--force" in command))
    shared = {place: them for place, them in places.items() if len({page for page, _ in them}) > 1}
    assert {"llama-packed", "math.tpde", "law.tpde"} <= set(shared)
    assert not [(place, page) for place, them in shared.items() for page, forced in them if not forced]


def _words(text: str) -> str:
    """What is printed, but for numbers, which are each machine's, and spaces between columns."""
    return " ".join(re.sub(r"\d[\d.]*( ([KMG]i)?B\b)?", "#", text).split())


@pytest.mark.parametrize("page", PAGES)
def test_examples_run(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {"__name__": "page"}
    said = ""
    shown = 0
    for it in blocks(ROOT / page):
        if it.not_run:
            continue
        if it.kind == "python":
            # Errors name the page and the line.
            exec(compile("\n" * (it.line - 1) + it.code, page, "exec"), names)
            out = capsys.readouterr().out
        else:
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", it.code], capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"{page}:{it.line}\n{it.code}\n{done.stdout}\n{done.stderr}"
            out = done.stdout
        said += out
        if it.prints is not None:
            assert _words(it.prints) in _words(out), out
            shown += 1
    if page.startswith("docs/guides/"):  # formats have other texts
        assert shown == (ROOT / page).read_text("utf-8").count("\n```text\n")
    at = 0
    for text in SAID.get(page, ()):  # one after the other
        assert text in said[at:], said
        at = said.index(text, at) + len(text)
