"""Goal: quotas are stored, listed and deleted; malformed ones are rejected; topics are counted.

Method: a replica on a real etcd through the client library; the calls about topics directly.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.nameserver.v1 import nameserver_service_pb2 as pb
from batonmq.admin.admin import Admin
from batonmq.admin.quotas import DEFAULT_IDENTITY, IdentityQuota, QuotaLimits, Quotas
from batonmq.errors import InvalidArgument, LimitExceeded
from batonmq_server.runtime.access.owner import owner_of
from batonmq_server.runtime.access.quotas import Quota
from tests.nameserver.replica import Direct, Replica, heartbeat, incarnation

LIMITS = QuotaLimits(produce_bytes_per_s=1_000_000, in_flight=0)


async def test_quota_is_listed_until_it_is_deleted(nameserver: Replica) -> None:
    async with Admin(nameserver.address) as admin:
        quotas = Quotas(admin)
        await quotas.set("spiffe://host/a b?".replace(" ", "-"), LIMITS)
        await quotas.set(DEFAULT_IDENTITY, QuotaLimits(topics=3))
        assert await quotas.list() == (
            IdentityQuota(DEFAULT_IDENTITY, QuotaLimits(topics=3)),
            IdentityQuota("spiffe://host/a-b?", LIMITS),
        )
        await quotas.set(DEFAULT_IDENTITY, LIMITS)
        assert (await quotas.list())[0].limits == LIMITS, "the second quota replaces the first"
        assert await quotas.delete(DEFAULT_IDENTITY)
        assert not await quotas.delete(DEFAULT_IDENTITY)
        assert [one.identity for one in await quotas.list()] == ["spiffe://host/a-b?"]


@pytest.mark.parametrize(
    ("identity", "limits", "field"),
    [
        ("", LIMITS, "identity"),
        ("service:storage", LIMITS, "identity"),
        ("app", QuotaLimits(consume_bytes_per_s=0), "consume_bytes_per_s"),
        ("app", QuotaLimits(in_flight=1 << 60), "in_flight"),
    ],
)
async def test_malformed_quota_is_rejected(
    nameserver: Replica, identity: str, limits: QuotaLimits, field: str
) -> None:
    async with Admin(nameserver.address) as admin:
        with pytest.raises(InvalidArgument) as refused:
            await Quotas(admin).set(identity, limits)
        assert refused.value.facts["field"] == field
        assert await Quotas(admin).list() == ()


async def test_identity_creates_as_many_topics_as_its_quota_allows(direct: Direct) -> None:
    topics, quota = direct.topics, Quota(topics=2)
    topics._quota_of = lambda identity: quota if identity == "tenant" else Quota()

    async def create(name: str, owner: str = "tenant") -> bool:
        return (await topics.create(pb.CreateTopicRequest(topic=name), owner)).created

    assert await create("a")
    assert await create("b")
    for name in ("%RETRY%g", "%DLQ%g"):
        assert await create(name), "topics of groups do not count"
    assert not await create("a"), "the topic exists, so nothing is created"
    with pytest.raises(LimitExceeded, match="tenant has reached its quota topics=2"):
        await create("c")
    assert await create("c", owner="other")
    assert await create("d", owner="")
    await topics.delete(pb.DeleteTopicRequest(topic="a"))
    assert await create("e")
    quota = replace(quota, topics=None)
    assert await create("f")


async def test_identity_creates_as_many_groups_as_its_quota_allows(direct: Direct) -> None:
    calls = replace(
        direct.groups,
        quota_of=lambda identity: Quota(groups=2 if identity == "tenant" else None),
    )

    async def join(group: str, client_id: str, identity: str = "tenant") -> None:
        request = heartbeat(group, client_id)
        request.incarnation.owner = owner_of(identity)
        await calls.heartbeat(request, identity)

    await join("a", "1")
    await join("b", "1")
    with pytest.raises(LimitExceeded, match="tenant has reached its quota groups=2"):
        await join("c", "1")
    await join("b", "2")
    await join("a", "1")
    await join("c", "1", "other")
    await join("c", "2")
    await join("d", "1", "")
    left = pb.LeaveRequest(group="a", incarnation=incarnation("1"))
    left.incarnation.owner = owner_of("tenant")
    assert (await calls.leave(left)).left
    with pytest.raises(LimitExceeded):
        await join("e", "1")
    assert direct.catalog.groups["a"].creator == owner_of("tenant"), "the group still counts"
