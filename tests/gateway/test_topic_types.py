"""The types of topics while nameservers do not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from apache.rocketmq.v2 import definition_pb2 as pb
from baton.nameserver.v1 import nameserver_service_pb2 as nameserver_pb
from batonmq._connection.directory import Directory
from batonmq.errors import TopicNotFound, TopicNotFoundDetail, Unreachable
from batonmq_server.gateway import topic_types
from batonmq_server.gateway.message_proto import outgoing
from batonmq_server.gateway.topic_types import AGE_MS_MAX, TopicTypes
from tests.support.clock import MovableClock

MESSAGE = pb.Message(body=b"x", system_properties=pb.SystemProperties(message_id="m"))


async def test_type_that_is_forgotten_meanwhile_is_used_if_no_nameserver_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another call has learnt from another nameserver that the topic was deleted."""
    clock, answers = MovableClock(), list[Callable[[], Exception]]()
    types = TopicTypes(Directory.__new__(Directory), clock)
    types.note(nameserver_pb.Topic(name="orders"))
    clock.ahead_ms += AGE_MS_MAX + 1
    answers += [
        lambda: Unreachable("no nameserver answered"),
        lambda: TopicNotFound("deleted", detail=TopicNotFoundDetail(topic="orders")),
    ]

    async def query_route(*_: object) -> nameserver_pb.Route:
        answer = answers.pop()
        await asyncio.sleep(0.01 if isinstance(answer(), Unreachable) else 0)
        raise answer()

    monkeypatch.setattr(topic_types, "query_route", query_route)
    messages = [outgoing(MESSAGE, 1)]

    async def is_unknown() -> bool:
        try:
            await types.check("orders", messages)
        except TopicNotFound:
            return True
        return False

    async with asyncio.TaskGroup() as tasks:
        first, second = tasks.create_task(is_unknown()), tasks.create_task(is_unknown())
    assert (first.result(), second.result()) == (True, False)
