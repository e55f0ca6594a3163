"""`python -m batonmq_server.nameserver`: one nameserver replica."""

from __future__ import annotations

from batonmq._core import sql_parser
from batonmq_server.nameserver.app import build
from batonmq_server.nameserver.config import NameserverSettings
from batonmq_server.runtime.process import run

if __name__ == "__main__":
    sql_parser.prepare()
    run("nameserver", NameserverSettings, build)
