"""`python -m tests.faults.services.lockmgr`: a lock manager whose clock may be upset."""

from __future__ import annotations

from services.lockmgr.app import build
from services.lockmgr.config import LockmgrSettings
from services.runtime.process import run
from tests.faults.upsets import UpsetClock, Upsets

if __name__ == "__main__":
    run(
        "lockmgr",
        LockmgrSettings,
        build,
        lambda settings: UpsetClock(Upsets.of(settings.node_id)),
    )
