"""Access keys of RocketMQ 5 clients in etcd; their secrets are sealed."""

from __future__ import annotations

import contextlib
import re
import secrets
import string
from collections.abc import Iterable

from baton.nameserver.v1 import stored_access_pb2 as pb
from batonmq._common.secret import Secret
from batonmq.errors import InvalidArgument, NoQuorum, Overloaded
from batonmq_server.nameserver.compare_and_swap import CompareAndSwap, unchanged
from batonmq_server.runtime.access.permissions import Grant
from batonmq_server.runtime.access.sealing import SealingKeys
from batonmq_server.runtime.access.stored_access import (
    KEYS,
    PREFIX,
    access_key_key,
    grant_to_pb,
    sealing_context,
)
from batonmq_server.runtime.etcd.session import EtcdSession, Lease, Put

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_NAME_CHARACTERS = 20
_SECRET_BYTES = 32
_SECRET_CHARACTERS = range(8, 257)
_LETTERS = string.ascii_uppercase + string.digits


def check_access_key(access_key: str) -> str:
    """Return `access_key` if it is a valid name of a key pair.

    Raises:
        InvalidArgument: it is empty, too long, or has other characters.
    """
    if not _NAME.fullmatch(access_key):
        raise InvalidArgument(
            f"{access_key[:100]!r} is not a valid access key",
            remedy="Use 1 to 64 of A-Z, a-z, 0-9, _, - and the dot.",
            facts={"field": "access_key"},
        )
    return access_key


def check_secret(secret: str) -> Secret:
    """Return a secret that the caller chose, or a random one if it is empty.

    Raises:
        InvalidArgument: it is too short or too long, or has other than visible ASCII characters.
    """
    if not secret:
        return Secret(secrets.token_urlsafe(_SECRET_BYTES))
    visible = secret.isascii() and secret.isprintable() and " " not in secret
    if not visible or len(secret) not in _SECRET_CHARACTERS:
        raise InvalidArgument(
            f"the secret has {len(secret)} characters; it needs 8 to 256 visible ASCII characters",
            facts={"field": "secret"},
        )
    return Secret(secret)


class AccessKeyStore:
    """Reads and compare-and-swap writes of access keys.

    All methods raise `NoQuorum` if etcd does not answer.

    Args:
        sealing: Seals the secrets; None if the nameserver has no keys for that.
    """

    def __init__(
        self, etcd: EtcdSession, swap: CompareAndSwap, sealing: SealingKeys | None
    ) -> None:
        self._etcd, self._swap, self._sealing = etcd, swap, sealing

    async def create(
        self,
        identity: str,
        by: str,
        secret: Secret,
        *,
        access_key: str = "",
        ttl_ms: int = 0,
        scopes: Iterable[Grant] = (),
    ) -> pb.StoredAccessKey:
        """Store a new key pair; etcd deletes it when it has expired.

        Args:
            access_key: Its name; empty for a random one.
            ttl_ms: Time until it expires; 0 for never.

        Raises:
            InvalidArgument: the access key is in use, or secrets can't be sealed.
        """
        name = access_key or "".join(secrets.choice(_LETTERS) for _ in range(_NAME_CHARACTERS))
        now_unix_ms = self._etcd.clock.unix_ms()
        sealed = self._keys().seal(secret, sealing_context(name, identity))
        stored = pb.StoredAccessKey(
            access_key=name,
            identity=identity,
            create_unix_ms=now_unix_ms,
            by=by,
            expire_unix_ms=now_unix_ms + ttl_ms if ttl_ms else 0,
            scopes=map(grant_to_pb, sorted(scopes)),
            sealed_secret=sealed.sealed,
            sealed_by=sealed.key_id,
        )
        key = access_key_key(name)
        lease = await self._etcd.lease(ttl_ms) if ttl_ms else None
        put = [Put(key, stored.SerializeToString(), lease)]
        if not await self._etcd.txn(compare=[unchanged(key, None)], put=put):
            await self._end(lease)
            raise InvalidArgument(
                f"access key {name} exists already",
                remedy="Use another name, or give it a new secret: baton access key rotate.",
                facts={"field": "access_key"},
            )
        return stored

    async def rotate(self, access_key: str, secret: Secret, overlap_ms: int) -> pb.StoredAccessKey:
        """Replace the secret; the one before stays valid for `overlap_ms`.

        Raises:
            InvalidArgument: there is no such access key, or it has a time to live, or secrets
                can't be sealed.
            Overloaded: every attempt was overtaken by another writer.
        """
        key = access_key_key(access_key)

        async def attempt() -> pb.StoredAccessKey | None:
            before = await self._etcd.get(key)
            if before is None:
                raise InvalidArgument(
                    f"access key {access_key} does not exist",
                    remedy="List access keys: baton access list.",
                    facts={"field": "access_key"},
                )
            stored = pb.StoredAccessKey.FromString(before.value)
            if stored.expire_unix_ms:
                raise InvalidArgument(
                    f"access key {access_key} expires by itself, so its secret can't be replaced",
                    remedy="Create another one for the same identity.",
                    facts={"field": "access_key"},
                )
            context = sealing_context(access_key, stored.identity)
            sealed, now_unix_ms = self._keys().seal(secret, context), self._etcd.clock.unix_ms()
            stored.previous_sealed_secret = stored.sealed_secret if overlap_ms else b""
            stored.previous_expire_unix_ms = now_unix_ms + overlap_ms if overlap_ms else 0
            stored.sealed_secret, stored.sealed_by = sealed.sealed, sealed.key_id
            stored.rotate_unix_ms = now_unix_ms
            put = [Put(key, stored.SerializeToString())]
            written = await self._etcd.txn(compare=[unchanged(key, before)], put=put)
            return stored if written else None

        return await self._swap.run(key, attempt)

    async def revoke(self, access_key: str) -> str | None:
        """Delete an access key; return its identity, or None if there is no such key.

        Raises:
            Overloaded: it was changed meanwhile.
        """
        key = access_key_key(access_key)
        before = await self._etcd.get(key)
        if before is None:
            return None
        if not await self._etcd.txn(compare=[unchanged(key, before)], delete=[key]):
            raise Overloaded(
                f"access key {access_key} was changed by another call at the same time",
                remedy="Repeat the call.",
                retry_after_ms=100,
            )
        await self._end(self._etcd.attach(before.lease_id) if before.lease_id else None)
        return pb.StoredAccessKey.FromString(before.value).identity

    async def by_identity(self) -> dict[str, list[pb.StoredAccessKey]]:
        """Return all access keys without their secrets, of each identity the oldest first."""
        entries, _ = await self._etcd.get_prefix(f"{PREFIX}{KEYS}")
        found: dict[str, list[pb.StoredAccessKey]] = {}
        for entry in entries:
            stored = pb.StoredAccessKey.FromString(entry.value)
            stored.ClearField("sealed_secret")
            stored.ClearField("previous_sealed_secret")
            found.setdefault(stored.identity, []).append(stored)
        for keys in found.values():
            keys.sort(key=lambda one: (one.create_unix_ms, one.access_key))
        return found

    @staticmethod
    async def _end(lease: Lease | None) -> None:
        """End the lease of a key that is not stored any more; else it lasts as long as the key."""
        if lease is not None:
            with contextlib.suppress(NoQuorum):
                await lease.revoke()

    def _keys(self) -> SealingKeys:
        if self._sealing is None:
            raise InvalidArgument(
                "this nameserver has no key that seals the secrets of access keys",
                remedy="Set sealing_key_file of all nameservers and gateways, the same file.",
                facts={"field": "sealing_key_file"},
            )
        return self._sealing
