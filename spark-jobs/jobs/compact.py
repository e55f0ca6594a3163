"""Goes over all tables once and keeps them small; see docs/reference/spark.md."""

from __future__ import annotations

from batonspark.app import run_job
from batonspark.compaction import compact

if __name__ == "__main__":
    run_job("compact", compact)
