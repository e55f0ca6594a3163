"""A transformer of numbers, until it is killed or gets SIGTERM.

    python -m tests.e2e.transformer NAMESERVER GROUP INPUT OUTPUT...

Each number has one output in each output topic. Those of the first one have the input's key.
"""

from __future__ import annotations

import asyncio
import sys

from batonmq import Consumer, ConsumerSettings, Output, ReceivedMessage

SETTINGS = ConsumerSettings(
    consume_from="first", order="key", queue_concurrency=8, commit_interval_ms=500
)


async def main(nameserver: str, group: str, topic: str, *outputs: str) -> None:
    """Transform until the end."""

    async def spread(message: ReceivedMessage) -> list[Output]:
        await asyncio.sleep(0)
        return [
            Output(message.body, name, ordering_key=message.ordering_key if not index else None)
            for index, name in enumerate(outputs)
        ]

    async with Consumer(nameserver, group, {topic: "*"}, SETTINGS) as consumer:
        await consumer.transform(spread, to=outputs)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
