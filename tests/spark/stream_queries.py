"""Queries as tests describe them, to run here or in a process that is killed."""

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
    """The query, running."""
    frame = session.readStream.format("baton").options(**query["source"]).load()
    rows = frame.selectExpr(*query["columns"]) if query["columns"] else bronze(frame)
    writer = rows.writeStream.format(query["format"])
    return writer.options(**query["sink"]).trigger(**trigger).start()  # type: ignore[arg-type]


def drain(session: SparkSession, query: Query) -> None:
    """Run the query until it has what is there now."""
    started(session, query, availableNow=True).awaitTermination()


def last(folder: Path) -> int:
    """Number of the last micro-batch in a folder of a checkpoint; -1 without."""
    names = [each.name for each in folder.iterdir()] if folder.exists() else []
    return max((int(name) for name in names if name.isdigit()), default=-1)


def committed(query: Query) -> int:
    """Number of the last micro-batch that is done; -1 without."""
    return last(Path(query["sink"]["checkpointLocation"]) / "commits")


def is_between(query: Query) -> bool:
    """Whether a micro-batch is begun and not committed."""
    return last(Path(query["sink"]["checkpointLocation"]) / "offsets") > committed(query)
