"""One program for each job: `python -m batonspark.jobs.<name>`; see docs/reference/spark.md."""

from __future__ import annotations
