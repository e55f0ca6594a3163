"""Descriptions of queries that run in this process or in another process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from batonspark.bronze import bronze


class Query(TypedDict):
    """A stream from a topic into a sink, with the options of both; without columns it is bronze."""

    source: Mapping[str, str]
    columns: Sequence[str]
    format: str
    sink: Mapping[str, str]


def started(session: SparkSession, query: Query, **trigger: str | bool) -> StreamingQuery:
    """Start the query; return it."""
    frame = session.readStream.format("baton").options(**query["source"]).load()
    rows = frame.selectExpr(*query["columns"]) if query["columns"] else bronze(frame)
    writer = rows.writeStream.format(query["format"])
    return writer.options(**query["sink"]).trigger(**trigger).start()  # type: ignore[arg-type]


def drain(session: SparkSession, query: Query) -> None:
    """Run the query until it has read everything that exists now."""
    started(session, query, availableNow=True).awaitTermination()


def last_batch(folder: Path) -> int:
    """Return the number of the last micro-batch in a folder of a checkpoint; -1 without one."""
    names = [each.name for each in folder.iterdir()] if folder.exists() else []
    return max((int(name) for name in names if name.isdigit()), default=-1)


def committed(query: Query) -> int:
    """Return the number of the last committed micro-batch; -1 without one."""
    return last_batch(Path(query["sink"]["checkpointLocation"]) / "commits")


def is_in_micro_batch(query: Query) -> bool:
    """Return whether a micro-batch has begun and is not committed."""
    return last_batch(Path(query["sink"]["checkpointLocation"]) / "offsets") > committed(query)
