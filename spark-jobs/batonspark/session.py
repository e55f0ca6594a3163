"""Spark sessions as the jobs need them."""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import SparkSession

from batonspark.jvm import ensure_java, ensure_python
from batonspark.sink_delta import DeltaDataSource
from batonspark.source import BatonDataSource

SHUFFLE_PARTITIONS = 4
"""Fixed by the first checkpoint of a stateful query: more than cores would be of no use here."""
_STATE_STORE = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
_DEFAULTS: Mapping[str, str] = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": str(SHUFFLE_PARTITIONS),
    "spark.sql.streaming.stateStore.providerClass": _STATE_STORE,
    # Else Spark measures all columns after every row that it hands to Python: with maps and lists
    # that is most of what a write costs. The number of rows bounds a batch: bodies have 256 KiB.
    "spark.sql.execution.arrow.maxBytesPerBatch": str(2**31 - 1),
    "spark.sql.execution.arrow.maxRecordsPerBatch": "1000",
    "spark.sql.streaming.metricsEnabled": "true",
    "spark.sql.streaming.minBatchesToRetain": "20",
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}
_LOCAL: Mapping[str, str] = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}


def build_session(
    name: str, master: str = "local[*]", config: Mapping[str, str] | None = None
) -> SparkSession:
    """A session in which `format("baton")` and `format("batondelta")` are known.

    The package has to be installed wherever executors run: nothing is shipped to them.

    Args:
        master: `local[*]`, `k8s://...`, or any other that Spark knows.
        config: Spark's settings; they win over those that are made here.

    Raises:
        NoJava: there is no Java.
    """
    ensure_java()
    ensure_python()
    settings = dict(_DEFAULTS)
    if master.startswith("local"):
        settings |= _LOCAL
    settings |= config or {}
    builder = SparkSession.builder.appName(name).master(master)
    for key, value in settings.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    register(session)
    return session


def register(session: SparkSession) -> None:
    """Make the two formats known in a session that was built elsewhere."""
    session.dataSource.register(BatonDataSource)
    session.dataSource.register(DeltaDataSource)
