"""Permissions and quota of an open stream, for its servicer.

Goal: a servicer can check each part of a stream, also after each change of grants; refusals are
counted and audited; a stream that has ended leaves no callback behind; reads wait for the quota.
Method: the guard with grants and tokens in a real etcd, and the context of a call.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from baton.storage.v1 import storage_service_pb2 as pb
from batonmq.errors import BatonError, PermissionDenied
from batonmq_server.runtime.access.audit import AuditSink
from batonmq_server.runtime.access.guard import Guard
from batonmq_server.runtime.access.permissions import AccessRole, Grant
from batonmq_server.runtime.access.quotas import WAIT_MS_MAX, Quota
from batonmq_server.runtime.access.stream_access import StreamAccess
from batonmq_server.runtime.etcd.session import EtcdSession
from batonmq_server.storage.access import RULES, pull_permissions
from tests.access.edge_scene import GROUP, METHODS, TOPIC, Scene, request_of, scene
from tests.support.conditions import until

PULL = "/baton.storage.v1.StorageService/Pull"
DELIVER = "/baton.storage.v1.StorageService/Deliver"
CONSUMER = (("consume", f"topic:{TOPIC}"), ("consume", f"group:{GROUP}"))


class CallContext:
    """The context of a call with a token."""

    def __init__(self, metadata: list[tuple[str, str]]) -> None:
        self._metadata = metadata

    def auth_context(self) -> dict[str, Any]:
        return {}

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return self._metadata


class Refusals:
    """An audit that keeps what was refused."""

    def __init__(self) -> None:
        self.kept: list[tuple[str, str, str]] = []

    def refused(self, path: str, identity: str, error: BatonError) -> None:
        self.kept.append((path, identity, error.reason))


@pytest_asyncio.fixture
async def made(etcd: EtcdSession) -> AsyncIterator[Scene]:
    async with scene(etcd) as made:
        await made.know("app", *CONSUMER)
        yield made


def access_of(made: Scene, identity: str) -> StreamAccess:
    return StreamAccess(made.guard, DELIVER, cast("Any", CallContext(made.metadata(identity))))


def needs(group: str = GROUP) -> Any:
    return pull_permissions(cast("pb.PullRequest", request_of(METHODS[PULL], group=group)))


async def test_delivery_needs_the_permissions_of_pull(made: Scene) -> None:
    refusals = Refusals()
    made.guard.audits.append(cast("AuditSink", refusals))
    access = access_of(made, "app")
    assert tuple(RULES[PULL].permissions(request_of(METHODS[PULL]))) == needs()
    access.require(*needs())
    with pytest.raises(PermissionDenied) as refused:
        access.require(*needs(group="others"))
    assert refused.value.facts["resource"] == "group:others"
    assert refusals.kept == [(DELIVER, "app", "PERMISSION_DENIED")]
    assert made.refused_count("StorageService", "PERMISSION_DENIED") == 1


async def test_stream_learns_of_a_revocation_until_it_unsubscribes(made: Scene) -> None:
    access, before, changes = access_of(made, "app"), len(made.guard.on_change), list[str]()

    def changed() -> None:
        changes.append("one")

    ends = [access.subscribe(changed), access.subscribe(changed)]
    await made.store.revoke("app", Grant(AccessRole.CONSUME, f"group:{GROUP}"))
    await until(lambda: len(changes) == 2)
    with pytest.raises(PermissionDenied):
        access.require(*needs())
    ends[0]()
    ends[0]()
    assert len(made.guard.on_change) == before + 1, "the other subscription stays"
    await made.store.grant("app", Grant(AccessRole.CONSUME, f"group:{GROUP}"))
    await until(lambda: len(changes) == 3)
    access.require(*needs())
    ends[1]()
    assert len(made.guard.on_change) == before, "nothing is left of the streams"


async def test_subscriber_may_unsubscribe_while_it_is_called(made: Scene) -> None:
    access, called = access_of(made, "app"), list[str]()

    def end_first() -> None:
        called.append("first")
        end()

    end = access.subscribe(end_first)
    access.subscribe(lambda: called.append("second"))
    await made.store.revoke("app", Grant(AccessRole.CONSUME, f"group:{GROUP}"))
    await until(lambda: "second" in called)
    await made.store.grant("app", Grant(AccessRole.CONSUME, f"group:{GROUP}"))
    await until(lambda: called.count("second") == 2)
    assert called.count("first") == 1


async def test_reads_of_a_stream_wait_for_the_quota_of_their_caller(made: Scene) -> None:
    await made.know("other", *CONSUMER)
    app, other = access_of(made, "app"), access_of(made, "other")
    assert (app.read_wait_ms(), app.read_bytes_max()) == (0, None)
    made.guard.quotas.set_quota("app", Quota(consume_bytes_per_s=1_000))
    assert (app.read_wait_ms(), app.read_bytes_max()) == (0, 1_000)
    app.charge_read(10**6)
    assert app.read_wait_ms() == WAIT_MS_MAX
    throttled = {"quota": "consume_bytes_per_s"}
    assert made.registry.get_sample_value("baton_throttled_calls_total", throttled) == 1
    other.charge_read(10**6)
    assert (other.read_wait_ms(), other.read_bytes_max()) == (0, None)
    made.guard.quotas.set_quota("app", Quota(consume_bytes_per_s=0))
    assert app.read_bytes_max() == 1


async def test_everything_is_allowed_while_access_control_is_off(etcd: EtcdSession) -> None:
    guard = Guard(etcd, CollectorRegistry())
    guard.quotas.set_quota("*", Quota(consume_bytes_per_s=1))
    access = StreamAccess(guard, DELIVER, cast("Any", CallContext([])))
    access.require(*needs())
    access.charge_read(10**9)
    assert (access.read_wait_ms(), access.read_bytes_max()) == (0, None)
    access.subscribe(lambda: None)()
    assert not guard.on_change
