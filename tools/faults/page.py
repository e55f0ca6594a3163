"""Markdown pages from the reports of fault runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.faults.report import RECOVERIES

_INTRODUCTION = "Results of `make faults`; see [testing.md](../testing.md#faults).\n\n"
_RECOVERY = """
## Recovery times

Seconds, median and maximum, by service and fault. *sends* and *handling* count from the start of
the fault to the end of the last gap of more than one second in which a queue had no message stored,
or handled. *in sync* counts from the end of the fault until all processes serve and all replicas
are in sync.

"""


def write_page(reports: Sequence[Path], folder: Path) -> Path:
    """Write `<name>.md` and copy the plot for each report; update the list in `README.md`.

    Args:
        reports: `<name>.json`, with `<name>.png` beside it.

    Returns:
        Path of the list.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in reports:
        report = json.loads(path.read_text())
        (folder / f"{path.stem}.md").write_text(_page(report))
        shutil.copy(path, folder / path.name)
        shutil.copy(path.with_suffix(".png"), folder / f"{path.stem}.png")
    rows = [_row(path) for path in sorted(folder.glob("*.json"))]
    head = ("run", "result", "minutes", "faults", "sent: ok, fail, indeterminate", "maximum lag")
    readme = folder / "README.md"
    readme.write_text("# Fault runs\n\n" + _INTRODUCTION + _table(head, rows))
    return readme


def _row(path: Path) -> tuple[str, ...]:
    report = json.loads(path.read_text())
    sends = report["sends"]
    return (
        f"[{path.stem}]({path.stem}.md)",
        _result(report),
        f"{report['duration_ms'] / 60_000:.1f}",
        str(len(report["faults"])),
        f"{sends['ok']:,}, {sends['fail']:,}, {sends['indeterminate']:,}",
        _seconds(report["lag_ms_max"]),
    )


def _flags(report: Mapping[str, Any]) -> dict[str, str]:
    """Return the row about flags; reports of earlier versions have none."""
    if (flags := report.get("flags")) is None:
        return {}
    found = f"{flags['flagged_first_calls']:,} of {flags['first_calls']:,}"
    return {"first handlings flagged `redelivered`": f"{found} ({flags['false_percent']} %)"}


def _page(report: Mapping[str, Any]) -> str:
    name, sends = report["name"], report["sends"]
    parts = [f"# Fault run {name}: {_result(report)}\n\n", f"![unseen messages]({name}.png)\n\n"]
    facts = {
        "run": f"{report['duration_ms'] / 60_000:.1f} minutes, {len(report['faults'])} faults",
        "sent, with a receipt": f"{sends['ok']:,}",
        "rejected": f"{sends['fail']:,}",
        "indeterminate": (
            f"{sends['indeterminate']:,}, {report['indeterminate_stored']:,} were stored"
        ),
        "handled": f"{report['handled']:,}",
        "handled again after an outage of the owner": f"{report['handled_again']:,}",
        **_flags(report),
        "read from the log at the end": f"{report['log_messages']:,}",
        "not handled yet: maximum, at the end": (
            f"{report['unseen_max']:,}, {report['unseen_at_end']:,}"
        ),
        "maximum time from receipt to handled": _seconds(report["lag_ms_max"]),
    }
    parts.append(_table(("", ""), facts.items()))
    for rule, found in report["reasons"].items():
        parts.append(f"\n## Not valid: {rule}, {found['count']} times\n\n")
        parts += [f"- {text}\n" for text in found["texts"]]
    parts.append(_RECOVERY)
    head = ("service", "fault", "times", "sends", "handling", "in sync")
    rows = [
        (service, kind, str(of["count"]), *(_spread(of[one]) for one in RECOVERIES))
        for service, kinds in report["recovery"].items()
        for kind, of in kinds.items()
    ]
    parts.append(_table(head, rows))
    if report["notes"]:
        parts.append("\n## Notes\n\n")
        parts += [f"- {note}\n" for note in report["notes"]]
    return "".join(parts)


def _result(report: Mapping[str, Any]) -> str:
    return "valid" if report["valid"] else "**not valid**"


def _spread(times: Mapping[str, int | None]) -> str:
    return f"{_seconds(times['p50'])}, {_seconds(times['max'])}"


def _seconds(ms: int | None) -> str:
    return "never" if ms is None else f"{ms / 1000:.1f} s"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
