"""Spark sessions with the settings of the jobs."""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import SparkSession

from batonspark.jvm import ensure_java, ensure_python
from batonspark.sink_delta import DeltaDataSource
from batonspark.source import BatonDataSource

SHUFFLE_PARTITIONS = 4
"""Shuffle partitions; the first checkpoint of a stateful query fixes the number."""
_STATE_STORE = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
_DEFAULTS: Mapping[str, str] = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": str(SHUFFLE_PARTITIONS),
    "spark.sql.streaming.stateStore.providerClass": _STATE_STORE,
    # With a limit Spark measures all columns after every row that it passes to Python: with maps
    # and lists that is most of the cost of a write. The number of rows bounds a batch instead.
    "spark.sql.execution.arrow.maxBytesPerBatch": str(2**31 - 1),
    "spark.sql.execution.arrow.maxRecordsPerBatch": "1000",
    "spark.sql.streaming.metricsEnabled": "true",
    "spark.sql.streaming.minBatchesToRetain": "20",
    "spark.sql.python.filterPushdown.enabled": "true",
    # Python workers connect to the JVM within this time, or the query fails; 15 s by default, which
    # is too short on an overloaded node.
    "spark.python.authenticate.socketTimeout": "120s",
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
    """Return a session with the formats `baton` and `batondelta`.

    The package must be installed on every executor: it is not shipped to them.

    Args:
        master: `local[*]`, `k8s://...`, or any other that Spark supports.
        config: Settings of Spark; they override the defaults of the jobs.

    Raises:
        JavaNotFound: there is no Java.
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
    """Register the two formats in a session that was built elsewhere."""
    session.dataSource.register(BatonDataSource)
    session.dataSource.register(DeltaDataSource)
