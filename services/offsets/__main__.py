"""`python -m services.offsets`."""

from __future__ import annotations

from services.offsets.app import build
from services.offsets.config import OffsetsSettings
from services.runtime.process import run

if __name__ == "__main__":
    run("offsets", OffsetsSettings, build)
