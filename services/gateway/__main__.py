"""`python -m batonmq_server.gateway`: run one gateway for clients of RocketMQ 5."""

from __future__ import annotations

from batonmq_server.gateway.app import build
from batonmq_server.gateway.config import GatewaySettings
from batonmq_server.runtime.process import run

if __name__ == "__main__":
    run("gateway", GatewaySettings, build)
