"""Access keys by the calls of the contract.

Goal: etcd has no secret in the clear; a rotation keeps the secret before for its overlap; malformed
requests are refused and change nothing; listings have no sealed bytes.
Method: a replica on a real etcd with authorization off, through the client library.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from baton.nameserver.v1 import access_service_pb2 as pb
from baton.nameserver.v1 import access_service_pb2_grpc as pb_grpc
from baton.nameserver.v1 import stored_access_pb2
from batonmq._common.secret import Secret
from batonmq._connection.channels import connect
from batonmq.admin.access import AccessControl, Role, RoleGrant
from batonmq.admin.access_keys import AccessKeys
from batonmq.admin.admin import Admin
from batonmq.errors import InvalidArgument
from batonmq_server.runtime.access.sealing import new_sealing_key, read_sealing_keys
from batonmq_server.runtime.access.stored_access import access_key_key, sealing_context
from batonmq_server.runtime.etcd.session import EtcdSession, Lease
from tests.nameserver.replica import Replica, replica

TTL_MS = 3_600_000


@pytest_asyncio.fixture
async def nameserver(
    etcd_endpoint: str, cluster: str, etcd: EtcdSession, tmp_path: Path
) -> AsyncIterator[Replica]:
    """A replica that can seal secrets."""
    file = tmp_path / "sealing.key"
    file.write_text(new_sealing_key())
    async with replica(etcd_endpoint, cluster, sealing_key_file=str(file)) as running:
        yield running


@pytest_asyncio.fixture
async def admin(nameserver: Replica) -> AsyncIterator[Admin]:
    async with Admin(nameserver.address) as opened:
        yield opened


async def stored(etcd: EtcdSession, name: str) -> stored_access_pb2.StoredAccessKey:
    value = await etcd.get(access_key_key(name))
    assert value is not None
    return stored_access_pb2.StoredAccessKey.FromString(value.value)


async def test_secret_is_stored_sealed_and_rotated(
    admin: Admin, etcd: EtcdSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys, control = AccessKeys(admin), AccessControl(admin)
    scope = RoleGrant(Role.CONSUME, "topic:orders")
    with caplog.at_level(logging.DEBUG):
        pair = await keys.create("shop", scopes=[scope])
        new = await keys.rotate(pair.access_key, overlap_ms=60_000)
    assert len(pair.access_key) == 20
    assert pair.secret != new.secret
    one, sealing = (
        await stored(etcd, pair.access_key),
        read_sealing_keys(str(tmp_path / "sealing.key")),
    )
    context = sealing_context(pair.access_key, "shop")
    assert sealing.open(one.sealed_secret, context) == new.secret
    assert sealing.open(one.previous_sealed_secret, context) == pair.secret
    assert one.previous_expire_unix_ms == one.rotate_unix_ms + 60_000
    for secret in (pair.secret.reveal(), new.secret.reveal()):
        assert secret not in caplog.text
        assert secret.encode() not in one.SerializeToString()
    (listed,) = (await control.list("shop"))[0].access_keys
    assert (listed.access_key, listed.scopes, listed.by) == (pair.access_key, (scope,), "")
    ended = await keys.rotate(pair.access_key)
    assert ended.identity == "shop"
    assert not (await stored(etcd, pair.access_key)).previous_sealed_secret
    assert await keys.revoke(pair.access_key)
    assert not await keys.revoke(pair.access_key)
    assert await control.list() == ()


async def test_listing_has_no_sealed_bytes(admin: Admin, nameserver: Replica) -> None:
    await AccessKeys(admin).create("shop", access_key="AK", secret=Secret("chosen-secret"))
    async with connect(nameserver.address) as channel:
        stub = pb_grpc.AccessServiceStub(channel)
        answer = await stub.ListAccess(pb.ListAccessRequest(), timeout=10)
    (key,) = answer.identities[0].access_keys
    assert (key.access_key, key.sealed_secret, bool(key.sealed_by)) == ("AK", b"", True)


async def test_malformed_requests_are_refused_and_change_nothing(admin: Admin) -> None:
    keys = AccessKeys(admin)
    await keys.create("shop", access_key="AK")
    await keys.create("shop", access_key="short-lived", ttl_ms=60_000)
    for identity, access_key, secret in (
        ("service:storage", "", ""),
        ("", "", ""),
        ("shop", "AK", ""),
        ("shop", "a/b", ""),
        ("shop", "x" * 65, ""),
        ("shop", "", "short"),
        ("shop", "", "with a blank"),
        ("shop", "", "x" * 257),
    ):
        with pytest.raises(InvalidArgument):
            chosen = Secret(secret) if secret else None
            await keys.create(identity, access_key=access_key, secret=chosen)
    for call in (
        keys.rotate("unknown"),
        keys.rotate("short-lived"),
        keys.rotate("AK", overlap_ms=31 * 24 * 3_600_000),
        keys.revoke("a/b"),
        keys.create("shop", ttl_ms=-1),
    ):
        with pytest.raises(InvalidArgument):
            await call
    (entry,) = await AccessControl(admin).list()
    assert [one.access_key for one in entry.access_keys] == ["AK", "short-lived"]


async def test_nameserver_without_a_sealing_key_creates_none(
    etcd_endpoint: str, cluster: str, etcd: EtcdSession
) -> None:
    async with replica(etcd_endpoint, cluster) as running, Admin(running.address) as admin:
        with pytest.raises(InvalidArgument, match="no key that seals") as refused:
            await AccessKeys(admin).create("shop")
        assert "sealing_key_file" in refused.value.remedy
        assert await AccessControl(admin).list() == ()


async def test_refused_and_revoked_credentials_leave_no_lease(
    admin: Admin, etcd: EtcdSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lease that is not ended lasts as long as the credentials would have, up to ten years."""
    lease, lease_ids = EtcdSession.lease, []

    async def recorded(self: EtcdSession, ttl_ms: int) -> Lease:
        made = await lease(self, ttl_ms)
        if ttl_ms == TTL_MS:
            lease_ids.append(made.lease_id)
        return made

    monkeypatch.setattr(EtcdSession, "lease", recorded)
    keys, control = AccessKeys(admin), AccessControl(admin)
    await keys.create("shop", access_key="shop-key", ttl_ms=TTL_MS)
    with pytest.raises(InvalidArgument, match="exists already"):
        await keys.create("shop", access_key="shop-key", ttl_ms=TTL_MS)
    kept, refused = lease_ids
    assert (await etcd.time_to_live(kept))[0] > 0
    assert (await etcd.time_to_live(refused))[0] == -1
    token = await control.create_token("shop", ttl_ms=TTL_MS)
    assert await keys.revoke("shop-key")
    assert await control.revoke_token(token.token_id)
    assert [(await etcd.time_to_live(one))[0] for one in lease_ids] == [-1, -1, -1]
