"""`python -m services.storage`: a storage node."""

from __future__ import annotations

from batonmq.core import sql_parser
from services.runtime.memory import keep_freed
from services.runtime.process import run
from services.storage.app import build
from services.storage.config import StorageSettings

if __name__ == "__main__":
    keep_freed()
    sql_parser.prepare()
    run("storage", StorageSettings, build)
