"""A program of the public API: sends numbers until the end of stdin, and handles them.

    python earlier_client.py NAMESERVER TOPIC GROUP

Prints a line of JSON for each 100 numbers that are handled, and one in the end.
"""

from __future__ import annotations

import asyncio
import json
import sys

import batonmq
from batonmq import Consumer, ConsumerSettings, Producer

PACE_S = 0.02


async def main(nameserver: str, topic: str, group: str) -> None:
    """Run until stdin ends and each number with a receipt has been handled."""
    stdin = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin
    )
    sent, handled = 0, list[int]()
    settings = ConsumerSettings(consume_from="first")
    async with (
        Producer(nameserver) as producer,
        Consumer(nameserver, group, {topic: "*"}, settings) as consumer,
        asyncio.TaskGroup() as tasks,
    ):

        async def send() -> None:
            nonlocal sent
            while not stdin.at_eof():
                await producer.send(topic, b"%d" % sent)
                sent += 1
                await asyncio.sleep(PACE_S)
            while len(set(handled)) < sent:  # noqa: ASYNC110  the end of a test
                await asyncio.sleep(0.1)
            consumer.stop()

        tasks.create_task(send())
        async for message in consumer:
            handled.append(int(message.body))
            if len(handled) % 100 == 0:
                print(json.dumps({"handled": len(handled)}), flush=True)
    result = {"package": batonmq.__file__, "sent": sent, "handled": sorted(handled)}
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
