"""A picture of what `inspect` found: ratio by tensor, and the histogram of symbols."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import TYPE_CHECKING

from tpde.errors import InvalidDestination, MissingDependency
from tpde.files.destinations import refuse_inside_packed, refuse_sources
from tpde.files.inspection_report import Histogram, Report, TensorReport
from tpde.io.committed import committed
from tpde.io.sinks import FileSink, refuse_file, require_writable, unwritable

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_TENSORS = 400
MAX_ROWS = 100  # of one column
MAX_HISTOGRAMS = 4
MAX_LABEL = 49  # characters
SUFFIX = ".png"
SIGNATURE = b"\x89PNG\r\n\x1a\n"  # of a PNG file

# Told apart by readers who see colours differently (Okabe and Ito's palette).
COLOURS = {"prefix": "#0072B2", "zstd": "#E69F00", "constant": "#007A5A", "plain": "#C4C4C4"}
OTHER = "#9E6B90"  # a codec that is not among these
ON_DARK = ("prefix", "constant")
INK, FAINT = "#222222", "#D8D8D8"

# Bits of the exponent that the symbol holds, and its bias. F64 has 11 bits, of which the symbol has 8.
_EXPONENTS = {
    "BF16": (8, 127),
    "F32": (8, 127),
    "C64": (8, 127),
    "F16": (5, 15),
    "F8_E5M2": (5, 15),
    "F8_E4M3": (4, 7),
    "F8_E5M2FNUZ": (5, 16),
    "F8_E4M3FNUZ": (4, 8),
}


def plot(report: Report, path: str | os.PathLike[str]) -> None:
    """Draw a report into a PNG file: ratio by tensor and, if the report has one, the symbol histogram.

    Parameters
    ----------
    report : Report
        What `inspect` gave; with `histogram=True` for the histogram.
    path : path-like
        The file, whose name ends in `.png`. An existing picture is replaced when the new one
        is complete, other files never.

    Raises
    ------
    MissingDependency
        If matplotlib is not installed.
    InvalidDestination
        If the file cannot be written, or is none that may be replaced.
    OSError
        If writing failed.

    Notes
    -----
    Of more than 400 tensors the largest 400 are drawn.

    Examples
    --------
    >>> from tpde.files.inspection import inspect
    >>> from tpde.files.plot import plot
    >>> plot(inspect("packed.safetensors", histogram=True), "packed.png")  # doctest: +SKIP
    """
    out, drawn = Path(path), io.BytesIO()
    _refuse(out, report)
    draw(report).savefig(drawn, format="png")
    with committed(FileSink(out, force=True)) as sink:
        sink.write(0, [drawn.getbuffer()])


def _refuse(path: Path, report: Report) -> None:
    """Refuse a place where no picture can be, or where something else is."""
    require_writable(path)
    refuse_sources(path, report.path, *(Path(report.path) / name for name in report.files))
    refuse_inside_packed(path)
    if refuse_file(path, force=True) is not None and not _is_png(path):
        raise InvalidDestination(
            f"`{path}` exists already and is no PNG file, and a picture replaces nothing else",
            hint="remove it, or choose another file",
            where=str(path),
        )
    if path.suffix.lower() != SUFFIX:
        raise InvalidDestination(
            f"`{path}` is not the name of a PNG file, which a picture is",
            hint=f"name it `{path.with_suffix(SUFFIX)}`",
            where=str(path),
        )


def _is_png(path: Path) -> bool:
    """Whether a path leads to a PNG file."""
    if not path.is_file():  # a link to a pipe, which would be waited for, or to nothing
        return False
    try:
        with open(path, "rb") as file:
            return file.read(len(SIGNATURE)) == SIGNATURE
    except OSError as error:
        raise unwritable(path, error) from error


def draw(report: Report) -> Figure:
    """Draw a report.

    Raises
    ------
    MissingDependency
        If matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingDependency("drawing needs matplotlib", hint='run `pip install "tpde[plot]"`') from None

    tensors = _largest(report.tensors)
    columns = max(1, -(-len(tensors) // MAX_ROWS))
    rows = max(1, -(-len(tensors) // columns))
    histograms = _drawn(report.histogram or ())
    # Inches. A row holds a label of 6 points; few rows get thicker ones.
    top, gap = 0.95, 0.65
    bars = max(1.0, rows * (0.135 if rows > 25 else 0.22))
    below = 2.3 if histograms else 0.0
    height = top + bars + 0.6 + (gap + below if histograms else 0)
    width = max(9.0, 5.6 * columns)
    figure = Figure(figsize=(width, height), dpi=140, facecolor="white")
    FigureCanvasAgg(figure)
    left, inner = 2.75 / width, (width - 0.45) / width
    # A few integers shrink eightfold, constants a thousandfold: they must not squeeze all other bars.
    limit = 1.04 * min(max([1.0, *(t.ratio for t in tensors)]), 1.5 * max(report.ratio, 1.0))
    for i in range(columns):
        part = tensors[i * rows : (i + 1) * rows]
        begin = i * inner / columns + left
        axes = figure.add_axes((begin, (height - top - bars) / height, inner / columns - left, bars / height))
        _draw_ratios(axes, part, rows, limit, report.ratio)
    _draw_title(figure, report, tensors, height, width)
    if histograms:
        each = inner / len(histograms)
        margin = 0.75 / width
        for i, histogram in enumerate(histograms):
            box = (i * each + margin, 0.5 / height, each - margin, (below - 0.1) / height)
            _draw_histogram(figure.add_axes(box), histogram)
    return figure


def _largest(tensors: tuple[TensorReport, ...]) -> list[TensorReport]:
    if len(tensors) <= MAX_TENSORS:
        return list(tensors)
    ranked = sorted(range(len(tensors)), key=lambda i: -tensors[i].source_bytes)
    return [tensors[i] for i in sorted(ranked[:MAX_TENSORS])]


def _drawn(histograms: tuple[Histogram, ...]) -> list[Histogram]:
    """The histograms that hold most; a dtype of a few words among many says nothing."""
    total = sum(sum(h.counts) for h in histograms)
    ranked = sorted((h for h in histograms if sum(h.counts) > total / 100), key=lambda h: -sum(h.counts))
    return ranked[:MAX_HISTOGRAMS]


def _label(name: str) -> str:
    """Shorten a name at its start, which names share, and take no dollar sign for a formula."""
    # matplotlib's own font has Latin, Greek and Cyrillic; what it lacks would be a warning and a box.
    name = "".join(c if c.isprintable() and ord(c) < 0x530 else "?" for c in name)
    if len(name) > MAX_LABEL:
        name = "…" + name[1 - MAX_LABEL :]
    return name.replace("$", r"\$")


def _tidy(axes: Axes) -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.tick_params(length=0, labelsize=7, colors=INK)
    axes.set_axisbelow(True)


def _draw_ratios(axes: Axes, tensors: list[TensorReport], rows: int, limit: float, total: float) -> None:
    size = 6 if rows > 25 else 7.5
    places = range(len(tensors))
    widths = [min(t.ratio, limit) for t in tensors]
    axes.barh(places, widths, height=0.76, color=[COLOURS.get(t.codec, OTHER) for t in tensors])
    for i, tensor in enumerate(tensors):
        # Not tick labels: hundreds of ticks take seconds.
        name = _label(tensor.name)
        axes.text(-limit * 0.015, i, name, va="center", ha="right", fontsize=size, color=INK)
        text = f"{tensor.ratio:.3f}" if tensor.ratio < 100 else f"{tensor.ratio:,.0f}"
        ink = "white" if tensor.codec in ON_DARK else INK
        axes.text(limit * 0.008, i, text, va="center", ha="left", fontsize=size, color=ink)
        if tensor.ratio > limit:
            axes.text(limit * 0.992, i, "→", va="center", ha="right", fontsize=size, color=ink)
    axes.axvline(total, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.set_yticks([])
    axes.set_ylim(rows - 0.4, -0.6)
    axes.set_xlim(0, limit)
    axes.xaxis.grid(True, color=FAINT, linewidth=0.6)
    _tidy(axes)
    axes.set_xlabel("ratio: source bytes over stored bytes", fontsize=7, color=INK)


def _draw_title(
    figure: Figure, report: Report, drawn: list[TensorReport], height: float, width: float
) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    tensors = len(report.tensors)
    count = f"{tensors} tensor{'s' if tensors != 1 else ''}"
    if len(drawn) < tensors:
        count = f"the largest {len(drawn)} of {count}"
    bits = f", {report.bits_per_weight:.2f} bits per weight" if report.bits_per_weight is not None else ""
    title = _label(os.path.basename(os.path.normpath(report.path)))
    figure.text(0.2 / width, 1 - 0.3 / height, title, fontsize=12, color=INK, weight="bold")
    line = (
        f"{count}, {report.source_bytes / 2**20:,.1f} MiB stored in {report.stored_bytes / 2**20:,.1f} MiB: "
        f"ratio {report.ratio:.4f}{bits}"
    )
    figure.text(0.2 / width, 1 - 0.52 / height, line, fontsize=8.5, color=INK)
    there = {t.codec for t in drawn}
    used = [c for c in COLOURS if c in there] + sorted(there.difference(COLOURS))
    handles: list[Artist] = [Patch(color=COLOURS.get(c, OTHER), label=c) for c in used]
    handles.append(Line2D([], [], color=INK, linewidth=0.8, linestyle=(0, (4, 3)), label="all tensors"))
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0.14 / width, 1 - 0.58 / height),
        ncols=len(handles),
        fontsize=7.5,
        frameon=False,
        handlelength=1.6,
        borderpad=0.2,
        columnspacing=1.4,
    )


def _draw_histogram(axes: Axes, histogram: Histogram) -> None:
    """Shares of exponents for floating-point dtypes, of bytes otherwise."""
    from matplotlib.ticker import MaxNLocator

    counts, total = histogram.counts, sum(histogram.counts)
    if histogram.dtype in _EXPONENTS:
        bits, bias = _EXPONENTS[histogram.dtype]
        step = 1 << (8 - bits)
        shares = [sum(counts[i : i + step]) / total for i in range(0, 256, step)]
        first, what = -bias, "exponent (power of two)"
    else:
        shares, first = [c / total for c in counts], 0
        what = "highest bits of the exponent" if histogram.dtype == "F64" else "highest byte of a word"
    used = [i for i, share in enumerate(shares) if share >= 1e-4]
    low, high = used[0], used[-1]
    outside = 1 - sum(shares[low : high + 1])
    axes.bar(
        [first + i for i in range(low, high + 1)],
        [100 * share for share in shares[low : high + 1]],
        width=0.86,
        color=COLOURS["prefix"],
    )
    margin = max(1.5, (12 - (high - low)) / 2)  # a single bar is not a wall
    axes.set_xlim(first + low - margin, first + high + margin)
    axes.yaxis.grid(True, color=FAINT, linewidth=0.6)
    _tidy(axes)
    axes.set_title(histogram.dtype, fontsize=9, color=INK, loc="left", weight="bold")
    if outside > 5e-7:
        axes.set_title(f"not shown: {100 * outside:.2g}%", fontsize=7, color=INK, loc="right")
    axes.set_xlabel(what, fontsize=7, color=INK)
    axes.set_ylabel("share of the words sampled, %", fontsize=7, color=INK)
    locator = axes.xaxis.get_major_locator()
    assert isinstance(locator, MaxNLocator)  # as of every axis that is not told otherwise
    locator.set_params(integer=True)
