"""`python -m batonmq_server.lockmgr`: run one lock manager; the elected leader answers calls."""

from __future__ import annotations

from batonmq_server.lockmgr.app import build
from batonmq_server.lockmgr.config import LockmgrSettings
from batonmq_server.runtime.process import run

if __name__ == "__main__":
    run("lockmgr", LockmgrSettings, build)
