"""One Spark session and one cluster for all tests of Spark: each takes seconds to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from batonspark.session import build_session
from tests.spark.running_cluster import TEST_CONFIG, RunningCluster

TIMEOUT_S = 600
"""Long, because a test that times out leaves the session unusable for the other tests."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the tests of Spark a longer timeout, unless they have one of their own."""
    for item in items:
        if item.get_closest_marker("spark") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """Start a session on two cores with the formats of BatonMQ."""
    folder = tmp_path_factory.mktemp("spark")
    config = TEST_CONFIG | {
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.local.dir": str(folder / "local"),
    }
    session = build_session("tests", "local[2]", config)
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """Start a cluster with two brokers that all tests share; each test uses its own topics."""
    with RunningCluster(tmp_path_factory.mktemp("cluster"), brokers=2) as running:
        yield running
