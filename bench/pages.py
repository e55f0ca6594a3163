"""Output of the figures: a table on the terminal, tables and plots in docs/."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure as Drawing
from rich.table import Table

from bench.figures import Figure, read

DOCS = Path(__file__).parent.parent / "docs"
BEGIN, END = "<!-- figures -->", "<!-- /figures -->"
_MET = {True: "yes", False: "no"}
_GROWTH = "append p50 with "


def table(figures: Sequence[Figure]) -> Table:
    """Return the figures as a table for the terminal."""
    shown = Table("figure", "value", "reference", "ratio", "goal", "met")
    for one in figures:
        style = "green" if one.met else "red"
        shown.add_row(*_cells(one), f"[{style}]{_MET[one.met]}[/]")
    return shown


def write_docs(results: Path) -> None:
    """Replace the table in docs/explanation/performance.md, and the plots."""
    figures = [Figure(**one) for one in read(results)]  # type: ignore[arg-type]
    lines = ["| figure | value | reference | ratio | goal | met |", "|---|---:|---:|---:|---|---|"]
    lines += [f"| {' | '.join((*_cells(one), _MET[one.met]))} |" for one in figures]
    replace_part(DOCS / "explanation" / "performance.md", "\n".join(lines))
    _plot_growth(figures)
    _plot_ratios(figures)


def replace_part(page: Path, text: str) -> None:
    """Replace the part of a page between the marks of the figures."""
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin and end, f"{page} has no {BEGIN} ... {END}"
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


def _cells(one: Figure) -> tuple[str, ...]:
    return (
        one.name,
        f"{_number(one.value)} {one.unit}",
        "" if one.reference is None else f"{_number(one.reference)} {one.unit}",
        "" if one.ratio is None else f"{one.ratio:.2f}",
        one.goal,
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _plot_growth(figures: Sequence[Figure]) -> None:
    points = {
        int(one.name.removeprefix(_GROWTH).split()[0].replace(",", "")): one.value
        for one in figures
        if one.name.startswith(_GROWTH)
    }
    if not points:
        return
    counts, values = list(points), list(points.values())
    drawing = Drawing(figsize=(7, 3.5), layout="constrained")
    axes = drawing.subplots()
    axes.plot(counts, values, marker="o")
    axes.axhline(2 * values[0], linestyle="--", color="grey", label="goal: twice that of one queue")
    axes.set(xscale="log", xlabel="queues", ylabel="append p50, µs", ylim=(0, 2.4 * values[0]))
    axes.legend(loc="lower right")
    drawing.savefig(_images() / "append-growth.png", dpi=120)


def _plot_ratios(figures: Sequence[Figure]) -> None:
    shown = [one for one in figures if one.goal.startswith("≥") and "of reference" in one.goal]
    if not shown:
        return
    drawing = Drawing(figsize=(9, 0.5 * len(shown) + 1), layout="constrained")
    axes = drawing.subplots()
    colours = ["tab:green" if one.met else "tab:red" for one in shown]
    bars = axes.barh([one.name for one in shown], [one.ratio or 0 for one in shown], color=colours)
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.axvline(1, color="black", linewidth=1)
    axes.invert_yaxis()
    axes.set(xlabel="ratio to the reference of the same run; green: goal met", xlim=(0, 1.3))
    drawing.savefig(_images() / "ratios.png", dpi=120)


def _images() -> Path:
    folder = DOCS / "images"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
