"""Goal: a Kombu program works with TLS, a token and the least grants; what can't be is refused.

Method: a channel of Kombu, without Celery, and a real cluster with TLS and access control.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from queue import Empty
from typing import Any

import pytest
from kombu import Connection
from kombu.exceptions import ChannelError

import batonmq.kombu  # noqa: F401  makes the URL scheme known
from batonmq import Admin
from batonmq.admin.access import AccessControl, Role, RoleGrant
from batonmq.errors import BatonError, PermissionDenied, TopicNotFound
from batonmq_server.local.cluster import LocalCluster
from batonmq_server.local.layout import ClusterOptions
from tests.support.cluster import SEGMENT_BYTES, fork_server
from tests.support.conditions import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

LEAST = (
    RoleGrant(Role.PRODUCE, "topic:jobs"),
    RoleGrant(Role.CONSUME, "topic:jobs"),
    RoleGrant(Role.CONSUME, "group:jobs"),
    RoleGrant(Role.CONSUME, "topic:absent"),
)


def guarded(folder: Path) -> LocalCluster:
    """Return a cluster with TLS and access control."""
    settings = {"storage": {"segment_bytes": SEGMENT_BYTES}}
    options = ClusterOptions(secure=True, access=True, etcd_fsync=False, settings=settings)
    return LocalCluster(folder, options, start=fork_server().start)


def connected(
    url: str, credentials: dict[str, str], call: Callable[[Connection], Any], **options: Any
) -> Any:
    """Return the result of a call with a connection."""
    given = {**credentials, "create_topics": False, **options}
    with Connection(url, transport_options=given) as connection:
        return call(connection)


def exchange(connection: Connection, body: str) -> object:
    """Send a message and receive one."""
    queue = connection.SimpleQueue("jobs")
    queue.put(body)
    message = queue.get(timeout=30)
    message.ack()
    queue.close()
    return message.payload


def refusals(connection: Connection) -> list[str]:
    """Return the errors of everything that the transport does not support."""
    with closing(connection.channel()) as channel:
        calls: tuple[Callable[[], object], ...] = (
            lambda: channel.exchange_declare("news", "fanout"),
            lambda: channel.exchange_declare("news", "headers"),
            lambda: channel.queue_declare("other", auto_delete=True),
            lambda: channel.queue_declare("other", exclusive=True),
            lambda: channel.queue_declare("absent", passive=True),
            lambda: channel.prepare_queue_arguments({"x-max-length": 3}),
            lambda: channel.basic_recover(requeue=True),
        )
        found = []
        for call in calls:
            with pytest.raises(ChannelError) as raised:
                call()
            found.append(str(raised.value))
        return found


@pytest.mark.long
async def test_token_with_the_least_grants_sends_and_receives_over_tls(tmp_path: Path) -> None:
    async with (
        guarded(tmp_path) as cluster,
        Admin(cluster.nameserver, security=cluster.security) as admin,
    ):
        assert cluster.security is not None
        files = {
            name: str(getattr(cluster.security, name))
            for name in ("ca_file", "cert_file", "key_file")
        }
        control = AccessControl(admin)
        created = await control.create_token("worker")
        url = f"batonmq://:{created.token.reveal()}@{cluster.nameserver}"
        calling = partial(connected, url, files)

        async def is_denied() -> bool:
            try:
                await asyncio.to_thread(calling, partial(exchange, body="early"))
            except PermissionDenied as error:
                return "worker lacks" in error.message
            except BatonError:  # the token is not known to every service yet
                return False
            raise AssertionError("it was admitted")

        await until(is_denied, 60)
        await admin.create_topic("jobs", 1)
        for one in LEAST:
            await control.grant("worker", one)

        async def works() -> bool:
            try:
                return bool(await asyncio.to_thread(calling, partial(exchange, body="hello")))
            except (PermissionDenied, Empty):  # a service has not heard of a grant yet
                return False

        await until(works, 60)
        found = await asyncio.to_thread(calling, refusals)
        assert ["auto_delete" in found[2], "exclusive" in found[3]] == [True, True]
        assert "x-max-length" in found[5]
        assert "basic_recover" in found[6]
        with pytest.raises(TopicNotFound, match="create_topics is off"):
            await asyncio.to_thread(calling, lambda one: one.SimpleQueue("absent").put("x"))
        with pytest.raises(PermissionDenied):
            await asyncio.to_thread(
                partial(calling, create_topics=True), lambda one: one.SimpleQueue("absent").put("x")
            )
