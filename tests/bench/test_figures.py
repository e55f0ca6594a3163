"""Goal: the table and the files show what was measured, and name what was not.

Method: reports with hand-made values; the comparison of two of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.compare import Change, changes, main
from bench.peers.clients.task import Outcome
from bench.peers.figures import Column, Report, Series, load, markdown, number, save, table
from bench.peers.steps import MEMORY, Measured, Step, add_cost, add_memory, add_speed
from bench.quick import cost_table


def report() -> Report:
    """Return a report of two brokers, of which one has a figure more."""
    ours, other = Column("1", "defaults"), Column("2", "fsync=yes")
    for value in (10.0, 30.0, 20.0):
        ours.add("produce", value, "k msg/s", more_is_better=True)
    other.add("produce", 5.0, "k msg/s", more_is_better=True)
    ours.add("RSS", 369.4, "MiB")
    return Report({"Machine": "2 cores"}, {"BatonMQ": ours, "Kafka": other}, ["NATS: no Go"])


def test_cell_has_the_median_and_the_range_of_the_rounds() -> None:
    assert Series("ms", (3.0, 1.0, 200.0)).cell() == "3.00 (1.00-200)"


def test_cell_of_one_round_has_no_range() -> None:
    assert Series("ms", (3.0,)).cell() == "3.00"


@pytest.mark.parametrize(
    ("value", "text"), [(0.123, "0.12"), (12.34, "12.3"), (123.4, "123"), (1234.5, "1,234")]
)
def test_number_has_about_three_digits(value: float, text: str) -> None:
    assert number(value) == text


def test_figure_that_a_broker_does_not_have_is_an_empty_cell() -> None:
    assert table(report()) == [
        ["work", "unit", "BatonMQ", "Kafka"],
        ["produce", "k msg/s", "20.0 (10.0-30.0)", "5.00"],
        ["RSS", "MiB", "369", ""],
    ]


def test_page_names_versions_settings_and_what_was_not_measured() -> None:
    page = markdown(report())
    assert "| RSS | MiB | 369 |  |" in page
    assert "- Machine: 2 cores" in page
    assert "- Kafka 2: fsync=yes" in page
    assert "- **Not measured**: NATS: no Go" in page


def test_same_failure_of_several_rounds_is_reported_once() -> None:
    shown = Report()
    for failure in ("Kafka: no Java", "NATS: no Go", "Kafka: no Java"):
        shown.add_failure(failure)
    assert shown.failures == ["Kafka: no Java", "NATS: no Go"]


def test_report_in_a_file_is_the_saved_one(tmp_path: Path) -> None:
    save(tmp_path / "a.json", report())
    assert markdown(load(tmp_path / "a.json")) == markdown(report())


def test_file_of_another_form_is_refused(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text("[]")
    with pytest.raises(ValueError, match="not a report"):
        load(tmp_path / "results.json")


# ---- figures of a step


def test_rate_is_messages_per_second_of_the_work() -> None:
    column = Column("", "")
    step = Step("produce", "produce", "t", 100)
    add_speed(column, step, Measured(Outcome(6_000, 2.0), 0, 0))
    assert column.figures["produce"] == Series("k msg/s", (3.0,), more_is_better=True)


def test_delays_have_a_median_and_a_percentile() -> None:
    column = Column("", "")
    step = Step("delay", "handle", "t", 100, "p50, p99")
    delays = [float(number) for number in range(1, 1_000)]
    add_speed(column, step, Measured(Outcome(999, 2.0, delays), 0, 0))
    assert column.figures["delay, p50"].values == (500.0,)
    assert column.figures["delay, p99"].values == (990.0,)


def test_cpu_time_of_servers_and_clients_is_per_million_messages() -> None:
    column = Column("", "")
    step = Step("produce", "produce", "t", 100, cost="produced")
    add_cost(column, step, Measured(Outcome(500_000, 2.0), 0.25, 1.0))
    assert column.figures["CPU per million produced, servers"].values == (0.5,)
    assert column.figures["CPU per million produced, clients"].values == (2.0,)


def test_memory_is_in_mebibytes() -> None:
    column = Column("", "")
    add_memory(column, 3 * 1024 * 1024)
    assert column.figures["RSS of all servers after it"].values == (3.0,)


def test_table_of_costs_has_clients_before_servers() -> None:
    ours = Report(columns={"BatonMQ": Column("1", "")})
    measured = Measured(Outcome(1_000_000, 1.0), server_cpu_s=0.5, client_cpu_s=2.0)
    add_cost(ours.columns["BatonMQ"], MEMORY[0], measured)
    cells = [list(column.cells) for column in cost_table(ours).columns]
    assert cells == [["produce 100 B"], ["2.00"], ["0.50"]]


# ---- comparison


@pytest.mark.parametrize(
    ("after", "more_is_better", "verdict"),
    [
        ((4.0, 5.0), False, "worse"),
        ((4.0, 5.0), True, "better"),
        ((0.5, 0.9), False, "better"),
        ((0.5, 0.9), True, "worse"),
        ((2.0, 9.0), False, "none"),
    ],
)
def test_change_counts_only_beyond_the_spread_of_the_rounds(
    after: tuple[float, ...], more_is_better: bool, verdict: str
) -> None:
    before = Series("s", (1.0, 3.0), more_is_better)
    change = Change("BatonMQ", "x", before, Series("s", after, more_is_better))
    assert change.verdict == verdict


def test_comparison_has_the_common_figures_and_begins_with_cpu_time() -> None:
    before, after = report(), report()
    for one in (before, after):
        one.columns["BatonMQ"].add("CPU per million produced", 1.0, "s")
    del after.columns["Kafka"]
    del after.columns["BatonMQ"].figures["RSS"]
    compared = [(change.broker, change.row) for change in changes(before, after)]
    assert compared == [("BatonMQ", "CPU per million produced"), ("BatonMQ", "produce")]


def test_comparison_without_a_common_figure_fails(tmp_path: Path) -> None:
    save(tmp_path / "a.json", report())
    save(tmp_path / "b.json", Report())
    assert main([str(tmp_path / "a.json"), str(tmp_path / "a.json")]) == 0
    assert main([str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 1
