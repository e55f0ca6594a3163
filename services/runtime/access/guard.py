"""The guard of a process: authenticates callers and checks the access rules of methods.

Grants, tokens and blocks are followed in etcd; while it does not answer, the last known ones hold.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

from prometheus_client import CollectorRegistry

from batonmq.errors import BatonError, NotServing, PermissionDenied, Throttled, Unauthenticated
from batonmq_server.runtime.access import stored_access, stored_quotas
from batonmq_server.runtime.access.audit import AuditSink
from batonmq_server.runtime.access.authenticator import (
    Authenticator,
    Caller,
    Context,
    Metadata,
)
from batonmq_server.runtime.access.blocks import BlockList
from batonmq_server.runtime.access.oidc import OidcTokens
from batonmq_server.runtime.access.permissions import SERVICE_PREFIX, Authorizer, Permission
from batonmq_server.runtime.access.quotas import QuotaLedger, Traffic
from batonmq_server.runtime.access.rules import COMMON_RULES, AccessRule, AccessRules
from batonmq_server.runtime.etcd.mirror import EtcdMirror
from batonmq_server.runtime.etcd.session import EtcdSession
from batonmq_server.runtime.log_limiter import LogLimiter
from batonmq_server.runtime.metrics import AccessMetrics

log = logging.getLogger(__name__)

_ANSWER_BYTES_DEFAULT = 1024 * 1024
"""What `bytes_max` of 0 means in calls that read messages."""
_LINE_INTERVAL_MS = 60_000
"""Time between two lines of log about one limit of one identity."""


class PermissionCheck(Protocol):
    """Checks the permissions of a caller inside a servicer; see `Guard.require`."""

    def __call__(self, context: Context, *permissions: Permission) -> None:
        """Return if every permission is granted; raise PermissionDenied otherwise."""
        ...


def _limit_answer(request: Any, bytes_max: int) -> None:
    """Let the answer have at most what a quota allows in a second, so that no long debt arises."""
    if hasattr(request, "bytes_max"):
        request.bytes_max = min(request.bytes_max or _ANSWER_BYTES_DEFAULT, max(bytes_max, 1))


class Guard:
    """Authentication and authorization of one process.

    Args:
        on: Whether access control is on. If not, every call is allowed.
        admins: Identities with the role admin on the cluster, without a grant.
        certificates: Whether clients must show a certificate. If not, only tokens identify callers.
        oidc: The tokens of the OIDC issuer; None for none.

    Attributes:
        audits: Record refused calls and calls of operators.
        own_admission: Full names of services whose servicers check their callers themselves.
        quotas: The quotas of all identities; without effect while access control is off.
        on_change: Called when grants or credentials have changed; see `subscribe`.
    """

    def __init__(
        self,
        etcd: EtcdSession,
        registry: CollectorRegistry,
        *,
        on: bool = False,
        admins: Iterable[str] = (),
        certificates: bool = True,
        oidc: OidcTokens | None = None,
    ) -> None:
        self.audits: list[AuditSink] = []
        self.own_admission: frozenset[str] = frozenset()
        self._etcd = etcd
        self.on, self._rules = on, dict(COMMON_RULES)
        self.admins = tuple(name.strip() for name in admins)
        self.authorizer = Authorizer(self.admins)
        self.blocks = BlockList()
        self._authenticator = Authenticator(
            self.authorizer, self.blocks, etcd.clock, certificates=certificates, oidc=oidc
        )
        if oidc is not None:
            oidc.keys.on_change.append(self._credentials_changed)
        self.mirror = EtcdMirror(etcd, stored_access.PREFIX)
        self.mirror.on_change.append(self._changed)
        self.on_change: list[Callable[[], None]] = []
        self._metrics = AccessMetrics(registry, on=on)
        self.clock = etcd.clock
        self.quotas = QuotaLedger(self._count_throttled)
        self.quota_mirror = EtcdMirror(etcd, stored_quotas.PREFIX)
        self.quota_mirror.on_change.append(self._quotas_changed)
        self._throttled_lines = LogLimiter(etcd.clock.monotonic_ms, _LINE_INTERVAL_MS)

    def add_rules(self, rules: AccessRules, own_admission: frozenset[str] = frozenset()) -> None:
        """Add the rules of the methods that are served, and log whether access control is on.

        Args:
            own_admission: Services whose servicers check their callers themselves.
        """
        self._rules.update(rules)
        self.own_admission |= own_admission
        if self.on:
            log.info("access is on admins=%s", ",".join(self.admins))
        else:
            log.warning("ACCESS IS OFF: every client that connects can read and write everything")

    def require_tls_for_tokens(self) -> None:
        """Refuse bearer tokens on connections without TLS, as the process has a port for them."""
        self._authenticator.tokens_need_tls = True

    def rule(self, path: str) -> AccessRule | None:
        """Return the rule of a method by its full path; None if it has none."""
        return self._rules.get(path)

    def caller(self, context: Context) -> Caller:
        """Return the caller of a call.

        Raises:
            Unauthenticated: neither a valid token nor a certificate identifies it, or it is
                blocked.
            NotServing: the grants, or the keys of the OIDC issuer, were not read yet.
        """
        self._check_read()
        return self._authenticator.caller(context)

    def caller_by_connection(self, caller: Caller | None, context: Context) -> Caller:
        """Return a caller, identified by other means than a token, with its certificate.

        Args:
            caller: None if only the certificate of its connection names it.

        Raises:
            Unauthenticated: it has no certificate, or is blocked.
            NotServing: the grants were not read yet.
        """
        self._check_read()
        return self._authenticator.by_connection(caller, context)

    def early_caller(self, metadata: Metadata) -> Caller | None:
        """Return the caller that a token names, before the request is read; None without a token.

        Raises:
            Unauthenticated, NotServing: these metadata are not those of an authenticated caller.
        """
        self._check_read()
        return self._authenticator.early_caller(metadata)

    def check(self, path: str, caller: Caller, permissions: Sequence[Permission]) -> None:
        """Return if the caller may call the method and has all of `permissions`.

        Raises:
            PermissionDenied: the method is not for this caller, or permissions are missing.
        """
        rule = self._rules.get(path)
        if rule is None:
            raise PermissionDenied(f"{path} has no access rule, so no caller may call it")
        if self._is_one_of(rule, caller):
            return
        if rule.private:
            names = " and ".join(sorted(rule.services))
            raise PermissionDenied(
                f"only {names} may call {path}, not {caller.identity}",
                remedy="Call another method: this one is for calls between services.",
                facts={"identity": caller.identity, "role": "", "resource": ""},
            )
        self.authorizer.check(caller.identity, permissions, caller.scopes)

    def missing(
        self, path: str, caller: Caller, permissions: Iterable[Permission]
    ) -> list[Permission]:
        """Return those of `permissions`, one per item of a batched call, that the caller lacks."""
        if self._is_one_of(self._rules[path], caller):
            return []
        return self.authorizer.missing(caller.identity, permissions, caller.scopes)

    def recheck(
        self, path: str, caller: Caller, permissions: Sequence[Permission]
    ) -> BatonError | None:
        """Return why a call that was admitted would be rejected now; None if it would not."""
        try:
            self._authenticator.check_still_valid(caller)
            self.check(path, caller, permissions)
        except BatonError as error:
            return error
        return None

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` after each change of grants or credentials.

        Returns:
            Ends that. A further call of it has no effect.
        """
        entry = partial(callback)  # differs from any other, also from one of the same callback
        self.on_change.append(entry)

        def unsubscribe() -> None:
            if entry in self.on_change:
                self.on_change.remove(entry)

        return unsubscribe

    def require(self, context: Context, *permissions: Permission) -> None:
        """Return if the caller has all of `permissions`, or access control is off.

        For servicers that know only during the call which permissions it requires.

        Raises:
            PermissionDenied: permissions are missing.
        """
        if self.on:
            caller = self.caller(context)
            self.authorizer.check(caller.identity, permissions, caller.scopes)

    def permissions_of(self, context: Context) -> Callable[[Permission], bool]:
        """Return the check whether the caller has a permission, for filtered answers.

        The caller is authenticated once, for any number of permissions.
        """
        if not self.on:
            return lambda _: True
        caller = self.caller(context)
        allows, identity, scopes = self.authorizer.allows, caller.identity, caller.scopes
        return lambda permission: allows(identity, permission, scopes)

    def seconds_left(self, caller: Caller) -> float | None:
        """Return the time until the token of the caller expires; None if it does not."""
        if not caller.expire_unix_ms:
            return None
        return max(0, caller.expire_unix_ms - self._etcd.clock.unix_ms()) / 1000

    def caller_identity(self, context: Context) -> str:
        """Return the identity of the caller; empty while access control is off."""
        return self.caller(context).identity if self.on else ""

    def begin_call(self, caller: Caller, traffic: Traffic, request: Any, context: Context) -> bool:
        """Begin a call that writes or reads messages; return whether `end_call` must follow it.

        Raises:
            Throttled: the caller has reached a limit of its quota.
        """
        if not self.quotas.limits(caller.identity):
            return False  # the size of a request is not free: protobuf encodes it for that
        size = request.ByteSize() if traffic is Traffic.PRODUCE else 0
        now_ms = self.clock.monotonic_ms()
        begun = self.quotas.begin(caller.identity, traffic, size, context.peer() or "", now_ms)
        if begun and (rate := self.quotas.read_rate(caller.identity)) is not None:
            _limit_answer(request, rate)
        return begun

    def debt_error(self, caller: Caller, traffic: Traffic) -> Throttled | None:
        """Return the quota error that is found before the request is read; None if there is none.

        Only a token names the caller so early; other callers are checked by `begin_call`.
        """
        return self.quotas.debt_error(caller.identity, traffic, self.clock.monotonic_ms())

    def end_call(self, caller: Caller, traffic: Traffic, answer: Any) -> None:
        """End a call for which `begin_call` returned True; `answer` is None if it failed."""
        size = answer.ByteSize() if answer is not None and traffic is Traffic.CONSUME else 0
        self.quotas.end(caller.identity, traffic, size)

    def _count_throttled(self, identity: str, limit: str) -> None:
        self._metrics.throttled.labels(limit).inc()
        if count := self._throttled_lines.count((identity, limit)):
            log.info("calls throttled identity=%s quota=%s count=%d", identity, limit, count)

    def count_rejection(self, path: str, error: BatonError, identity: str = "") -> None:
        """Count and audit an error of authentication or authorization; ignore other errors.

        Args:
            identity: Identity of the caller, if the error does not name it.
        """
        if isinstance(error, Unauthenticated | PermissionDenied):
            service = path.split("/")[1].rpartition(".")[2]
            self._metrics.refused.labels(service, error.reason).inc()
            for audit in self.audits:
                audit.refused(path, str(error.facts.get("identity", identity)), error)

    def _is_one_of(self, rule: AccessRule, caller: Caller) -> bool:
        prefix, _, name = caller.identity.partition(":")
        return f"{prefix}:" == SERVICE_PREFIX and name in rule.services

    def _check_read(self) -> None:
        if not self.mirror.revision:
            raise NotServing("grants were not read from etcd yet", retry_after_ms=200)

    def _quotas_changed(self, keys: frozenset[str]) -> None:
        for key in keys:
            stored = self.quota_mirror.values.get(key)
            stored_quotas.apply(self.quotas, key, stored.value if stored is not None else None)

    def _changed(self, keys: frozenset[str]) -> None:
        for key in keys:
            stored = self.mirror.values.get(key)
            value = stored.value if stored is not None else b""
            stored_access.apply(self.authorizer, self.blocks, key, value)
        self._credentials_changed()

    def _credentials_changed(self) -> None:
        for callback in tuple(self.on_change):
            callback()
