"""Commands of the server distribution, which `batonmq.cli` loads by entry points."""

from __future__ import annotations

# First, so that a command module may be imported on its own: it needs parts of batonmq.cli.
import batonmq.cli  # noqa: F401
