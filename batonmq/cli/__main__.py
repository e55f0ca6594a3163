"""`python -m batonmq.cli` is `baton`."""

from __future__ import annotations

from batonmq.cli.app import baton

if __name__ == "__main__":
    baton(prog_name="baton")
