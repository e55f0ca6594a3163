"""Admission of calls: rejects calls that the guard does not allow, before their servicer runs.

It ends long polls and streams when their permission is revoked. A batched call whose items are
rejected one by one reaches its servicer without these items.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, aclosing, contextmanager
from typing import Any

import grpc

from batonmq.errors import BatonError, LimitExceeded, Throttled
from batonmq_server.runtime.access import owner
from batonmq_server.runtime.access.authenticator import Caller, Context, Metadata
from batonmq_server.runtime.access.guard import Guard
from batonmq_server.runtime.access.permissions import (
    ANY_GRANT,
    SERVICE_PREFIX,
    AccessRole,
    Permission,
    permission_denied,
)
from batonmq_server.runtime.access.revocable_calls import OpenCall, RevocableCalls
from batonmq_server.runtime.access.rules import PerItemRule, permissions_of
from batonmq_server.runtime.access.throttle_delay import ThrottleDelay

_BY_CHARACTERS_MAX = 200
"""Shortest limit of the field `by` in any request."""
_ITEMS_MAX = 10_000
"""Items of a batched call whose permissions are checked; no servicer takes more items."""


class Admission:
    """Wraps the handlers of one process.

    Args:
        guard: A guard that is on.
        long_polls: Names of the methods without a stream that are long polls.
        pause: Pauses a connection, named by its client, when its caller ignores its quota.
    """

    def __init__(
        self,
        guard: Guard,
        long_polls: frozenset[str],
        pause: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._guard, self._long_polls = guard, long_polls
        self._revocable = RevocableCalls()
        self._throttle = ThrottleDelay(guard.clock, pause)
        guard.on_change.append(self._revocable.recheck)

    def covers(self, path: str) -> bool:
        """Return whether calls of a method are admitted here, and not by their servicer."""
        return path.split("/")[1] not in self._guard.own_admission

    def early_error(self, path: str, metadata: Metadata) -> BatonError | None:
        """Return the error that is found before the request is read, and count it; None if none.

        It says that the caller is not authenticated, or has a debt under its quota.
        """
        try:
            caller = self._guard.early_caller(metadata)
        except BatonError as error:
            self._guard.count_rejection(path, error)
            return error
        rule = self._guard.rule(path)
        if caller is None or rule is None or rule.traffic is None:
            return None
        return self._guard.debt_error(caller, rule.traffic)

    async def delayed(self, error: BatonError, context: Context) -> BatonError:
        """Return the error of a call that was rejected; if it was throttled, after a delay."""
        if not isinstance(error, Throttled):
            return error
        return await self._throttle.delayed(error, context)

    def unary(self, path: str, call: Any) -> Any:
        """Return `call` with admission, for a call with one response."""
        rule, long_poll = self._guard.rule(path), path.rpartition("/")[2] in self._long_polls
        per_item = rule.per_item if rule is not None else None
        traffic = rule.traffic if rule is not None else None

        async def answer(
            request: Any, context: Context, caller: Caller, permissions: Sequence[Permission]
        ) -> Any:
            if per_item is not None:
                return await self._by_item(path, caller, per_item, call, request, context)
            if not long_poll:
                with self._audited(path, caller, permissions, request):
                    return await call(request, context)
            with self._until_revoked(path, caller, permissions):
                return await call(request, context)

        async def admitted(request: Any, context: Context) -> Any:
            with self._counted(path):
                caller, permissions = self._admit(path, request, context)
            _sign(request, caller)
            try:
                counts = traffic is not None and self._guard.begin_call(
                    caller, traffic, request, context
                )
            except Throttled as error:
                raise await self._throttle.delayed(error, context) from None
            if traffic is None or not counts:
                return await answer(request, context, caller, permissions)
            answered = None
            try:
                answered = await answer(request, context, caller, permissions)
                return answered
            finally:
                self._guard.end_call(caller, traffic, answered)

        return admitted

    def stream(self, path: str, call: Any, *, until_revoked: bool = True) -> Any:
        """Return a streaming `call` with admission.

        The rule of a method with a stream of requests has the same permissions for every request:
        it is applied once, to the stream.

        Args:
            until_revoked: End the stream when a permission is revoked.
        """

        async def admitted(request: Any, context: Context) -> AsyncIterator[Any]:
            with self._counted(path):
                caller, permissions = self._admit(path, request, context)
            if hasattr(request, "__aiter__"):
                request = _signed(request, caller)
            else:
                _sign(request, caller)
            responses = call(request, context)
            with ExitStack() as until:
                if until_revoked:
                    opened = until.enter_context(self._until_revoked(path, caller, permissions))
                    responses = opened.items(responses)
                async with aclosing(responses) as items:
                    async for item in items:
                        yield item

        return admitted

    def third_party(self, path: str, handler: grpc.RpcMethodHandler[Any, Any]) -> Any:
        """Return the handler of a third-party service, such as health checks, with admission.

        It raises BatonError.
        """
        codec = (handler.request_deserializer, handler.response_serializer)
        if handler.unary_unary is not None:
            call = self.unary(path, handler.unary_unary)
            return grpc.unary_unary_rpc_method_handler(call, *codec)
        if handler.unary_stream is not None:
            stream = self.stream(path, handler.unary_stream)
            return grpc.unary_stream_rpc_method_handler(stream, *codec)
        assert handler.stream_stream is not None, f"{path} is neither unary nor a stream"
        stream = self.stream(path, handler.stream_stream)
        return grpc.stream_stream_rpc_method_handler(stream, *codec)

    def _admit(
        self, path: str, request: Any, context: Context
    ) -> tuple[Caller, Sequence[Permission]]:
        """Return the caller and the permissions that the call requires.

        Raises:
            Unauthenticated, PermissionDenied, NotServing, LimitExceeded: the call is rejected.
        """
        caller, rule = self._guard.caller(context), self._guard.rule(path)
        permissions = permissions_of(rule, request)
        if not permissions and not (rule is not None and rule.known):
            permissions = (ANY_GRANT,)
        self._guard.check(path, caller, permissions)
        return caller, permissions

    async def _by_item(
        self,
        path: str,
        caller: Caller,
        per_item: PerItemRule,
        call: Any,
        request: Any,
        context: Context,
    ) -> Any:
        items = getattr(request, per_item.items)
        if len(items) > _ITEMS_MAX:
            raise LimitExceeded(
                f"{per_item.items} must be at most {_ITEMS_MAX}, got {len(items)}",
                facts={"field": per_item.items, "limit": _ITEMS_MAX, "actual": len(items)},
            )
        permissions = [per_item.permission(item) for item in items]
        lacking = dict.fromkeys(self._guard.missing(path, caller, permissions))
        if not lacking:
            return await call(request, context)
        allowed = [one not in lacking for one in permissions]
        if not any(allowed):
            with self._counted(path):
                raise permission_denied(caller.identity, list(lacking), scoped=bool(caller.scopes))
        rest = type(request)()
        rest.CopyFrom(request)
        del getattr(rest, per_item.items)[:]
        getattr(rest, per_item.items).extend(
            item for item, good in zip(items, allowed, strict=True) if good
        )
        answer = await call(rest, context)
        outcomes = iter(list(getattr(answer, per_item.outcomes)))
        del getattr(answer, per_item.outcomes)[:]
        for permission, good in zip(permissions, allowed, strict=True):
            if good:
                outcome = next(outcomes)
            else:
                error = permission_denied(caller.identity, [permission], scoped=bool(caller.scopes))
                self._guard.count_rejection(path, error)
                outcome = per_item.rejected(error)
            getattr(answer, per_item.outcomes).append(outcome)
        return answer

    @contextmanager
    def _audited(
        self, path: str, caller: Caller, permissions: Sequence[Permission], request: Any
    ) -> Iterator[None]:
        """Count a refusal by the servicer inside; audit the call if it needs the role admin."""
        needs = [one for one in permissions if one.roles == (AccessRole.ADMIN,)]
        if not needs or caller.identity.startswith(SERVICE_PREFIX):
            with self._counted(path, caller.identity):
                yield
            return
        reason = "UNKNOWN"
        try:
            yield
            reason = "OK"
        except BatonError as error:
            reason = error.reason
            self._guard.count_rejection(path, error, caller.identity)
            raise
        finally:
            for audit in self._guard.audits:
                audit.operated(path, caller.identity, needs, request, reason)

    @contextmanager
    def _until_revoked(
        self, path: str, caller: Caller, permissions: Sequence[Permission]
    ) -> Iterator[OpenCall]:
        """End the code inside when a permission or credential of the caller ends."""

        def refusal() -> BatonError | None:
            error = self._guard.recheck(path, caller, permissions)
            if error is not None:
                self._guard.count_rejection(path, error, caller.identity)
            return error

        with self._revocable.until_revoked(refusal, self._guard.seconds_left(caller)) as opened:
            yield opened

    @contextmanager
    def _counted(self, path: str, identity: str = "") -> Iterator[None]:
        try:
            yield
        except BatonError as error:
            self._guard.count_rejection(path, error, identity)
            raise


async def _signed(requests: AsyncIterator[Any], caller: Caller) -> AsyncIterator[Any]:
    """Yield the requests of a stream, with the identity of the caller."""
    async for request in requests:
        _sign(request, caller)
        yield request


def _sign(request: Any, caller: Caller) -> None:
    """Write the authenticated identity of the caller into the request.

    It replaces the field `by`, if that is used, and the owner numbers.
    """
    owner.sign(request, caller.identity)
    if getattr(request, "by", ""):
        request.by = caller.identity[:_BY_CHARACTERS_MAX]
