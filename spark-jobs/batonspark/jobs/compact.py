"""Compact all tables once: delete old rows, join small files, remove unused files.

See docs/reference/spark.md.
"""

from __future__ import annotations

from batonspark.app import refuse_arguments, run_job
from batonspark.compaction import compact

if __name__ == "__main__":
    refuse_arguments()
    run_job("compact", compact)
