"""The plot of a run: messages that wait to be handled, and the injected faults."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from tools.faults.history import History
from tools.faults.report import unseen


def draw(history: History, title: str, path: Path) -> None:
    """Write the plot to `path`."""
    points = unseen(history)
    drawing = Figure(figsize=(12, 4.5), layout="constrained")
    axes = drawing.subplots()
    axes.plot([at_ms / 1000 for at_ms, _ in points], [count for _, count in points], linewidth=1)
    for fault in history.faults:
        begin_s = (fault.begin_us - history.begin_us) / 1e6
        end_s = ((fault.end_us or history.end_us) - history.begin_us) / 1e6
        axes.axvspan(begin_s, end_s, color="tab:red", alpha=0.2)
        axes.text(
            begin_s, 0.98, fault.what, rotation=90, fontsize=6, va="top",
            transform=axes.get_xaxis_transform(),
        )  # fmt: skip
    axes.set(xlabel="seconds", ylabel="messages with a receipt, not handled yet", title=title)
    axes.set_ylim(bottom=0)
    drawing.savefig(path, dpi=120)
