"""Goal: the rules file is validated as a whole, and gives the rules of every group and topic.

Method: files written to a folder and read; no Spark.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from batonmq._process.config import ConfigError
from batonspark.alert_rules import RuleBook, load_rules


def written(folder: Path, text: str) -> Path:
    path = folder / "rules.yaml"
    path.write_text(text)
    return path


def test_missing_path_and_empty_file_give_the_default_rules(tmp_path: Path) -> None:
    assert load_rules(None) == RuleBook()
    assert load_rules(written(tmp_path, "")) == RuleBook()


def test_omitted_value_keeps_its_default(tmp_path: Path) -> None:
    book = load_rules(written(tmp_path, "lag: {samples: 3}\nsteals: {count_max: 2}\n"))
    assert book.lag.samples == 3
    assert book.lag.clear_samples == RuleBook().lag.clear_samples
    assert (book.steals.count_max, book.steals.window_ms) == (2, 300_000)


def test_every_problem_is_reported_with_its_path(tmp_path: Path) -> None:
    path = written(tmp_path, "lag: {sample: 3}\nsteals: {count_max: -1}\nlatency: [{}]\n")
    with pytest.raises(ConfigError) as raised:
        load_rules(path)
    places = {problem.source for problem in raised.value.problems}
    assert {f"{path}: lag.sample", f"{path}: steals.count_max"} <= places
    assert f"{path}: latency.0.operation" in places


@pytest.mark.parametrize("text", ["lag: [", "- a list", "version: 2"])
def test_file_without_rules_is_rejected(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError):
        load_rules(written(tmp_path, text))


def test_missing_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        load_rules(tmp_path / "nowhere.yaml")


def test_later_override_wins_and_keeps_other_values(tmp_path: Path) -> None:
    text = """
    overrides:
      - {group: "billing-*", lag: {age_ms_max: 1000, severity: critical}}
      - {group: "billing-eu", topic: "orders*", lag: {age_ms_max: 50}}
    """
    book = load_rules(written(tmp_path, text))
    assert book.of("shipping", "orders").lag == RuleBook().lag
    assert book.of("billing-us", "orders").lag.age_ms_max == 1000
    eu = book.of("billing-eu", "orders-2").lag
    assert (eu.age_ms_max, eu.severity, eu.samples) == (50, "critical", RuleBook().lag.samples)
    assert book.of("billing-eu", "parcels").lag.age_ms_max == 1000


def test_override_is_checked_when_the_file_is_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="overrides"):
        load_rules(written(tmp_path, "overrides: [{lag: {samples: 0}}]"))
    with pytest.raises(ConfigError, match="only lag"):
        load_rules(written(tmp_path, "overrides: [{topic: x, steals: {count_max: 1}}]"))
