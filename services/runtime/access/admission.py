"""Lets calls through to their servicers, or not, as the guard says; ends what is held when it may
no longer be.

A batched call whose items are refused one by one reaches its servicer without those items.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import grpc
import grpc.aio

from batonmq._common.rpc import abort
from batonmq.errors import BatonError
from batonmq_server.runtime.access.guard import Caller, Guard, Metadata
from batonmq_server.runtime.access.permissions import (
    ANY_GRANT,
    Permission,
    permission_denied,
)
from batonmq_server.runtime.access.rules import PerItemRule

_BY_CHARACTERS_MAX = 200
"""The least that a request's `by` may have."""

Context = grpc.aio.ServicerContext[Any, Any]


class Admission:
    """Stands before the servicers of one process.

    Args:
        guard: It is on.
        held: Names of methods without a stream whose calls may be held.
    """

    def __init__(self, guard: Guard, held: frozenset[str]) -> None:
        self._guard, self._held = guard, held
        self._open: dict[asyncio.Task[Any], Callable[[], BatonError | None]] = {}
        self._ended: dict[asyncio.Task[Any], BatonError] = {}
        guard.on_change.append(self._recheck)

    def unread(self, path: str, metadata: Metadata) -> BatonError | None:
        """Why a call is refused before its request is read; None if that has to be seen."""
        error = self._guard.authentication_error(metadata)
        if error is not None:
            self._guard.count_rejection(_service(path), error)
        return error

    def unary(self, path: str, call: Any) -> Any:
        """`call`, for those who may."""
        rule, held = self._guard.rule(path), path.rpartition("/")[2] in self._held
        each = rule.per_item if rule is not None else None

        async def admitted(request: Any, context: Context) -> Any:
            with self._counted(path):
                caller, needs = self._admit(path, request, context)
            _sign(request, caller)
            if each is not None:
                return await self._by_item(path, caller, each, call, request, context)
            if not held:
                return await call(request, context)
            with self._until_revoked(path, caller, needs):
                return await call(request, context)

        return admitted

    def stream(self, path: str, call: Any) -> Any:
        """`call`, for those who may, as long as they may."""

        async def admitted(request: Any, context: Context) -> AsyncIterator[Any]:
            with self._counted(path):
                caller, needs = self._admit(path, request, context)
            with self._until_revoked(path, caller, needs):
                async for item in call(request, context):
                    yield item

        return admitted

    def foreign(self, path: str, handler: grpc.RpcMethodHandler[Any, Any]) -> Any:
        """A handler that is not ours, for those who may."""
        codec = (handler.request_deserializer, handler.response_serializer)
        if handler.unary_unary is not None:
            call = _telling(self.unary(path, handler.unary_unary))
            return grpc.unary_unary_rpc_method_handler(call, *codec)
        if handler.unary_stream is not None:
            stream = _telling_stream(self.stream(path, handler.unary_stream))
            return grpc.unary_stream_rpc_method_handler(stream, *codec)
        assert handler.stream_stream is not None, f"{path} has no known form"
        stream = _telling_stream(self.stream(path, handler.stream_stream))
        return grpc.stream_stream_rpc_method_handler(stream, *codec)

    def _admit(
        self, path: str, request: Any, context: Context
    ) -> tuple[Caller, Sequence[Permission]]:
        """Who calls, and what that needed.

        Raises:
            Unauthenticated, PermissionDenied, NotServing: the call is refused.
        """
        caller, rule = self._guard.caller(context), self._guard.rule(path)
        needs = tuple(rule.permissions(request)) if rule is not None else ()
        if not needs and not (rule is not None and rule.known):
            needs = (ANY_GRANT,)
        self._guard.check(path, caller, needs)
        return caller, needs

    async def _by_item(
        self,
        path: str,
        caller: Caller,
        each: PerItemRule,
        call: Any,
        request: Any,
        context: Context,
    ) -> Any:
        items = getattr(request, each.items)
        needs = [each.permission(item) for item in items]
        lacking = self._guard.missing(path, caller, needs)
        if not lacking:
            return await call(request, context)
        allowed = [need not in lacking for need in needs]
        if not any(allowed):
            with self._counted(path):
                raise permission_denied(caller.identity, list(lacking))
        rest = type(request)()
        rest.CopyFrom(request)
        del getattr(rest, each.items)[:]
        getattr(rest, each.items).extend(
            item for item, good in zip(items, allowed, strict=True) if good
        )
        answer = await call(rest, context)
        outcomes = iter(list(getattr(answer, each.outcomes)))
        del getattr(answer, each.outcomes)[:]
        for need, good in zip(needs, allowed, strict=True):
            if good:
                outcome = next(outcomes)
            else:
                error = permission_denied(caller.identity, [need])
                self._guard.count_rejection(_service(path), error)
                outcome = each.rejected(error)
            getattr(answer, each.outcomes).append(outcome)
        return answer

    @contextmanager
    def _until_revoked(
        self, path: str, caller: Caller, needs: Sequence[Permission]
    ) -> Iterator[None]:
        """End what runs inside once the caller may no longer do it."""
        task = asyncio.current_task()
        assert task is not None
        self._open[task] = partial(self._guard.recheck, path, caller, needs)
        try:
            yield
        except asyncio.CancelledError:
            error = self._ended.get(task)
            if error is None:
                raise
            task.uncancel()
            with self._counted(path):
                raise error from None
        finally:
            self._open.pop(task, None)
            self._ended.pop(task, None)

    def _recheck(self) -> None:
        for task, refusal in self._open.items():
            if task not in self._ended and (error := refusal()) is not None:
                self._ended[task] = error
                task.cancel()

    @contextmanager
    def _counted(self, path: str) -> Iterator[None]:
        try:
            yield
        except BatonError as error:
            self._guard.count_rejection(_service(path), error)
            raise


def _telling(call: Any) -> Any:
    """`call`, which tells its caller why he is refused."""

    async def told(request: Any, context: Context) -> Any:
        try:
            return await call(request, context)
        except BatonError as error:
            await abort(context, error)

    return told


def _telling_stream(call: Any) -> Any:
    """The same of a call that answers as a stream."""

    async def told(request: Any, context: Context) -> AsyncIterator[Any]:
        try:
            async for item in call(request, context):
                yield item
        except BatonError as error:
            await abort(context, error)

    return told


def _sign(request: Any, caller: Caller) -> None:
    """What is recorded of who did something is who called, whatever the request says."""
    if getattr(request, "by", ""):
        request.by = caller.identity[:_BY_CHARACTERS_MAX]


def _service(path: str) -> str:
    return path.split("/")[1].rpartition(".")[2]
