"""`python -m services.lockmgr`: one lock manager; the elected one answers."""

from __future__ import annotations

from services.lockmgr.app import build
from services.lockmgr.config import LockmgrSettings
from services.runtime.process import run

if __name__ == "__main__":
    run("lockmgr", LockmgrSettings, build)
