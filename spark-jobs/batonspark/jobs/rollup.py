"""Run the query `rollup` by itself.

See docs/reference/spark.md.
"""

from __future__ import annotations

from batonspark.app import run

if __name__ == "__main__":
    run("rollup")
