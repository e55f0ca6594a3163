"""Entry point of a storage node: `python -m batonmq_server.storage`."""

from __future__ import annotations

from batonmq._core import sql_parser
from batonmq_server.runtime.malloc_settings import keep_freed_memory
from batonmq_server.runtime.process import run
from batonmq_server.storage.app import build
from batonmq_server.storage.config import StorageSettings

if __name__ == "__main__":
    keep_freed_memory()
    sql_parser.prepare()
    run("storage", StorageSettings, build)
