"""`python -m tools.faults.services.gateway`: a gateway with an injectable clock fault."""

from __future__ import annotations

from batonmq_server.gateway.app import build
from batonmq_server.gateway.config import GatewaySettings
from batonmq_server.runtime.process import run
from tools.faults.process_faults import FaultyClock, ProcessFaults

if __name__ == "__main__":
    run(
        "gateway",
        GatewaySettings,
        build,
        lambda settings: FaultyClock(ProcessFaults.of(settings.node_id)),
    )
