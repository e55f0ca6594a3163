"""Grants, tokens and blocks in etcd."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from baton.nameserver.v1 import stored_access_pb2 as pb
from batonmq.errors import LimitExceeded, NoQuorum
from batonmq_server.nameserver.compare_and_swap import CompareAndSwap, unchanged
from batonmq_server.runtime.access.permissions import Grant
from batonmq_server.runtime.access.stored_access import (
    BLOCKS_PREFIX,
    PREFIX,
    TOKENS_PREFIX,
    block_key,
    grant_to_pb,
    grants_from_bytes,
    grants_key,
    grants_to_bytes,
    identity_of,
    token_key,
)
from batonmq_server.runtime.etcd.session import EtcdSession, KeyValue, Put

log = logging.getLogger(__name__)

GRANTS_MAX = 1_000
_TOKEN_ID_CHARACTERS = 16


@dataclass(slots=True)
class IdentityAccess:
    """Grants and tokens of an identity; tokens oldest first."""

    grants: frozenset[Grant] = frozenset()
    tokens: list[pb.StoredToken] = field(default_factory=list)


class AccessStore:
    """Reads and compare-and-swap writes of grants, tokens and blocks.

    All methods raise `NoQuorum` if etcd does not answer.
    """

    def __init__(self, etcd: EtcdSession, swap: CompareAndSwap) -> None:
        self._etcd, self._swap = etcd, swap

    async def grants_of(self, identity: str) -> frozenset[Grant]:
        """Return the present grants of an identity."""
        return _grants(await self._etcd.get(grants_key(identity)))

    async def grant(self, identity: str, grant: Grant) -> bool:
        """Add a grant; return False if the identity has it already.

        Raises:
            LimitExceeded: the identity has the maximum number of grants.
            Overloaded: every attempt was overtaken by another writer.
        """
        return bool(await self._change(identity, lambda grants: grants | {grant}))

    async def revoke(self, identity: str, grant: Grant | None) -> int:
        """Revoke a grant, or all if it is None; return the number of revoked grants.

        Raises:
            Overloaded: every attempt was overtaken by another writer.
        """
        return await self._change(
            identity, lambda grants: grants - {grant} if grant is not None else frozenset()
        )

    async def add_token(
        self,
        digest: str,
        identity: str,
        by: str,
        *,
        ttl_ms: int = 0,
        scopes: Iterable[Grant] = (),
        certificate_sha256: str = "",
    ) -> pb.StoredToken:
        """Store a new token of `identity`, which etcd deletes when it has expired; return it.

        Args:
            ttl_ms: Time until it expires; 0 for never.
            certificate_sha256: Certificate that it is bound to; empty for none.
        """
        now_unix_ms = self._etcd.clock.unix_ms()
        token = pb.StoredToken(
            identity=identity,
            token_id=digest[:_TOKEN_ID_CHARACTERS],
            create_unix_ms=now_unix_ms,
            by=by,
            expire_unix_ms=now_unix_ms + ttl_ms if ttl_ms else 0,
            scopes=map(grant_to_pb, sorted(scopes)),
            certificate_sha256=certificate_sha256,
        )
        lease = await self._etcd.lease(ttl_ms) if ttl_ms else None
        await self._etcd.put(token_key(digest), token.SerializeToString(), lease)
        return token

    async def revoke_token(self, token_id: str) -> str | None:
        """Delete a token; return its identity, or None if there is no such token."""
        entries, _ = await self._etcd.get_prefix(token_key(token_id))
        for stored in entries:
            token = pb.StoredToken.FromString(stored.value)
            if token.token_id == token_id:
                await self._etcd.delete(stored.key)
                if stored.lease_id:  # else it lasts as long as the token would have
                    with contextlib.suppress(NoQuorum):
                        await self._etcd.revoke(stored.lease_id)
                return token.identity
        return None

    async def all(self) -> Mapping[str, IdentityAccess]:
        """Return all identities with a grant or a token, ascending."""
        entries, _ = await self._etcd.get_prefix(PREFIX)
        by_identity: dict[str, IdentityAccess] = {}
        for stored in entries:
            if identity := identity_of(stored.key.removeprefix(PREFIX)):
                by_identity.setdefault(identity, IdentityAccess()).grants = _grants(stored)
            elif stored.key.startswith(TOKENS_PREFIX):
                token = pb.StoredToken.FromString(stored.value)
                by_identity.setdefault(token.identity, IdentityAccess()).tokens.append(token)
        for held in by_identity.values():
            held.tokens.sort(key=lambda token: (token.create_unix_ms, token.token_id))
        return dict(sorted(by_identity.items()))

    async def block(self, subject: str, by: str, reason: str) -> bool:
        """Block a subject; return False if it is blocked already."""
        block = pb.StoredBlock(
            subject=subject, create_unix_ms=self._etcd.clock.unix_ms(), by=by, reason=reason
        )
        key = block_key(subject)
        put = [Put(key, block.SerializeToString())]
        return bool(await self._etcd.txn(compare=[unchanged(key, None)], put=put))

    async def unblock(self, subject: str) -> bool:
        """End a block; return False if the subject is not blocked."""
        key = block_key(subject)
        if await self._etcd.get(key) is None:
            return False
        await self._etcd.delete(key)
        return True

    async def blocks(self) -> list[pb.StoredBlock]:
        """Return all blocks, ascending by subject."""
        entries, _ = await self._etcd.get_prefix(BLOCKS_PREFIX)
        blocks = [pb.StoredBlock.FromString(stored.value) for stored in entries]
        return sorted(blocks, key=lambda block: block.subject)

    async def _change(
        self, identity: str, change: Callable[[frozenset[Grant]], frozenset[Grant]]
    ) -> int:
        """Change the grants of an identity; return the number of grants added and removed."""
        key = grants_key(identity)

        async def attempt() -> int | None:
            stored = await self._etcd.get(key)
            before = _grants(stored)
            after = change(before)
            if before == after:
                return 0
            if len(after) > GRANTS_MAX:
                raise LimitExceeded(
                    f"{identity} would have {len(after)} grants; the limit is {GRANTS_MAX}",
                    remedy="Grant roles on resources that end in *.",
                    facts={"field": "grants", "limit": GRANTS_MAX, "actual": len(after)},
                )
            revision = await self._etcd.txn(
                compare=[unchanged(key, stored)],
                put=[Put(key, grants_to_bytes(after))] if after else (),
                delete=() if after else [key],
            )
            return len(before ^ after) if revision else None

        return await self._swap.run(key, attempt)


def _grants(stored: KeyValue | None) -> frozenset[Grant]:
    """Return the grants; none if they are unreadable, as the services treat them."""
    try:
        return grants_from_bytes(stored.value) if stored is not None else frozenset()
    except (DecodeError, KeyError):
        log.error("etcd has unreadable grants key=%s", stored.key if stored is not None else "")
        return frozenset()
