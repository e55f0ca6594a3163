"""`python -m tools.faults.services.lockmgr`: a lock manager with an injectable clock fault."""

from __future__ import annotations

from batonmq_server.lockmgr.app import build
from batonmq_server.lockmgr.config import LockmgrSettings
from batonmq_server.runtime.process import run
from tools.faults.process_faults import FaultyClock, ProcessFaults

if __name__ == "__main__":
    run(
        "lockmgr",
        LockmgrSettings,
        build,
        lambda settings: FaultyClock(ProcessFaults.of(settings.node_id)),
    )
