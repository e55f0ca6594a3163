"""`python -m batonmq_server.offsets`."""

from __future__ import annotations

from batonmq_server.offsets.app import build
from batonmq_server.offsets.config import OffsetsSettings
from batonmq_server.runtime.process import run

if __name__ == "__main__":
    run("offsets", OffsetsSettings, build)
