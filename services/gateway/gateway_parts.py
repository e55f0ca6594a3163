"""What all parts of one gateway share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

from batonmq._connection.directory import ClientEnvironment
from batonmq_server.gateway.client_commands import ClientCommands
from batonmq_server.gateway.clients import RemoteClients
from batonmq_server.gateway.config import GatewaySettings
from batonmq_server.gateway.core.receipt_handles import ReceiptSigner
from batonmq_server.gateway.events import RemoteEvents


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayParts:
    """Settings, identity and tools of one gateway.

    Attributes:
        nameserver: host:port of the nameservers, separated by commas.
        serials: Numbers of deliveries.
        spawn: Starts a task that lives as long as the gateway, at most.
        events: Metric events of the remote clients.
        commands: Commands of operators to remote clients.
    """

    settings: GatewaySettings
    nameserver: str
    environment: ClientEnvironment
    clients: RemoteClients
    signer: ReceiptSigner
    serials: Iterator[int]
    spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
    events: RemoteEvents
    commands: ClientCommands
