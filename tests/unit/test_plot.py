"""What the picture of a report shows: bars, labels, histograms, and how much of it all."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest

from tpde.errors import InvalidDestination
from tpde.files.inspection_report import Histogram, Report, TensorReport
from tpde.files.plot import COLOURS, OTHER, SIGNATURE, draw, plot

pytest.importorskip("matplotlib", reason="needs matplotlib")

from matplotlib.colors import to_hex
from matplotlib.figure import Figure


def tensor(name: str, ratio: float, codec: str = "prefix", source_bytes: int = 1000) -> TensorReport:
    return TensorReport(name, "x", "BF16", (9,), source_bytes, 10, codec, 8.0, 1.0, ratio)


def report(
    tensors: list[TensorReport],
    ratio: float = 1.5,
    histogram: tuple[Histogram, ...] | None = None,
    **more: Any,
) -> Report:
    values = {"path": "models/it.safetensors", "bits_per_weight": 10.689} | more
    return Report(
        packed=True, files=("x",), file_bytes=5, source_bytes=3 << 20, stored_bytes=1 << 21, ratio=ratio,
        by_codec=(), by_dtype=(), tensors=tuple(tensors), histogram=histogram, **values,
    )  # fmt: skip


@pytest.fixture
def drawn() -> Any:
    """Draw without rendering: gives the figure."""
    return draw


def texts(axes: Any) -> list[str]:
    return [it.get_text() for it in axes.texts]


@pytest.mark.parametrize(
    ("ratios", "total", "limit"),
    [
        ([1.5, 1.2], 1.4, 1.5),
        ([0.5, 0.7], 0.6, 1.0),
        ([8.0, 1.5], 1.6, 2.4),
        ([8.0], 0.5, 1.5),
        ([2.0], 1.0, 1.5),
        ([], 1.0, 1.0),
    ],
)
def test_bars_end_where_few_ratios_would_squeeze_all_others(
    ratios: list[float], total: float, limit: float, drawn: Any
) -> None:
    axes = drawn(report([tensor(f"t{i}", it) for i, it in enumerate(ratios)], total)).axes[0]
    low, high = axes.get_xlim()
    assert low == 0
    assert high == pytest.approx(1.04 * limit)
    assert [it.get_width() for it in axes.patches] == pytest.approx([min(it, high) for it in ratios])
    assert texts(axes).count("→") == sum(it > high for it in ratios)
    (line,) = axes.get_lines()
    assert list(line.get_xdata()) == [total, total]


def test_bars_have_names_ratios_and_the_colours_of_codecs(drawn: Any) -> None:
    ratios = {"prefix": 1.23456, "zstd": 99.9994, "constant": 100.0, "plain": 12345.6, "later": 1.0}
    figure = drawn(report([tensor(f"of {codec}", it, codec) for codec, it in ratios.items()]))
    axes = figure.axes[0]
    found = [it for it in texts(axes) if it != "→"]
    assert found[::2] == [f"of {codec}" for codec in ratios]
    assert found[1::2] == ["1.235", "99.999", "100", "12,346", "1.000"]
    colours = [to_hex(it.get_facecolor()).upper() for it in axes.patches]
    assert colours == [COLOURS.get(codec, OTHER) for codec in ratios]
    assert axes.get_xlabel() == "ratio: source bytes over stored bytes"
    (legend,) = figure.legends
    labels = [it.get_text() for it in legend.get_texts()]
    assert labels == ["prefix", "zstd", "constant", "plain", "later", "all tensors"]
    inks = [
        to_hex(it.get_color()) for it in axes.texts if it.get_text() in ("1.235", "99.999", "100", "1.000")
    ]
    assert inks == ["#ffffff", "#222222", "#ffffff", "#222222"]


@pytest.mark.parametrize(
    ("tensors", "columns", "rows"), [(1, 1, 1), (100, 1, 100), (101, 2, 51), (400, 4, 100)]
)
def test_bars_are_in_columns_of_a_hundred(tensors: int, columns: int, rows: int, drawn: Any) -> None:
    figure = drawn(report([tensor(f"t{i}", 1.5) for i in range(tensors)]))
    assert [len(it.patches) for it in figure.axes] == [rows] * (columns - 1) + [
        tensors - rows * (columns - 1)
    ]
    assert [texts(it)[0] for it in figure.axes] == [f"t{i * rows}" for i in range(columns)]
    assert {it.get_ylim() for it in figure.axes} == {(rows - 0.4, -0.6)}
    assert title(figure)[1].startswith(f"{tensors} tensor")


@pytest.mark.parametrize(
    ("tensors", "histograms", "width", "height"),
    [
        (1, 0, 9.0, 2.55),
        (25, 0, 9.0, 7.05),
        (26, 0, 9.0, 5.06),
        (101, 0, 11.2, 8.435),
        (1, 1, 9.0, 5.5),
        (1, 4, 9.0, 5.5),
    ],
)
def test_pictures_are_as_large_as_what_they_show(
    tensors: int, histograms: int, width: float, height: float, drawn: Any
) -> None:
    made = tuple(Histogram(str(i), (9,) * 256) for i in range(histograms))
    figure = drawn(report([tensor(f"t{i}", 1.5) for i in range(tensors)], histogram=made))
    assert list(figure.get_size_inches()) == pytest.approx([width, height])
    boxes = [it.get_position() for it in figure.axes]
    for box in boxes:
        assert 0 <= box.x0 < box.x1 <= 1
        assert 0 <= box.y0 < box.y1 <= 1
    columns = boxes[: len(boxes) - histograms]
    edges = [0.0, *(it.x1 for it in columns)]
    rooms = [(it.x0 - edge) * width for it, edge in zip(columns, edges, strict=False)]
    assert rooms == pytest.approx([2.75] * len(columns))  # inches for the names
    for one, other in itertools.pairwise(boxes):
        assert one.x1 <= other.x0 or other.y1 <= one.y0  # beside each other, or below


def title(figure: Figure) -> list[str]:
    return [it.get_text() for it in figure.texts]


def test_the_title_says_what_there_is(drawn: Any) -> None:
    assert title(drawn(report([tensor("a", 1.5)]))) == [
        "it.safetensors",
        "1 tensor, 3.0 MiB stored in 2.0 MiB: ratio 1.5000, 10.69 bits per weight",
    ]
    figure = drawn(report([tensor("a", 1.5)]))
    heights = [(1 - it.get_position()[1]) * figure.get_size_inches()[1] for it in figure.texts]
    assert heights == pytest.approx([0.3, 0.52])
    assert figure.axes[0].get_position().y1 * figure.get_size_inches()[1] == pytest.approx(2.55 - 0.95)
    made = report([tensor("a", 1.5)] * 2, path="models/some/", bits_per_weight=None)
    assert title(drawn(made)) == ["some", "2 tensors, 3.0 MiB stored in 2.0 MiB: ratio 1.5000"]


def test_of_very_many_tensors_the_largest_are_drawn_in_their_order(drawn: Any) -> None:
    made = [tensor(f"t{i}", 1.5, source_bytes=(i * 7) % 401) for i in range(401)]
    figure = drawn(report(made))
    assert title(figure)[1].startswith("the largest 400 of 401 tensors, ")
    names = [it for axes in figure.axes for it in texts(axes)[::2]]
    assert names == [it.name for it in made if it.source_bytes]


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("a" * 49, "a" * 49),
        ("a" + "b" * 49, "…" + "b" * 48),
        ("größe", "größe"),
        ("\u0416\u03a9", "\u0416\u03a9"),
        ("\u052f\u0530\u91cd\n\x1b", "\u052f????"),
        ("$x$", r"\$x\$"),
        ("$" * 50, "…" + r"\$" * 48),
    ],
)
def test_labels_are_short_and_plain(name: str, label: str, drawn: Any) -> None:
    assert texts(drawn(report([tensor(name, 1.5)])).axes[0])[0] == label


# ---- histograms


def histogram(dtype: str, **counts: int) -> Histogram:
    """Give counts by symbol: `s127=5`."""
    made = [0] * 256
    for key, count in counts.items():
        made[int(key[1:])] = count
    return Histogram(dtype, tuple(made))


def bars(axes: Any) -> dict[float, float]:
    """Heights by the place of their middle."""
    return {
        round(it.get_x() + it.get_width() / 2, 6): round(it.get_height(), 6)
        for it in axes.patches
        if it.get_height()
    }


@pytest.mark.parametrize(
    ("dtype", "counts", "found", "label"),
    [
        ("BF16", {"s127": 3, "s120": 1}, {0: 75, -7: 25}, "exponent (power of two)"),
        ("F32", {"s0": 1, "s255": 1}, {-127: 50, 128: 50}, "exponent (power of two)"),
        ("F16", {"s120": 1, "s127": 1, "s128": 2}, {0: 50, 1: 50}, "exponent (power of two)"),
        ("F8_E5M2", {"s0": 1, "s255": 3}, {-15: 25, 16: 75}, "exponent (power of two)"),
        ("F8_E4M3", {"s112": 1, "s127": 1}, {0: 100}, "exponent (power of two)"),
        ("F8_E5M2FNUZ", {"s128": 1}, {0: 100}, "exponent (power of two)"),
        ("F8_E4M3FNUZ", {"s128": 1}, {0: 100}, "exponent (power of two)"),
        ("U8", {"s3": 1, "s200": 4}, {3: 20, 200: 80}, "highest byte of a word"),
        ("F64", {"s63": 1}, {63: 100}, "highest bits of the exponent"),
    ],
)
def test_histograms_show_exponents_or_bytes(
    dtype: str, counts: dict[str, int], found: dict[float, float], label: str, drawn: Any
) -> None:
    axes = drawn(report([tensor("a", 1.5)], histogram=(histogram(dtype, **counts),))).axes[1]
    assert bars(axes) == found
    assert axes.get_xlabel() == label
    assert axes.get_ylabel() == "share of the words sampled, %"
    assert axes.get_title(loc="left") == dtype
    assert axes.get_title(loc="right") == ""
    low, high = min(found), max(found)
    margin = max(1.5, (12 - (high - low)) / 2)
    assert axes.get_xlim() == pytest.approx((low - margin, high + margin))


@pytest.mark.parametrize(
    ("rare", "shown", "says"),
    [(1000, True, ""), (999, False, "not shown: 0.01%"), (6, False, "not shown: 6e-05%"), (4, False, "")],
)
def test_what_is_rare_at_the_ends_is_not_shown_and_told(
    rare: int, shown: bool, says: str, drawn: Any
) -> None:
    made = histogram("U8", s10=5_000_000, s20=5_000_000 - rare, s30=rare)
    axes = drawn(report([tensor("a", 1.5)], histogram=(made,))).axes[1]
    assert (30 in bars(axes)) is shown
    assert axes.get_title(loc="right") == says


def test_the_histograms_that_hold_most_are_shown(drawn: Any) -> None:
    sizes = {"A": 30, "B": 10, "C": 500, "D": 11, "E": 400, "F": 49}
    made = tuple(histogram(name, s5=size) for name, size in sizes.items())
    figure = drawn(report([tensor("a", 1.5)], histogram=made))
    assert [it.get_title(loc="left") for it in figure.axes[1:]] == ["C", "E", "F", "A"]
    made = tuple(histogram(name, s5=size) for name, size in {"A": 1, "B": 99, "C": 0}.items())
    figure = drawn(report([tensor("a", 1.5)], histogram=made))
    assert [it.get_title(loc="left") for it in figure.axes[1:]] == ["B"]  # A has no more than a hundredth
    made = tuple(histogram(name, s5=size) for name, size in {"A": 2, "B": 99}.items())
    figure = drawn(report([tensor("a", 1.5)], histogram=made))
    assert [it.get_title(loc="left") for it in figure.axes[1:]] == ["B", "A"]


def test_a_place_where_no_picture_can_be_is_told(tmp_path: Path) -> None:
    for path in (tmp_path / "none" / "x.png", tmp_path):
        with pytest.raises(InvalidDestination, match=r"cannot be written: (No such file|Is a dir)") as told:
            plot(report([tensor("a", 1.5)]), path)
        assert told.value.where == str(path)


@pytest.mark.parametrize("name", ["a.jpg", "a", "png"])
def test_a_picture_has_no_name_of_another_kind(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidDestination, match=rf"{name}` is not the name of a PNG .* name it .*\.png`$"):
        plot(report([tensor("a", 1.5)]), tmp_path / name)
    assert not list(tmp_path.iterdir())
    plot(report([tensor("a", 1.5)]), tmp_path / "a.PNG")


# ---- what is there already


@pytest.mark.parametrize("content", [b"", b"weights", SIGNATURE[:7]])
@pytest.mark.parametrize("linked", [False, True])
def test_a_picture_replaces_no_other_file(content: bytes, linked: bool, tmp_path: Path) -> None:
    path = there = tmp_path / "x.png"
    if linked:
        there = tmp_path / "theirs"
        path.symlink_to(there)
    there.write_bytes(content)
    with pytest.raises(InvalidDestination, match="is no PNG file") as told:
        plot(report([tensor("a", 1.5)]), path)
    assert told.value.where == str(path)
    assert (there.read_bytes(), path.is_symlink()) == (content, linked)


def test_a_picture_waits_for_no_pipe_and_makes_no_file_of_a_link_to_nothing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "to-pipe").symlink_to("pipe")
    (tmp_path / "to-nothing").symlink_to("nothing")
    for name in ("pipe", "to-pipe", "to-nothing"):
        with pytest.raises(InvalidDestination, match=r"never replaced|is no PNG file"):
            plot(report([tensor("a", 1.5)]), tmp_path / name)
    assert sorted(it.name for it in tmp_path.iterdir()) == ["pipe", "to-nothing", "to-pipe"]


def test_a_picture_takes_the_place_of_a_picture_and_of_no_other_name_of_it(tmp_path: Path) -> None:
    old = SIGNATURE + b"old"
    (tmp_path / "theirs").write_bytes(old)
    (tmp_path / "link.png").symlink_to("theirs")
    os.link(tmp_path / "theirs", tmp_path / "hard.png")
    for name in ("link.png", "hard.png", "new.png"):
        plot(report([tensor("a", 1.5)]), tmp_path / name)
        assert not (tmp_path / name).is_symlink()
        assert (tmp_path / name).read_bytes().startswith(SIGNATURE)
    assert (tmp_path / "theirs").read_bytes() == old


def test_a_picture_that_cannot_be_completed_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.png").write_bytes(SIGNATURE)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(OSError, match="No space left on device; nothing was left behind"):
        plot(report([tensor("a", 1.5)]), tmp_path / "x.png")
    assert [it.name for it in tmp_path.iterdir()] == ["x.png"]
    assert (tmp_path / "x.png").read_bytes() == SIGNATURE
