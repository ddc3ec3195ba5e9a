"""What commands are told reaches what does the work, and what that found is what they say."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import typer
from support.cli import Run
from support.states import files
from typer.models import OptionInfo

from tpde import cli
from tpde.cli import common
from tpde.errors import InvalidInput
from tpde.files import operations
from tpde.store import diffing, patching, verify_delta


class Stopped(InvalidInput):
    """Raised where the work would begin."""


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Give what the function was called with that would have done the work."""
    found: dict[str, Any] = {}

    def recorder(*args: Any, **options: Any) -> None:
        progress = options.pop("progress")
        assert callable(progress)
        found.update(args=args, options=options)
        raise Stopped("stopped here")

    for module, names in (
        (operations, ("pack", "unpack", "verify")),
        (diffing, ("diff",)),
        (patching, ("patch",)),
        (verify_delta, ("verify_delta",)),
    ):
        for name in names:
            monkeypatch.setattr(module, name, recorder)
    return found


FREE = {"threads": None, "force": False}
TOLD = {"threads": 3, "force": True}


@pytest.mark.parametrize(
    ("line", "places", "options"),
    [
        ("pack S D", "S D", FREE | {"codec": "auto", "exclude": ()}),
        (
            "pack S D --threads 3 --force --codec zstd --exclude a --exclude b/*",
            "S D",
            TOLD | {"codec": "zstd", "exclude": ["a", "b/*"]},
        ),
        ("unpack S D", "S D", FREE),
        ("unpack S D --threads 3 --force", "S D", TOLD),
        ("verify S", "S", {"against": None, "threads": None, "exclude": ()}),
        (
            "verify S --against D --threads 3 --exclude a",
            "S",
            {"against": "D", "threads": 3, "exclude": ["a"]},
        ),
        ("verify delta", "delta", {"base": None, "threads": None}),
        ("verify delta --base D --threads 3", "delta", {"base": "D", "threads": 3}),
        ("diff S D delta", "S D delta", FREE | {"fast": False}),
        ("diff S D delta --threads 3 --force --fast", "S D delta", TOLD | {"fast": True}),
        ("patch S delta D", "S delta D", FREE),
        ("patch S delta D --threads 3 --force", "S delta D", TOLD),
    ],
)
def test_options_reach_what_does_the_work(
    line: str, places: str, options: dict[str, Any], run: Run, called: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "S").write_bytes(b"source")
    (tmp_path / "delta").write_bytes(b"\x89TPDD\r\n\x1a" + bytes(56))
    args = [str(tmp_path / it) if it in ("S", "D", "delta") else it for it in line.split()]
    assert run(*args).code == common.USAGE
    assert [str(it) for it in called["args"]] == [str(tmp_path / it) for it in places.split()]
    found = {key: Path(it).name if isinstance(it, Path) else it for key, it in called["options"].items()}
    assert found == options


# ---- what is said


def test_what_is_intact_says_with_what_it_was_compared(run: Run, model: Path, tmp_path: Path) -> None:
    assert run("pack", model, tmp_path / "packed").code == 0
    assert run("verify", tmp_path / "packed").out.startswith("intact, ")
    done = run("verify", tmp_path / "packed", "--against", model)
    assert done.out.startswith("intact and equal to its source, ")
    assert done.err == ""


def test_what_was_left_out_is_told_as_it_is_compared(run: Run, model: Path, tmp_path: Path) -> None:
    note, against = "note: `config.json` is left out: excluded\n", ("--against", model)
    assert run("pack", model, tmp_path / "packed", "--exclude", "config.json").err == note
    done = run("verify", tmp_path / "packed", *against, "--exclude", "config.json")
    assert (done.code, done.err) == (0, note)
    assert done.out.startswith("intact, and so is what was packed of its source; 1 thing of it was not, ")
    done = run("verify", tmp_path / "packed", *against, "--exclude", "config.json", "--json")
    found = json.loads(done.out)
    assert [it["name"] for it in found["left_out"]] == ["config.json"]
    assert (found["against"], found["base"], found["path"]) == (str(model), None, str(tmp_path / "packed"))
    assert found["seconds"] > 0
    assert run("verify", tmp_path / "packed", *against).code == common.DAMAGE


def test_patterns_that_leave_nothing_out_are_named(
    run: Run, model: Path, plain: Path, tmp_path: Path
) -> None:
    args = ("--exclude", "confg.json", "--exclude", "config.json")
    excluded = "note: `config.json` is left out: excluded\n"
    nothing = "note: `--exclude {}` leaves nothing out: nothing in `{}` matches it\n"
    both = excluded + nothing.format("confg.json", model)
    assert run("pack", model, tmp_path / "packed", *args).err == both
    done = run("verify", tmp_path / "packed", "--against", model, *args)
    assert (done.code, done.err) == (0, both)
    assert run("pack", plain, tmp_path / "p", "--exclude", "*.md").err == nothing.format("*.md", plain)
    run("verify", tmp_path / "p", "--exclude", "*.md").failed(2, "no source is named", "`--against`")


def test_a_delta_that_is_intact_says_whether_its_base_was_there(run: Run, tmp_path: Path) -> None:
    base, target = files(tmp_path)
    run("diff", base, target, tmp_path / "delta")
    assert run("verify", tmp_path / "delta").out.startswith("intact, ")
    assert run("verify", tmp_path / "delta", "--base", base).out.startswith(
        "intact and made from this base, "
    )
    found = json.loads(run("verify", tmp_path / "delta", "--base", base, "--json").out)
    assert (found["ok"], found["base"], found["against"]) == (True, str(base), None)
    done = run("verify", tmp_path / "delta", "--base", target)
    assert done.code == common.DAMAGE
    assert done.out.splitlines()[-1].endswith("problems found")
    assert f"{len(done.out.splitlines()) - 1} problems found" == done.out.splitlines()[-1]
    assert "`tpde inspect" in done.err
    assert "leave out `--base`" in done.err


def test_sizes_of_what_was_unpacked(run: Run, plain: Path, tmp_path: Path) -> None:
    run("pack", plain, tmp_path / "p")
    found = json.loads(run("unpack", tmp_path / "p", tmp_path / "b", "--json").out)
    sizes = plain.stat().st_size, (tmp_path / "p").stat().st_size
    assert (found["destination_bytes"], found["source_bytes"]) == sizes
    assert found["ratio"] == sizes[0] / sizes[1]
    assert found["seconds"] > 0
    text = run("unpack", tmp_path / "p", tmp_path / "b", "--force").out
    assert text.startswith(
        f"{common.size(sizes[1])} unpacked into {common.size(sizes[0])}: 4 tensors checked, "
    )


def test_totals_of_bars_are_bytes_of_tensors(run: Run, plain: Path, model: Path, tmp_path: Path) -> None:
    from tpde.cli.patch import target_bytes
    from tpde.cli.unpack import original_bytes

    tensors = 300 * 128 * 2 + 200 * 128 * 2 + 5 * 8
    run("pack", plain, tmp_path / "p")
    run("pack", model, tmp_path / "d")
    assert original_bytes(tmp_path / "p") == original_bytes(plain) == tensors
    assert original_bytes(tmp_path / "d") == 2 * tensors
    run("diff", plain, plain, tmp_path / "delta")
    assert target_bytes(tmp_path / "delta") == tensors


def test_histograms_are_made_where_they_are_shown(run: Run, packed: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    from tpde.files.inspection import inspect
    from tpde.files.plot import plot

    assert json.loads(run("inspect", packed, "--json").out)["histogram"]
    assert run("inspect", packed, "--plot", tmp_path / "x.png").code == 0
    heights = []
    for histogram in (False, True):
        plot(inspect(packed, histogram=histogram), tmp_path / "y.png")
        heights.append((tmp_path / "y.png").read_bytes()[20:24])  # of an image, in its first chunk
    assert heights[0] != heights[1] == (tmp_path / "x.png").read_bytes()[20:24]


def test_a_delta_without_a_base_or_tensors_is_laid_out() -> None:
    from tpde.cli.diff import render, summary
    from tpde.store.delta_report import DeltaReport, TensorChange

    none = DeltaReport("d", None, 64, 0, 0.0, (), ())
    assert (
        render(none)
        == "0 B in a delta of 64 B: ratio 0.0, 0 tensors (none); its base was at an unknown place"
    )
    one = TensorChange("w", "", "BF16", (), "sparse", 2, 1, 0.5)
    two = TensorChange("v", "", "U8", (2, 3), "full", 6, 9, None)
    report = DeltaReport("d", "b", 80, 8, 0.1, (one, two), (("a", 0), ("b", 7)))
    assert summary(report) == "8 B in a delta of 80 B: ratio 0.1, 2 tensors (1 sparse, 1 full)"
    lines = [line.split() for line in render(report).splitlines()]
    assert lines[0] == ["tensor", "codec", "dtype", "shape", "bytes", "stored", "changed"]
    assert lines[1] == ["w", "sparse", "BF16", "scalar", "2", "1", "50.000", "%"]
    assert lines[2] == ["v", "full", "U8", "2x3", "6", "9", "-"]
    assert lines[5:7] == [["a", "same"], ["b", "7"]]
    assert lines[-1][-4:] == ["base", "was", "at", "`b`"]
    assert [it.split()[1] for it in render(report).splitlines()[:1]] == ["codec"]  # one file is not named
    alone = DeltaReport("d", None, 80, 6, 0.1, (two,), (("b", 7),))
    assert render(alone).endswith("; it stands on nothing")
    for needs in ((*alone.tensors, one), alone.others), (alone.tensors, (("a", 0),)):
        moved = DeltaReport("d", None, 80, 6, 0.1, *needs)
        assert render(moved).endswith("; its base was at an unknown place")


def test_a_report_without_tensors_is_laid_out(run: Run, tmp_path: Path) -> None:
    import safetensors.torch

    safetensors.torch.save_file({}, tmp_path / "none.safetensors")
    done = run("inspect", tmp_path / "none.safetensors")
    assert done.code == 0
    (line,) = done.out.splitlines()
    assert line.startswith("0 tensors in 1 file of ")
    assert line.endswith(", - bits per weight")


# ---- `tpde bench`


def test_a_benchmark_tells_its_sizes_and_runs_each_tensor_once_more_than_it_counts(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In turns: what a round takes is what each of its measurements takes."""
    now, looks = 0.0, itertools.count()
    each = 2 * (5 * 2 + 1)  # looks at the clock: five tensors are encoded and decoded, and bytes copied
    seconds = [100.0, 5.0, 1.0, 2.0, 4.0, 3.0]  # of rounds: the first warms up

    def clock() -> float:
        nonlocal now
        turn, look = divmod(next(looks), each)
        now += seconds[turn] if look % 2 else 0.0
        return now

    monkeypatch.setattr(time, "perf_counter", clock)
    found = json.loads(run("bench", "codec", "--size", "1.0 MiB", "--threads", 2, "--json").out)
    assert next(looks) == 6 * each
    assert (found["tensor_bytes"], found["threads"], found["rounds"]) == (1 << 20, 2, 5)
    assert found["copy_gb_per_s"] == pytest.approx((1 << 20) / 3 / 1e9)
    for it in found["results"]:
        assert it["encode_gb_per_s"] == it["decode_gb_per_s"] == found["copy_gb_per_s"]
        bits = {"BF16": 16, "F16": 16, "F32": 32, "F8_E4M3": 8}[it["dtype"]]
        assert it["codec"] == "prefix"
        assert it["bits_per_weight"] == pytest.approx(bits / it["ratio"])


@pytest.mark.parametrize("size", ["1", "1023KiB", "1025KiB", "1.5MiB", "100MB", "4097MiB", "5GiB"])
def test_a_benchmark_of_no_such_size_is_refused(run: Run, size: str) -> None:
    run("bench", "codec", "--size", size).failed(2, "may have 1.0 MiB to 4.0 GiB, whole MiB", "`64MiB`")
    run("bench", "codec", "--size", "x").failed(2, "`x` is no size", "`16GiB`")


def test_a_benchmark_ends_at_a_wrong_byte_and_copies_every_byte() -> None:
    import numpy as np

    from tpde.cli import bench

    name, spec, words = bench.tensors(1 << 20)[0]
    assert words.size == spec.nbytes == 1 << 20
    case = bench.Case(name, spec, words, 1)
    case.run()
    assert case.stored < words.size
    case._decode = lambda: case.out.fill(0)  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="bf16 did not survive"):
        case.run()
    for threads in (1, 3):
        copy = bench.MemoryCopy(words[: 1000 * threads + 1], threads)
        copy.run()
        assert np.array_equal(copy.out, copy.words)
    noise = np.frombuffer(np.random.default_rng(0).bytes(1 << 16), np.uint8)
    from tpde.format.container import TensorSpec

    plain = bench.Case("noise", TensorSpec("U8", (1 << 16,)), noise, 1)
    for _ in range(2):
        plain.run()
    assert (plain.result()["codec"], plain.result()["ratio"]) == ("plain", 1.0)


def test_synthetic_bfloat16_is_rounded_to_nearest_and_ties_to_even() -> None:
    import numpy as np

    from tpde.cli.bench import bfloat16

    words = np.array([0x3F800000, 0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x3F817FFF], np.uint32)
    assert [hex(it) for it in bfloat16(words.view(np.float32))] == (
        ["0x3f80", "0x3f80", "0x3f82", "0x3f81", "0x3f80", "0x3f81"]
    )


def _options(app: typer.Typer) -> Iterator[tuple[str, str, OptionInfo]]:
    """All of a command line's: the command's function, the parameter, and what it is told of."""
    for group in app.registered_groups:
        assert group.typer_instance is not None
        yield from _options(group.typer_instance)
    for command in app.registered_commands:
        assert command.callback is not None
        for name, hint in get_type_hints(command.callback, include_extras=True).items():
            for told in getattr(hint, "__metadata__", ()):
                if isinstance(told, OptionInfo):
                    yield command.callback.__name__, name, told


def test_options_have_names_of_their_own() -> None:
    """typer 0.27 calls an option by its metavar if it has one and no name: `--SIZE` instead of `--vram`."""
    found = list(_options(cli.app))
    assert len(found) > 60
    unnamed = [(command, name) for command, name, told in found if told.metavar and told.default is ...]
    assert not unnamed
    named = [told.default for _, _, told in found if told.metavar]
    assert named
    assert all(str(it).startswith("-") for it in named)
