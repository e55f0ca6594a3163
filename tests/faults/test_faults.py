"""Goal: a whole cluster keeps its promises under every kind of fault.

Method: `python -m tools.faults selection`: as `make faults`, with a fixed list of faults, in about
three minutes. See docs/explanation/testing.md.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.faults.__main__ import play
from tools.faults.network import found_launcher
from tools.faults.selection import selection


@pytest.mark.long
@pytest.mark.e2e
@pytest.mark.timeout(900)
def test_cluster_survives_every_kind_of_fault(tmp_path: Path) -> None:
    status = play("selection", tmp_path)
    report = json.loads((tmp_path / "selection.json").read_text())
    assert report["reasons"] == {}
    assert status == 0
    faults = selection(cuts=bool(found_launcher()))
    assert len(report["faults"]) == len(faults)
    assert all(fault["healed_ms"] is not None for fault in report["faults"])
    assert report["sends"]["ok"] > 1_000
    assert report["log_messages"] >= report["sends"]["ok"]
    assert report["unseen_at_end"] == 0
    assert report["committed_samples"] > 100
