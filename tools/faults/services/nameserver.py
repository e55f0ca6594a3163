"""`python -m tools.faults.services.nameserver`: a nameserver with an injectable clock fault."""

from __future__ import annotations

from batonmq._core import sql_parser
from batonmq_server.nameserver.app import build
from batonmq_server.nameserver.config import NameserverSettings
from batonmq_server.runtime.process import run
from tools.faults.process_faults import FaultyClock, ProcessFaults

if __name__ == "__main__":
    sql_parser.prepare()
    run(
        "nameserver",
        NameserverSettings,
        build,
        lambda settings: FaultyClock(ProcessFaults.of(settings.node_id)),
    )
