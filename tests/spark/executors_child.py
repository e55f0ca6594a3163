"""A batch read and a batch write on separate executors: `executors_child OPTIONS PATH CONFIG`.

Run as a file from an empty folder, so that only installed packages can be imported.
"""

from __future__ import annotations

import json
import sys

from batonspark.session import build_session


def main() -> None:
    """Copy a topic into a table, and print the number of rows."""
    options, path, config = json.loads(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    session = build_session("executors", "local-cluster[2,1,512]", config)
    session.sparkContext.setLogLevel("ERROR")
    rows = session.read.format("baton").options(**options).load()
    rows.write.format("batondelta").mode("append").option("path", path).save()
    print("rows", rows.count())
    session.stop()


if __name__ == "__main__":
    main()
