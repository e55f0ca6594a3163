"""The groups of a gateway, without a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any, cast

import pytest

from batonmq._common.clock import Clock
from batonmq.errors import NotServing
from batonmq_server.gateway.gateway_parts import GatewayParts
from batonmq_server.gateway.groups import Groups


async def test_group_that_a_starting_gateway_refused_is_joined_by_the_next_call() -> None:
    spawned: list[Coroutine[Any, Any, None]] = []
    serving = False

    def spawn(work: Coroutine[Any, Any, None]) -> None:
        if not serving:
            work.close()
            raise NotServing("the gateway is starting or stopping")
        spawned.append(work)

    parts = SimpleNamespace(
        environment=SimpleNamespace(clock=Clock()), settings=SimpleNamespace(), spawn=spawn
    )
    groups = Groups(cast(GatewayParts, parts))
    with pytest.raises(NotServing):
        groups.subscribe("billing", [("orders", "*")], "client")
    assert groups.find("billing") is None
    serving = True
    group = groups.subscribe("billing", [("orders", "*")], "client")
    assert groups.find("billing") is group
    (running,) = spawned
    running.close()
    await asyncio.sleep(0)
