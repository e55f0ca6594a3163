"""Authentication and authorization of remote clients, by their identity and never the gateway's.

A client is identified by the signature of its call, else by a bearer token, else by the certificate
of its connection. Its identity has the grants, blocks and quotas that native clients have.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from batonmq._common.clock import Clock
from batonmq.errors import BatonError, Throttled, Unauthenticated
from batonmq_server.gateway.access import SERVICE, RemoteCall
from batonmq_server.gateway.access_keys import AccessKey, AccessKeys
from batonmq_server.gateway.callers import Context, text_of
from batonmq_server.gateway.config import GatewaySettings
from batonmq_server.gateway.core.signatures import (
    DATE_HEADER,
    BadSignature,
    CallSignature,
    check_date,
    check_signature,
    is_signature,
    parse_signature,
)
from batonmq_server.runtime.access import authenticator
from batonmq_server.runtime.access.guard import Guard
from batonmq_server.runtime.access.permissions import ANY_GRANT, Permission
from batonmq_server.runtime.access.quotas import Traffic
from batonmq_server.runtime.access.revocable_calls import OpenCall, RevocableCalls
from batonmq_server.runtime.access.rules import permissions_of
from batonmq_server.runtime.access.sealing import SealingKeys
from batonmq_server.runtime.access.throttle_delay import ThrottleDelay


class RemoteIdentity(NamedTuple):
    """An authenticated remote client.

    Attributes:
        access_key: The key that signed its call; None if it has other credentials.
    """

    caller: authenticator.Caller
    access_key: AccessKey | None = None


class RemoteAccess:
    """Authentication, authorization and quotas of remote clients.

    Args:
        guard: The guard of the process, which is on.
        sealing: Opens the secrets of access keys; None if there is no key for that.
    """

    def __init__(
        self,
        guard: Guard,
        settings: GatewaySettings,
        clock: Clock,
        sealing: SealingKeys | None,
    ) -> None:
        self._guard, self._settings, self._clock = guard, settings, clock
        self._keys = AccessKeys(sealing)
        self._revocable = RevocableCalls()
        self._throttle = ThrottleDelay(clock)
        self._keys.update(guard.mirror.values, guard.mirror.values)
        guard.mirror.on_change.append(self._changed)
        guard.on_change.append(self._revocable.recheck)

    def identify(self, context: Context) -> RemoteIdentity:
        """Return the client of a call.

        Raises:
            Unauthenticated: Its credentials are missing or not valid; the reason says which.
            NotServing: The grants were not read yet.
        """
        headers = {key: text_of(value) for key, value in context.invocation_metadata() or ()}
        authorization = headers.get("authorization", "")
        if not is_signature(authorization):
            return RemoteIdentity(self._guard.caller(context))
        try:
            signature = parse_signature(authorization, headers.get(DATE_HEADER, ""))
            if not signature.access_key:  # a client without credentials may send this
                return RemoteIdentity(self._guard.caller_by_connection(None, context))
            key = self._verified(signature)
        except BadSignature as error:
            raise Unauthenticated(f"{error}") from error
        caller = authenticator.Caller(
            key.identity, expire_unix_ms=key.expire_unix_ms, scopes=key.scopes
        )
        return RemoteIdentity(self._guard.caller_by_connection(caller, context), key)

    def _verified(self, signature: CallSignature) -> AccessKey:
        if not self._keys.usable:
            raise BadSignature("this gateway has no sealing_key_file, so it can't check signatures")
        now_unix_ms, name = self._clock.unix_ms(), signature.access_key
        key = self._keys.find(name, now_unix_ms)
        if key is None:
            raise BadSignature(f"access key {name[:64]!r} is unknown, was revoked or has expired")
        try:
            check_date(
                signature.date,
                now_unix_ms,
                window_ms=self._settings.signature_window_ms,
                local_times=self._settings.signature_local_times,
            )
            check_signature(signature, key.secrets(now_unix_ms))
        except BadSignature as error:
            raise Unauthenticated(
                f"access key {name}: {error}", facts={"identity": key.identity}
            ) from error
        return key

    def require(
        self, method: str, remote: RemoteIdentity, permissions: Iterable[Permission]
    ) -> None:
        """Return if the client has all of `permissions`.

        Raises:
            PermissionDenied: Some are missing; the error names them.
        """
        self._guard.check(_path(method), remote.caller, tuple(permissions))

    def permissions(self, method: str, call: RemoteCall) -> Sequence[Permission]:
        """Return the permissions that a call requires.

        Raises:
            Refused: It names a topic or a group that is not valid.
            LimitExceeded: It requires too many.
        """
        return permissions_of(self._guard.rule(_path(method)), call) or (ANY_GRANT,)

    async def begin(
        self, method: str, remote: RemoteIdentity, request: Any, context: Context
    ) -> Traffic | None:
        """Begin a call; return the traffic for `end`, which must follow, or None.

        Raises:
            Throttled: The client has reached a limit of its quota; raised after a delay.
        """
        rule = self._guard.rule(_path(method))
        traffic = rule.traffic if rule is not None else None
        if traffic is None:
            return None
        try:
            begun = self._guard.begin_call(remote.caller, traffic, request, context)
        except Throttled as error:
            raise await self._throttle.delayed(error, context) from None
        return traffic if begun else None

    def end(self, remote: RemoteIdentity, traffic: Traffic, bytes_read: int) -> None:
        """End a call for which `begin` has returned `traffic`."""
        self._guard.quotas.end(remote.caller.identity, traffic, bytes_read)

    def until_revoked(
        self, method: str, remote: RemoteIdentity, permissions: Sequence[Permission]
    ) -> AbstractContextManager[OpenCall]:
        """End the code inside with an error when a permission or the credentials end.

        Args:
            permissions: May grow while the call is open.
        """

        def refusal() -> BatonError | None:
            error = self._key_error(remote) or self._guard.recheck(
                _path(method), remote.caller, permissions
            )
            if error is not None:
                self.count_refusal(method, error, remote.caller.identity)
            return error

        left_s = self._guard.seconds_left(remote.caller)
        return self._revocable.until_revoked(refusal, left_s)

    def count_refusal(self, method: str, error: Exception, identity: str = "") -> None:
        """Count and audit a refusal for missing credentials or permissions."""
        if isinstance(error, BatonError):
            self._guard.count_rejection(_path(method), error, identity)

    def _key_error(self, remote: RemoteIdentity) -> Unauthenticated | None:
        key = remote.access_key
        if key is None:
            return None
        present = self._keys.find(key.name, self._clock.unix_ms())
        if present is not None and present.identity == key.identity:
            return None
        return Unauthenticated(
            f"access key {key.name} was revoked or has expired", facts={"identity": key.identity}
        )

    def _changed(self, keys: frozenset[str]) -> None:
        if self._keys.update(keys, self._guard.mirror.values):
            self._revocable.recheck()


def _path(method: str) -> str:
    return f"/{SERVICE}/{method}"
