"""One member of a consumer group as a process of its own: `python -m batonmq_server.demo.member`.

It waits for the line `join` on standard input, which may say how to use TLS, consumes and journals
until `leave` or the end of the input, and leaves gracefully. On standard output it says `ready`,
and then how many messages it has handled whenever that changes, a few times a second.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from batonmq._connection.security import from_json
from batonmq._consumer.consumer import Consumer
from batonmq._consumer.consumer_settings import ConsumerSettings
from batonmq._process import logs
from batonmq_server.demo.journal import Journal

PROGRESS_INTERVAL_S = 0.1
PACED_RUN = 50


async def consume(options: argparse.Namespace) -> None:
    """Join, handle, journal, leave."""
    commands = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(commands), sys.stdin
    )
    print("ready", flush=True)
    word, _, told = (await commands.readline()).decode().strip().partition(" ")
    if word != "join":
        return
    settings = ConsumerSettings(
        consume_from="first",
        commit_interval_ms=500,
        metrics_stream=True,
        security=from_json(told) if told else None,
    )
    handled = [0]
    with Journal(options.journal) as journal:
        consumer = Consumer(
            options.nameserver,
            options.group,
            {options.topic: options.expression},
            settings,
            client_id=options.client_id,
            on_ownership=journal.ownership,
        )
        async with asyncio.TaskGroup() as tasks:
            telling = tasks.create_task(_tell_progress(handled))
            async with consumer:
                stopping = tasks.create_task(_stop_on_leave(commands, consumer))
                async for message in consumer:
                    journal.handled(message)
                    handled[0] += 1
                    if options.pace and handled[0] % PACED_RUN == 0:
                        await asyncio.sleep(PACED_RUN / options.pace)
            stopping.cancel()
            telling.cancel()
    print(handled[0], flush=True)


async def _stop_on_leave(commands: asyncio.StreamReader, consumer: Consumer) -> None:
    await commands.readline()
    consumer.stop()


async def _tell_progress(handled: list[int]) -> None:
    told = -1
    while True:
        if handled[0] != told:
            told = handled[0]
            print(told, flush=True)
        await asyncio.sleep(PROGRESS_INTERVAL_S)


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(prog="batonmq_server.demo.member", description=__doc__)
    for name in ("nameserver", "group", "topic", "expression", "client-id"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--pace", type=int, default=0, help="messages per second; 0: no limit")
    logs.configure("WARNING", "text")
    asyncio.run(consume(parser.parse_args()))


if __name__ == "__main__":
    main()
