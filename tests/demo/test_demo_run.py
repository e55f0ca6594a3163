"""Goal: the demo succeeds on real processes with a part of the real data set.

Method: a local cluster; the first flights of the year; members join and leave as in the
whole demo.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from batonmq_server.demo.demo_run import CARRIERS, run_demo
from batonmq_server.demo.flights import load_flights
from tests.support.cluster import local_cluster


def test_data_set_is_complete_and_its_ids_are_unique() -> None:
    flights = load_flights()
    assert len(flights) == 336_776
    assert len({flight.flight_id for flight in flights}) == 336_776
    assert flights[0].flight_id == "2013-01-01-UA1545-EWR-0515"
    assert flights[0].row.startswith("2013,1,1,517,515,")


@pytest.mark.e2e
@pytest.mark.timeout(180)
async def test_demo_finds_no_lost_and_no_duplicated_message(tmp_path: Path) -> None:
    flights = load_flights()[:20_000]
    steps: list[str] = []
    async with local_cluster(tmp_path / "cluster") as cluster:
        result = await run_demo(
            cluster.nameserver,
            flights,
            tmp_path / "journals",
            lambda step, done, total: steps.append(step),
            pace=2_500,
        )
    assert result.ok
    assert result.published == result.consumed == 20_000
    assert result.filtered_consumed == sum(f.carrier in CARRIERS for f in flights) > 1_000
    assert result.handovers >= 8
    assert {"publish", "filtered group"} < set(steps)
