"""Goal: a whole cluster keeps its promises while leaders die, stand still and are restarted.

Method: a short run of `python -m tests.faults` with faults that are given: what `make faults` draws
at length. See docs/testing.md.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.checker import check
from tests.faults.director import Fault, Strike
from tests.faults.history import Outcome
from tests.faults.member import SPAN_MAX
from tests.faults.run import Plan, play

FAULTS = (
    Fault((Strike("kill", "storage broker-0", 0, 500), Strike("pause", "etcd", 1, 2_000)), 100),
    Fault((Strike("restart", "offsets", 0, 0), Strike("kill", "lockmgr", 1, 500)), 100),
)


@pytest.mark.e2e
@pytest.mark.timeout(120)
async def test_a_short_run_is_valid(tmp_path: Path) -> None:
    said: list[str] = []
    plan = Plan(seed=1, duration_s=60, faults=FAULTS, churns=False)
    history = await play(plan, tmp_path, said.append)
    assert check(history, SPAN_MAX) == [], said
    assert [fault.healed_us is not None for fault in history.faults] == [True] * len(FAULTS)
    assert sum(send.outcome is Outcome.OK for send in history.sends) > 1_000
    assert len(history.samples) > 10
