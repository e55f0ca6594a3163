"""Asks the rules at the edge: who calls, what that needs, whether it is granted.

Who calls is told by the bearer token, if there is one, else by the client certificate. What is
granted is followed in etcd; while that is away the last that was known holds. Refusals are counted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import grpc.aio
from prometheus_client import CollectorRegistry, Counter, Gauge

from batonmq.errors import BatonError, NotServing, PermissionDenied, Unauthenticated
from batonmq_server.runtime.access import stored_access
from batonmq_server.runtime.access.permissions import (
    SERVICE_PREFIX,
    Authorizer,
    Permission,
)
from batonmq_server.runtime.access.rules import COMMON_RULES, AccessRule, AccessRules
from batonmq_server.runtime.etcd.mirror import EtcdMirror
from batonmq_server.runtime.etcd.session import EtcdSession

log = logging.getLogger(__name__)

_AUTHORIZATION, _BEARER = "authorization", "bearer "
_URI = "peer_uri"
_NAMES = (_URI, "peer_dns", "x509_common_name")
"""Of a certificate, the first that is there is who it stands for. People often get the common name
they ask for, so it makes nobody a service."""

Context = grpc.aio.ServicerContext[Any, Any]
Metadata = Iterable[tuple[str, str | bytes]]


class PermissionCheck(Protocol):
    """Asks whether the caller of a call has all of some needs; raises PermissionDenied if not."""

    def __call__(self, context: Context, *needs: Permission) -> None:
        """Nothing, if it has."""
        ...


class Caller(NamedTuple):
    """Who calls.

    Attributes:
        digest: Of the token that said so; empty if a certificate did.
    """

    identity: str
    digest: str = ""


class Guard:
    """Of one process.

    Args:
        admins: Identities that are admin on the cluster whatever is granted.
        on: Without, nothing is followed and nobody is refused.
        certificates: Whether clients are asked for one. If not, only a token tells who calls.
    """

    def __init__(
        self,
        etcd: EtcdSession,
        registry: CollectorRegistry,
        *,
        on: bool = False,
        admins: Iterable[str] = (),
        certificates: bool = True,
    ) -> None:
        self._certificates = certificates
        self.on, self._rules = on, dict(COMMON_RULES)
        self.admins = tuple(name.strip() for name in admins)
        self.authorizer = Authorizer(self.admins)
        self.mirror = EtcdMirror(etcd, stored_access.PREFIX)
        self.mirror.on_change.append(self._changed)
        self.on_change: list[Callable[[], None]] = []
        self._refused = Counter(
            "baton_access_refused",
            "Calls, and items of calls, that were refused because of who made them; what was held "
            "and ended when access was revoked included.",
            ("service", "reason"),
            registry=registry,
        )
        Gauge(
            "baton_access_on",
            "Whether calls are held against grants: 1, or 0 where access is off.",
            registry=registry,
        ).set(on)

    def add_rules(self, rules: AccessRules) -> None:
        """Take the rules of the methods that are served, and tell the log whether they hold."""
        self._rules.update(rules)
        if self.on:
            log.info("access is on admins=%s", ",".join(self.admins))
        else:
            log.warning("ACCESS IS OFF: whoever gets a connection can read and write everything")

    def rule(self, path: str) -> AccessRule | None:
        """The rule of a method by its full path."""
        return self._rules.get(path)

    def caller(self, context: Context) -> Caller:
        """Who calls.

        Raises:
            Unauthenticated: nobody that is known.
            NotServing: what is granted was not read yet.
        """
        if (caller := self._by_token(context.invocation_metadata() or ())) is not None:
            return caller
        found = context.auth_context()
        for name in _NAMES:
            if values := found.get(name):
                identity = next(iter(values)).decode(errors="replace")
                if name != _URI and identity.startswith(SERVICE_PREFIX):
                    raise Unauthenticated(
                        "a service has its identity as the URI of its certificate"
                    )
                return Caller(identity)
        raise Unauthenticated("the call brings no bearer token and no client certificate")

    def authentication_error(self, metadata: Metadata) -> BatonError | None:
        """Why nobody who calls so may call anything: known before what is asked is read."""
        try:
            if self._by_token(metadata) is None and not self._certificates:
                raise Unauthenticated("the call brings no bearer token")
        except BatonError as error:
            return error
        return None

    def check(self, path: str, caller: Caller, needs: Sequence[Permission]) -> None:
        """Refuse a caller who may not call a method, or lacks one of `needs`.

        Raises:
            PermissionDenied: so it is.
        """
        rule = self._rules.get(path)
        if rule is None:
            raise PermissionDenied(f"no rule says who may call {path}")
        if self._is_one_of(rule, caller):
            return
        if rule.private:
            names = " and ".join(sorted(rule.services))
            raise PermissionDenied(
                f"{caller.identity} is not {names}, which alone may call {path}",
                remedy="Services call this of each other.",
                facts={"identity": caller.identity, "role": "", "resource": ""},
            )
        self.authorizer.check(caller.identity, needs)

    def missing(self, path: str, caller: Caller, needs: Iterable[Permission]) -> list[Permission]:
        """Those of `needs`, one of each item of a batched call, that the caller does not have."""
        if self._is_one_of(self._rules[path], caller):
            return []
        return self.authorizer.missing(caller.identity, needs)

    def recheck(self, path: str, caller: Caller, needs: Sequence[Permission]) -> BatonError | None:
        """Why a call that was let in would not be now."""
        try:
            if caller.digest and self.authorizer.identity_of(caller.digest) != caller.identity:
                raise Unauthenticated("the bearer token stands for somebody else now")
            self.check(path, caller, needs)
        except BatonError as error:
            return error
        return None

    def require(self, context: Context, *needs: Permission) -> None:
        """What a servicer asks for itself, once it knows what a call is about.

        Raises:
            PermissionDenied: the caller lacks it.
        """
        if self.on:
            self.authorizer.check(self.caller(context).identity, needs)

    def allows(self, context: Context, need: Permission) -> bool:
        """Whether the caller has it: for answers that tell everybody as much as he may know."""
        return not self.on or self.authorizer.allows(self.caller(context).identity, need)

    def caller_identity(self, context: Context) -> str:
        """Identity of the caller; empty while access is off."""
        return self.caller(context).identity if self.on else ""

    def count_rejection(self, service: str, error: BatonError) -> None:
        """Count a refusal, if it was because of who has called."""
        if isinstance(error, Unauthenticated | PermissionDenied):
            self._refused.labels(service, error.reason).inc()

    def _is_one_of(self, rule: AccessRule, caller: Caller) -> bool:
        prefix, _, name = caller.identity.partition(":")
        return f"{prefix}:" == SERVICE_PREFIX and name in rule.services

    def _by_token(self, metadata: Metadata) -> Caller | None:
        """Who calls by the token; None if there is none.

        Raises:
            Unauthenticated, NotServing: as `caller`.
        """
        if not self.mirror.revision:
            raise NotServing("grants are not read yet", retry_after_ms=200)
        for key, value in metadata:
            if key == _AUTHORIZATION:
                return self._of_token(value)
        return None

    def _of_token(self, value: str | bytes) -> Caller:
        text = value if isinstance(value, str) else value.decode(errors="replace")
        if text[: len(_BEARER)].lower() != _BEARER:
            raise Unauthenticated("the authorization of the call is no bearer token")
        digest = stored_access.digest_of(text[len(_BEARER) :].strip())
        return Caller(self.authorizer.identity_of(digest), digest)

    def _changed(self, keys: frozenset[str]) -> None:
        for key in keys:
            stored = self.mirror.values.get(key)
            stored_access.apply(self.authorizer, key, stored.value if stored is not None else b"")
        for callback in self.on_change:
            callback()
