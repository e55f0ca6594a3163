"""`python -m batonmq.cli` is `baton`."""

from __future__ import annotations

from batonmq.cli import app

app(prog_name="baton")
