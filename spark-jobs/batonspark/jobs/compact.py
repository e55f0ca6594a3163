"""Compact all tables once: delete old rows, join small files, remove unused files.

See docs/reference/spark.md.
"""

from __future__ import annotations

from batonspark.app import run_job
from batonspark.compaction import compact

if __name__ == "__main__":
    run_job("compact", compact)
