"""Run every streaming query in one session: bronze, rollup and alerts.

See docs/reference/spark.md.
"""

from __future__ import annotations

from batonspark.app import run
from batonspark.queries import QUERIES

if __name__ == "__main__":
    run(*QUERIES)
