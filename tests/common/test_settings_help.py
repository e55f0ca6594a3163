"""Goal: the help shows the meaning, the value and the source of a setting, valid or not.

Method: settings of a fictional service, with files and environments of the test.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from batonmq._process.config import Settings
from batonmq._process.settings_help import settings_help


class Lamp(Settings):
    """Settings of a fictional service."""

    node_id: str
    """Its name."""
    warm_ms: int = Field(60, ge=1, le=1_000)
    """How long it takes,
    at most."""


def test_source_is_environment_file_or_default(tmp_path: Path) -> None:
    file = tmp_path / "lamp.toml"
    file.write_text('node_id = "file"\nlog_level = "DEBUG"\n')
    env = {"BATON_LAMP_CONFIG_FILE": str(file), "BATON_LAMP_NODE_ID": "env", "OTHER": "x"}
    settings, problems = settings_help(Lamp, "BATON_LAMP", env)
    by_name = {setting.name: setting for setting in settings}
    assert problems == ()
    assert (by_name["node_id"].value, by_name["node_id"].source) == ("env", "environment")
    assert (by_name["log_level"].value, by_name["log_level"].source) == ("DEBUG", str(file))
    warm = by_name["warm_ms"]
    assert (warm.variable, warm.value, warm.source) == ("BATON_LAMP_WARM_MS", "60", "default")
    assert (warm.unit, warm.allowed) == ("ms", "≥ 1, ≤ 1,000")
    assert warm.meaning == "How long it takes, at most."


def test_all_problems_are_reported_together() -> None:
    settings, problems = settings_help(
        Lamp, "BATON_LAMP", {"BATON_LAMP_WARM_MS": "0", "BATON_LAMP_X": ""}
    )
    assert [problem.source for problem in problems] == [
        "BATON_LAMP_X", "BATON_LAMP_NODE_ID", "BATON_LAMP_WARM_MS",
    ]  # fmt: skip
    by_name = {setting.name: setting for setting in settings}
    assert (by_name["node_id"].value, by_name["node_id"].default, by_name["node_id"].source) == (
        None, None, "",
    )  # fmt: skip
    assert (by_name["warm_ms"].value, by_name["warm_ms"].source) == ("0", "environment")


def test_file_that_cannot_be_read_is_a_problem(tmp_path: Path) -> None:
    env = {"BATON_LAMP_CONFIG_FILE": str(tmp_path / "absent.toml")}
    settings, problems = settings_help(Lamp, "BATON_LAMP", env)
    assert [problem.source for problem in problems] == ["BATON_LAMP_CONFIG_FILE"]
    assert {setting.source for setting in settings} == {"default", ""}
