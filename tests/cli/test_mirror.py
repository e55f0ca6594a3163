"""Goal: --to names a context or an address, and says what is wrong before a cluster is asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.baton import baton


@pytest.mark.parametrize(
    ("to", "problem"),
    [
        ("nowhere", "context 'nowhere' does not exist; existing: bare"),
        ("bare", "context bare has no nameserver"),
    ],
)
def test_other_cluster_that_is_not_named_well_is_an_error(
    tmp_path: Path, to: str, problem: str
) -> None:
    config = tmp_path / "config.toml"
    config.write_text('[contexts.bare]\nby = "ann"\n')
    for command in ("run", "status"):
        made = baton("--config", str(config), "mirror", command, "orders", "--to", to)
        assert made.code == 1
        assert problem in made.err
        assert "INVALID_ARGUMENT" in made.err


def test_topic_and_other_cluster_are_required() -> None:
    assert "--to" in baton("mirror", "run", "orders").err
    assert "TOPIC" in baton("mirror", "run", "--to", "other").err
