"""A process that runs queries until a test kills it: `stream_child QUERIES-AS-JSON`."""

from __future__ import annotations

import json
import sys

from batonspark.session import build_session
from tests.spark.running_cluster import TEST_CONFIG
from tests.spark.stream_queries import started


def main() -> None:
    """Run queries until killed."""
    session = build_session("child", "local[2]", TEST_CONFIG)
    session.sparkContext.setLogLevel("ERROR")
    for query in json.loads(sys.argv[1]):
        started(session, query, processingTime="0 seconds")
    session.streams.awaitAnyTermination()


if __name__ == "__main__":
    main()
