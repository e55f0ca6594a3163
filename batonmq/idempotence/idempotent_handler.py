"""Claim, handle, mark as done: what makes a handler idempotent. Knows nothing of databases."""

from __future__ import annotations

import asyncio
import inspect
import logging
import secrets
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, cast

from batonmq._consumer.handler_results import RetryLater, failure_of
from batonmq._consumer.message import ReceivedMessage
from batonmq.errors import InvalidArgument
from batonmq.idempotence.store import DONE, Store

log = logging.getLogger(__name__)

Handler = Callable[[ReceivedMessage], Awaitable[object] | object]

RELEASE_TIMEOUT_MS = 2_000
"""A claim that can't be released in this time is left to expire."""


def by_origin(message: ReceivedMessage) -> str:
    """`topic/broker/queue/offset/message id` of where it was at first: one send, one message.

    The id tells a message from that of an earlier topic of the same name.
    """
    origin = message.origin
    return f"{origin.queue}/{origin.offset}/{origin.message_id}"


def by_key(message: ReceivedMessage) -> str:
    """The first of the keys that the producer gave: a second send with it is the same message.

    Raises:
        InvalidArgument: the message has no key.
    """
    if not message.keys:
        raise InvalidArgument(
            f"{message!r} has no key to be recognized by",
            remedy="Send with keys=[...], or use by_origin.",
            facts={"field": "keys"},
        )
    return message.keys[0]


def idempotent(
    handler: Handler,
    store: Store,
    *,
    claim_ms: int,
    done_ms: int,
    key: Callable[[ReceivedMessage], str] = by_origin,
) -> Callable[[ReceivedMessage], Coroutine[Any, Any, object]]:
    """A handler for `Consumer.run` that hands each message to `handler` at most once.

    It claims the message in `store`, calls `handler`, and marks the message as done. A message
    that is done is acknowledged and not handled. One that is claimed is tried again later. If
    `handler` raises, is cancelled or asks for a retry, the claim is released for the next
    delivery. If the process dies in between, the claim stands until it expires; then the message
    is handled again, as nobody can know how far it came.

    Args:
        handler: A coroutine function; or a plain one, which runs in a thread.
        store: Shared by all members of the group. What stands under a key must be this group's.
        claim_ms: How long a claim is good for; also the time limit of `handler`, which is
            cancelled then. A plain function can't be cancelled: it must be faster.
        done_ms: How long it is known that the message is done. Choose more than the time in which
            it may be delivered again, such as the topic's retention.
        key: What makes two deliveries the same message: `by_origin`, `by_key`, or your own.

    Returns:
        A coroutine function. It returns what `handler` does; None for a message that was done
        before; `RetryLater` while somebody else has a claim. It raises what `handler`, `key` and
        `store` raise, and TimeoutError after `claim_ms`.

    Raises:
        InvalidArgument: a time is not positive.
    """
    for field, value in (("claim_ms", claim_ms), ("done_ms", done_ms)):
        if value <= 0:
            raise InvalidArgument(f"{field} is {value}, not positive", facts={"field": field})
    stops_when_cancelled = inspect.iscoroutinefunction(handler)

    async def call(message: ReceivedMessage) -> object:
        if stops_when_cancelled:
            return await cast(Awaitable[object], handler(message))
        result = await asyncio.to_thread(handler, message)
        return await result if inspect.isawaitable(result) else result

    async def handle_once(message: ReceivedMessage) -> object:
        name, owner = key(message), secrets.token_hex(16)
        # Begun before the store counts: the handler ends before its claim does.
        async with asyncio.timeout(claim_ms / 1000):
            found = await store.put(name, owner, owner, claim_ms)
            if found == DONE:
                log.info("done before message=%r key=%s", message, name)
                return None
            if found != owner:
                return RetryLater(reason=f"{name} is claimed by another delivery")
            try:
                result = await call(message)
            except BaseException as error:
                if stops_when_cancelled or isinstance(error, Exception):
                    await _release(store, name, owner)
                raise
        if failure_of(result) is not None:
            await _release(store, name, owner)
        elif await store.put(name, owner, DONE, done_ms) != DONE:
            log.warning("claim lost before it was marked as done key=%s", name)
            return RetryLater(reason=f"{name} took too long and is claimed by another delivery")
        return result

    return handle_once


async def _release(store: Store, name: str, owner: str) -> None:
    """Free the claim if that works; the handler's failure matters more than this one."""
    try:
        async with asyncio.timeout(RELEASE_TIMEOUT_MS / 1000):
            await store.remove(name, owner)
    except Exception:
        log.warning("claim not released, it will expire key=%s", name, exc_info=True)
