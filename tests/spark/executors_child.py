"""A batch read and a batch write on executors of their own: `executors_child OPTIONS PATH`.

Run as a file, from a folder that has nothing of the product: what is not installed is not found.
"""

from __future__ import annotations

import json
import sys

from batonspark.session import build_session


def main() -> None:
    """Copy a topic into a table, and say on how many executors and how many rows there are."""
    options, path = json.loads(sys.argv[1]), sys.argv[2]
    config = {"spark.executor.memory": "512m", "spark.sql.shuffle.partitions": "2"}
    session = build_session("executors", "local-cluster[2,1,512]", config)
    session.sparkContext.setLogLevel("ERROR")
    rows = session.read.format("baton").options(**options).load()
    rows.write.format("batondelta").mode("append").option("path", path).save()
    print("rows", rows.count())
    session.stop()


if __name__ == "__main__":
    main()
