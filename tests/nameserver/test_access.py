"""Grants and tokens by the calls of the contract.

Goal: grants are stored, listed and checked; malformed requests are refused and change nothing; a
token is returned once and not stored; grants can be made while authorization is off.
Method: a replica on a real etcd with authorization off, through the client library; two stores for
races.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import cast

import pytest
import pytest_asyncio

from baton.nameserver.v1 import access_service_pb2 as pb
from baton.nameserver.v1 import access_service_pb2_grpc as pb_grpc
from baton.nameserver.v1 import stored_access_pb2
from batonmq._common.rpc import from_rpc_error
from batonmq._connection.channels import connect
from batonmq.admin.access import AccessCheck, AccessControl, Role, RoleGrant
from batonmq.admin.admin import Admin
from batonmq.errors import InvalidArgument, InvalidName, LimitExceeded
from batonmq_server.nameserver import access_store
from batonmq_server.nameserver.access_key_store import AccessKeyStore
from batonmq_server.nameserver.access_server import AccessServicer, Context
from batonmq_server.nameserver.access_store import AccessStore
from batonmq_server.nameserver.compare_and_swap import CompareAndSwap
from batonmq_server.runtime.access import stored_access
from batonmq_server.runtime.access.guard import Guard
from batonmq_server.runtime.access.permissions import AccessRole as StoredRole
from batonmq_server.runtime.access.permissions import Grant as StoredGrant
from batonmq_server.runtime.etcd.session import EtcdSession
from tests.nameserver.replica import Replica

READ = RoleGrant(Role.CONSUME, "topic:orders")
WRITE = RoleGrant(Role.PRODUCE, "topic:orders-*")


@pytest_asyncio.fixture
async def control(nameserver: Replica) -> AsyncIterator[AccessControl]:
    async with Admin(nameserver.address) as admin:
        yield AccessControl(admin)


async def test_grant_is_listed_until_it_is_revoked(control: AccessControl) -> None:
    assert await control.grant("app", READ)
    assert await control.grant("app", WRITE)
    assert not await control.grant("app", READ), "again"
    (entry,) = await control.list()
    assert (entry.identity, entry.grants, entry.tokens) == ("app", (READ, WRITE), ())
    assert await control.revoke("app", READ) == 1
    assert await control.revoke("app", READ) == 0
    assert (await control.list("app"))[0].grants == (WRITE,)
    assert await control.list("other") == ()


async def test_all_grants_of_an_identity_are_revoked_at_once(
    control: AccessControl, etcd: EtcdSession
) -> None:
    await control.grant("app", READ)
    await control.grant("app", WRITE)
    assert await control.revoke("app") == 2
    assert await control.list() == ()
    assert await etcd.get_prefix(stored_access.PREFIX) == ([], (await etcd.get_prefix("x"))[1])


async def test_check_names_the_grant_that_allows(control: AccessControl) -> None:
    await control.grant("app", WRITE)
    allowed = await control.check(RoleGrant(Role.PRODUCE, "topic:orders-1"), "app")
    assert (allowed.allowed, allowed.by, allowed.access_on) == (True, WRITE, False)
    refused = await control.check(RoleGrant(Role.CONSUME, "topic:orders-1"), "app")
    assert (refused.allowed, refused.by) == (False, None)


async def test_check_without_identity_says_that_authorization_is_off(
    control: AccessControl,
) -> None:
    assert await control.check(READ) == AccessCheck("", allowed=False, by=None, access_on=False)


@pytest.mark.parametrize(
    ("identity", "grant"),
    [
        ("service:storage", READ),
        ("", READ),
        ("a b", READ),
        ("app", RoleGrant(Role.PRODUCE, "group:readers")),
        ("app", RoleGrant(Role.CONSUME, "orders")),
        ("app", RoleGrant(Role.CONSUME, "topic:%DLQ%readers")),
    ],
)
async def test_malformed_access_request_is_refused(
    control: AccessControl, identity: str, grant: RoleGrant
) -> None:
    with pytest.raises((InvalidArgument, InvalidName)):
        await control.grant(identity, grant)
    assert await control.list() == ()


async def test_grant_without_a_role_is_refused(nameserver: Replica) -> None:
    async with connect(nameserver.address) as channel:
        stub = pb_grpc.AccessServiceStub(channel)
        for number in (0, 17):
            grant = stored_access_pb2.AccessGrant(resource="cluster")
            grant.role = number  # type: ignore[assignment]
            with pytest.raises(Exception, match="role is required") as refused:
                await stub.Grant(pb.GrantRequest(identity="app", grant=grant), timeout=10)
            assert type(from_rpc_error(refused.value)) is InvalidArgument  # type: ignore[arg-type]


async def test_only_the_digest_of_a_token_is_stored(
    control: AccessControl, etcd: EtcdSession, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        new_token = await control.create_token("app")
    token = new_token.token.reveal()
    (entry,) = await control.list()
    assert [(t.token_id, t.by) for t in entry.tokens] == [(new_token.token_id, "")]
    stored, _ = await etcd.get_prefix("")
    content = b"".join(one.key.encode() + one.value for one in stored)
    assert token.encode() not in content
    assert stored_access.token_key(stored_access.digest_of(token)).encode() in content
    assert token not in caplog.text
    assert token not in repr(new_token)


async def test_two_tokens_of_one_identity_are_revoked_one_by_one(control: AccessControl) -> None:
    first, second = [await control.create_token("app") for _ in range(2)]
    assert first.token.reveal() != second.token.reveal()
    assert await control.revoke_token(first.token_id)
    assert not await control.revoke_token(first.token_id)
    (entry,) = await control.list()
    assert [token.token_id for token in entry.tokens] == [second.token_id]


@pytest.mark.parametrize("token_id", ["", "grants/app", "a" * 3])
async def test_part_of_a_token_id_names_no_token(control: AccessControl, token_id: str) -> None:
    new_token = await control.create_token("app")
    for wrong in {token_id, new_token.token_id[:-1]}:
        try:
            assert not await control.revoke_token(wrong)
        except InvalidArgument:
            assert wrong in ("", "grants/app")
    assert len((await control.list())[0].tokens) == 1


async def test_concurrent_grants_are_all_kept(etcd: EtcdSession) -> None:
    stores = [AccessStore(etcd, CompareAndSwap(etcd.random)) for _ in range(2)]
    grants = [StoredGrant(StoredRole.CONSUME, f"topic:t-{number}") for number in range(10)]
    async with asyncio.TaskGroup() as tasks:
        for number, grant in enumerate(grants):
            tasks.create_task(stores[number % 2].grant("app", grant))
    assert await stores[0].grants_of("app") == frozenset(grants)


async def test_identity_has_a_bounded_number_of_grants(
    etcd: EtcdSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access_store, "GRANTS_MAX", 2)
    store = AccessStore(etcd, CompareAndSwap(etcd.random))
    grants = [StoredGrant(StoredRole.CONSUME, f"topic:{name}") for name in "abc"]
    for grant in grants[:2]:
        await store.grant("app", grant)
    with pytest.raises(LimitExceeded):
        await store.grant("app", grants[2])
    assert await store.grants_of("app") == frozenset(grants[:2])


async def test_token_is_listed_with_its_expiry_and_scopes(control: AccessControl) -> None:
    scope = RoleGrant(Role.CONSUME, "topic:orders")
    new_token = await control.create_token("app", ttl_ms=60_000, scopes=[scope])
    (entry,) = await control.list()
    (token,) = entry.tokens
    assert token.expire_unix_ms == new_token.expire_unix_ms == token.create_unix_ms + 60_000
    assert token.scopes == (scope,)


@pytest.mark.parametrize(
    ("identity", "ttl_ms", "scopes", "field"),
    [
        ("app", -1, (), "ttl_ms"),
        ("app", 11 * 365 * 24 * 3_600_000, (), "ttl_ms"),
        ("service:storage", 0, (RoleGrant(Role.CONSUME, "topic:orders"),), "scopes"),
        ("app", 0, (RoleGrant(Role.CONSUME, "cluster"),), "role"),
    ],
)
async def test_invalid_limits_of_a_token_are_refused_by_name(
    control: AccessControl, identity: str, ttl_ms: int, scopes: tuple[RoleGrant, ...], field: str
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        await control.create_token(identity, ttl_ms=ttl_ms, scopes=scopes)
    assert refused.value.facts["field"] == field
    assert not await control.list()


# ---- bound tokens, and blocks


async def test_token_is_listed_with_the_certificate_that_it_is_bound_to(
    control: AccessControl,
) -> None:
    await control.create_token("app", certificate_sha256=":".join(["AB"] * 32))
    (entry,) = await control.list()
    assert entry.tokens[0].certificate_sha256 == "ab" * 32
    with pytest.raises(InvalidArgument) as refused:
        await control.create_token("app", certificate_sha256="ab")
    assert refused.value.facts["field"] == "certificate_sha256"


async def test_block_is_listed_until_it_ends(control: AccessControl) -> None:
    await control.grant("app", READ)
    assert await control.block("identity:app", "left the company")
    assert not await control.block("identity:app"), "again"
    assert await control.block("serial:0A:1B")
    blocks = await control.blocks()
    assert [(one.subject, one.reason) for one in blocks] == [
        ("identity:app", "left the company"),
        ("serial:a1b", ""),
    ]
    assert blocks[0].create_unix_ms > 0
    assert [one.identity for one in await control.list()] == ["app"], "a block is no token"
    assert await control.unblock("serial:a1b")
    assert not await control.unblock("serial:a1b")
    assert [one.subject for one in await control.blocks()] == ["identity:app"]


@pytest.mark.parametrize(
    ("subject", "reason", "field"),
    [("app", "", "subject"), ("identity:service:storage", "", "subject"),
     ("identity:app", "x" * 201, "reason")],
)  # fmt: skip
async def test_invalid_block_is_refused_by_name(
    control: AccessControl, subject: str, reason: str, field: str
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        await control.block(subject, reason)
    assert refused.value.facts["field"] == field
    assert not await control.blocks()


async def test_administrator_cannot_block_itself(etcd: EtcdSession) -> None:
    store = AccessStore(etcd, CompareAndSwap(etcd.random))

    class CalledByCarol:
        def caller_identity(self, _: object) -> str:
            return "carol"

    access_keys = AccessKeyStore(etcd, CompareAndSwap(etcd.random), None)
    servicer = AccessServicer(store, access_keys, cast("Guard", CalledByCarol()))
    with pytest.raises(InvalidArgument, match="carol would block itself"):
        await servicer.Block(pb.BlockRequest(subject="identity:carol"), cast("Context", None))
    assert await store.blocks() == []
