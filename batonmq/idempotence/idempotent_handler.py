"""Idempotent handlers: claim a message in a store, handle it, mark it as done."""

from __future__ import annotations

import inspect
import logging
import secrets
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, cast

from batonmq._common import timeouts
from batonmq._common.threads import run_in_thread
from batonmq._consumer.handler_adapters import check_handler
from batonmq._consumer.handler_results import RetryLater, failure_of
from batonmq._consumer.message import ReceivedMessage
from batonmq.errors import InvalidArgument
from batonmq.idempotence.store import DONE, Store

log = logging.getLogger(__name__)

Handler = Callable[[ReceivedMessage], Awaitable[object] | object]

RELEASE_TIMEOUT_MS = 2_000
"""Timeout of releasing a claim; after it the claim is left to expire."""


def by_origin(message: ReceivedMessage) -> str:
    """Return `topic/broker/queue/offset/message id` of the original message.

    Retries and redriven copies have the same key; two sends have different keys. The message id
    distinguishes messages of an earlier topic with the same name.
    """
    origin = message.origin
    return f"{origin.queue}/{origin.offset}/{origin.message_id}"


def by_key(message: ReceivedMessage) -> str:
    """Return the first key of the message; two sends with the same key are the same message.

    Raises:
        InvalidArgument: The message has no key.
    """
    if not message.keys:
        raise InvalidArgument(
            f"{message!r} has no key, which by_key requires",
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
    """Return a handler for `Consumer.run` that skips messages which are marked as done.

    It claims the message in `store`, calls `handler`, and marks the message as done. A message that
    is done is acknowledged without a call. A message that another delivery has claimed is retried
    later. If `handler` raises, is cancelled or requests a retry, the claim is released for the next
    delivery. If the process dies while it handles the message, the claim expires after `claim_ms`
    and the message is handled again, because its effects are unknown.

    Args:
        handler: A coroutine function, or a plain function, which runs in a thread.
        store: Shared by all members of the group; its keys must belong to this group alone.
        claim_ms: Lifetime of a claim, and timeout of `handler`, which is then cancelled. A plain
            function can't be cancelled, so it must be faster.
        done_ms: Time for which a message stays marked as done. Choose more than the time in which
            it may be delivered again, such as the retention of the topic.
        key: Returns the same key for deliveries of the same message: `by_origin`, `by_key`, or
            your own function.

    Returns:
        A coroutine function. It returns the result of `handler`; None if the message was done
        before; `RetryLater` while another delivery has a claim. It raises the errors of `handler`,
        `key` and `store`, and TimeoutError after `claim_ms`.

    Raises:
        InvalidArgument: `claim_ms` or `done_ms` is not positive, or the handler can't be called.
    """
    check_handler(handler)
    for field, value in (("claim_ms", claim_ms), ("done_ms", done_ms)):
        if value <= 0:
            raise InvalidArgument(f"{field} must be positive, got {value}", facts={"field": field})
    stops_when_cancelled = inspect.iscoroutinefunction(handler)

    async def call(message: ReceivedMessage) -> object:
        if stops_when_cancelled:
            return await cast(Awaitable[object], handler(message))
        result = await run_in_thread(handler, message)
        return await result if inspect.isawaitable(result) else result

    async def handle_once(message: ReceivedMessage) -> object:
        name, owner = key(message), secrets.token_hex(16)
        # The timeout starts before the claim does, so the handler ends before the claim expires.
        async with timeouts.timeout(claim_ms / 1000):
            try:
                holder = await store.put(name, owner, owner, claim_ms)
            except BaseException:  # the store may have the claim: only its answer was lost
                await _release(store, name, owner)
                raise
            if holder == DONE:
                log.info("message was already done message=%r key=%s", message, name)
                return None
            if holder != owner:
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
            log.warning("claim expired before the message was marked as done key=%s", name)
            return RetryLater(reason=f"{name} took too long and is claimed by another delivery")
        return result

    return handle_once


async def _release(store: Store, name: str, owner: str) -> None:
    """Release the claim; log a failure, so that the error of the handler is raised instead."""
    try:
        async with timeouts.timeout(RELEASE_TIMEOUT_MS / 1000):
            await store.remove(name, owner)
    except Exception:
        log.warning("claim not released, it will expire key=%s", name, exc_info=True)
