"""A process that handles the messages 0 to COUNT - 1 once: `URL NAMESPACE COUNT [hang]`.

It prints the offset of each message whose handler starts. With `hang` a handler never ends.
"""

from __future__ import annotations

import asyncio
import sys

from batonmq._consumer.message import ReceivedMessage
from batonmq.idempotence import idempotent
from tests.idempotence.messages import message
from tests.idempotence.stores import aging_store

CLAIM_MS, DONE_MS = 600_000, 600_000


async def main(url: str, namespace: str, count: str, *hang: str) -> None:
    """Print `ready`, wait for a line on standard input, and handle the messages."""

    async def book(message: ReceivedMessage) -> None:
        print(message.offset, flush=True)
        if hang:
            await asyncio.Event().wait()

    async with aging_store(url, namespace) as store_access:
        print("ready", flush=True)
        sys.stdin.readline()
        handle = idempotent(book, store_access.store, claim_ms=CLAIM_MS, done_ms=DONE_MS)
        for offset in range(int(count)):
            await handle(message(offset))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
