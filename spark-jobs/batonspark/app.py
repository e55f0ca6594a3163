"""Run a job as a process: settings, session, queries, signals, exit status.

Exit status 0: SIGTERM, SIGINT, or the work is complete. 1: a query failed; when the supervisor
restarts the process, it continues at the checkpoint. 2: the settings are not valid.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from prometheus_client import CollectorRegistry, start_http_server
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from batonmq._process import logs
from batonmq._process.config import ConfigError, load
from batonspark.alert_writer import AlertGauges
from batonspark.compaction import compact_regularly
from batonspark.jvm import use_utc
from batonspark.progress import ProgressListener
from batonspark.queries import QUERIES, QueryContext
from batonspark.session import build_session
from batonspark.settings import PREFIX, JobSettings

log = logging.getLogger(__name__)

START_ATTEMPTS_MAX = 3
_POLL_S = 0.5


def run(*names: str) -> NoReturn:
    """Run streaming queries in one session until SIGTERM, or until one ends.

    Args:
        names: Keys of `QUERIES`. A query starts after the query that writes its input table.
    """
    refuse_arguments()
    run_job("+".join(names), lambda settings, ended: _stream(names, settings, ended))


def refuse_arguments() -> None:
    """End the process if it has arguments: a job has settings only.

    Without this, `--help` would start a second process on the checkpoints of the first one.
    """
    if arguments := sys.argv[1:]:
        program = f"batonspark.jobs.{Path(sys.argv[0]).stem}"
        usage = f"usage: python -m {program}; settings: {PREFIX}_*, see docs/reference/spark.md"
        asked = arguments in (["-h"], ["--help"])
        print(usage, file=sys.stdout if asked else sys.stderr)
        sys.exit(0 if asked else 2)


def run_job(name: str, job: Callable[[JobSettings, threading.Event], bool]) -> NoReturn:
    """Run a job in this process, whose times are UTC.

    Args:
        job: Takes the settings and an event that is set when the process has to stop; returns
            whether it succeeded.
    """
    try:
        settings = load(JobSettings, PREFIX)
    except ConfigError as error:
        sys.stderr.write(f"{name}: {error}\n")
        sys.exit(2)
    use_utc()
    logs.configure(settings.log_level, settings.log_format, service="spark", job=name)
    logging.getLogger("py4j").setLevel(logging.WARNING)
    ended = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        ended.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    try:
        done = job(settings, ended)
    except ConfigError as error:
        log.critical("process ends error=%s", error)
        sys.exit(2)
    except Exception:
        log.critical("process ends", exc_info=True)
        sys.exit(1)
    sys.exit(0 if done else 1)


@contextmanager
def session(name: str, settings: JobSettings) -> Iterator[SparkSession]:
    """Return a Spark session for a job; it stops when the context ends."""
    built = build_session(f"baton-{name}", settings.master, settings.spark_config)
    built.sparkContext.setLogLevel("WARN")
    try:
        yield built
    finally:
        built.stop()


def _stream(names: Sequence[str], settings: JobSettings, ended: threading.Event) -> bool:
    registry = CollectorRegistry()
    server, thread = start_http_server(settings.metrics_port, settings.metrics_host, registry)
    log.info("metrics served port=%d", server.server_port)
    try:
        with session("-".join(names), settings) as spark:
            spark.streams.addListener(ProgressListener(registry))
            context = QueryContext(spark, settings, AlertGauges(registry))
            queries = [
                _start_query(start, context, ended)
                for name, start in QUERIES.items()
                if name in names and not ended.is_set()
            ]
            if settings.compact_hours:
                work = threading.Thread(
                    target=compact_regularly, args=(settings, ended), name="compaction", daemon=True
                )
                work.start()
            return _wait(queries, ended)
    except Exception:
        if not ended.is_set():
            raise
        # The supervisor has stopped the JVM too; the next start continues at the checkpoints.
        log.warning("Spark ended before its queries were stopped", exc_info=True)
        return True
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _start_query(
    start: Callable[[QueryContext], StreamingQuery], context: QueryContext, ended: threading.Event
) -> StreamingQuery:
    """Start a query and wait for its first progress; start it again if it fails before that.

    A query starts processes to which Spark gives ten seconds; on a busy machine this may be too
    short. For the same reason queries are started one after the other.
    """
    for attempt in range(1, START_ATTEMPTS_MAX + 1):
        query = start(context)
        while query.isActive and query.lastProgress is None and not ended.wait(_POLL_S):
            pass
        if query.exception() is None or query.lastProgress is not None or ended.is_set():
            break
        log.warning("query did not start query=%s attempt=%d", query.name, attempt)
    return query


def _wait(queries: Sequence[StreamingQuery], ended: threading.Event) -> bool:
    """Wait until the process has to stop, a query fails, or all end; return False if one failed.

    A query that fails while the process stops does not count: its JVM may have been stopped too.
    """
    while not ended.wait(_POLL_S):
        running = [query for query in queries if query.isActive]
        failed = [query for query in queries if query.exception() is not None]
        if failed or not running:
            break
    failed = [query for query in queries if query.exception() is not None]
    for query in queries:
        query.stop()
    return ended.is_set() or not failed
