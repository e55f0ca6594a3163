"""Access keys: key pairs with which clients of RocketMQ 5 sign their calls to a gateway."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from baton.nameserver.v1 import access_service_pb2 as pb
from baton.nameserver.v1 import access_service_pb2_grpc as pb_grpc
from batonmq._common.rpc import answered
from batonmq._common.secret import Secret
from batonmq._connection.directory import CALL_TIMEOUT_S
from batonmq.admin.access import RoleGrant, grant_to_pb
from batonmq.admin.admin import Admin


@dataclass(frozen=True, slots=True)
class NewAccessKey:
    """A key pair with its new secret, which can't be read again later.

    Attributes:
        expire_unix_ms: Wall clock from which on it is invalid; 0 for never.
    """

    access_key: str
    secret: Secret
    identity: str
    expire_unix_ms: int = 0


class AccessKeys:
    """Creates, rotates and revokes access keys; `AccessControl.list` lists them.

    Failures raise classes of `batonmq.errors`. Calls that make a secret are not retried: if one
    fails, the secret may have been stored although it is lost; rotate or revoke the access key.

    Args:
        admin: Client of the cluster; the caller closes it.
    """

    def __init__(self, admin: Admin) -> None:
        self._admin = admin

    async def create(
        self,
        identity: str,
        *,
        access_key: str = "",
        secret: Secret | None = None,
        ttl_ms: int = 0,
        scopes: Iterable[RoleGrant] = (),
    ) -> NewAccessKey:
        """Create a key pair whose calls have the grants of an identity.

        Args:
            access_key: Its name, 1 to 64 of A-Z, a-z, 0-9, `_`, `-` and `.`; empty for a random
                one.
            secret: 8 to 256 visible ASCII characters; None for a random one.
            ttl_ms: Time until it expires, in milliseconds, up to ten years; 0 for never.
            scopes: Its calls have only permissions that one of these covers, too; none: all of the
                identity.

        Raises:
            InvalidArgument: A value is not valid, or the access key is in use.
        """
        request = pb.CreateAccessKeyRequest(
            identity=identity,
            ttl_ms=ttl_ms,
            scopes=map(grant_to_pb, scopes),
            access_key=access_key,
            secret=secret.reveal() if secret is not None else "",
        )
        answer = await answered(self._stub().CreateAccessKey(request, timeout=CALL_TIMEOUT_S))
        return NewAccessKey(
            answer.access_key, Secret(answer.secret), identity, answer.expire_unix_ms
        )

    async def rotate(
        self, access_key: str, *, overlap_ms: int = 0, secret: Secret | None = None
    ) -> NewAccessKey:
        """Give an access key a new secret.

        Args:
            overlap_ms: How long the old secret stays valid, in milliseconds, up to 30 days.
            secret: As in `create`.

        Raises:
            InvalidArgument: There is no such access key, or it expires by itself.
        """
        request = pb.RotateAccessKeyRequest(
            access_key=access_key,
            overlap_ms=overlap_ms,
            secret=secret.reveal() if secret is not None else "",
        )
        answer = await answered(self._stub().RotateAccessKey(request, timeout=CALL_TIMEOUT_S))
        return NewAccessKey(access_key, Secret(answer.secret), answer.identity)

    async def revoke(self, access_key: str) -> bool:
        """Revoke an access key; return False if it does not exist."""
        request = pb.RevokeAccessKeyRequest(access_key=access_key)
        answer = await self._admin.ask(
            lambda limit_s: self._stub().RevokeAccessKey(request, timeout=limit_s)
        )
        return answer.revoked

    def _stub(self) -> pb_grpc.AccessServiceAsyncStub:
        return self._admin.directory.access()
