"""The program of a demo member: `python -m batonmq_server.demo.member`.

It prints `ready` and waits for the line `join` on standard input, which may have TLS options as
JSON. It then consumes and writes its journal until the line `leave` or the end of the input, and
leaves the group gracefully. It prints the number of handled messages when it changes, at most ten
times per second.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
from pathlib import Path

from batonmq._connection.security import from_json
from batonmq._consumer.consumer import Consumer
from batonmq._consumer.consumer_settings import ConsumerSettings
from batonmq._process import logs
from batonmq_server.demo.journal import Journal

PROGRESS_INTERVAL_S = 0.1
PACED_MESSAGES = 50
"""With a pace, a member pauses after each run of this many messages."""


async def consume(options: argparse.Namespace) -> None:
    """Join the group, handle messages, and leave."""
    commands = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(commands), sys.stdin
    )
    print("ready", flush=True)
    word, _, tls = (await commands.readline()).decode().strip().partition(" ")
    if word != "join":
        return
    settings = ConsumerSettings(
        consume_from="first",
        commit_interval_ms=500,
        metrics_stream=True,
        security=from_json(tls) if tls else None,
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
            reporting = tasks.create_task(_report_progress(handled))
            async with consumer:
                stopping = tasks.create_task(_stop_on_leave(commands, consumer))
                async for message in consumer:
                    journal.handled(message)
                    handled[0] += 1
                    if options.pace and handled[0] % PACED_MESSAGES == 0:
                        await asyncio.sleep(PACED_MESSAGES / options.pace)
            stopping.cancel()
            reporting.cancel()
    print(handled[0], flush=True)


async def _stop_on_leave(commands: asyncio.StreamReader, consumer: Consumer) -> None:
    await commands.readline()
    consumer.stop()


async def _report_progress(handled: list[int]) -> None:
    reported = -1
    while True:
        if handled[0] != reported:
            reported = handled[0]
            print(reported, flush=True)
        await asyncio.sleep(PROGRESS_INTERVAL_S)


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(prog="batonmq_server.demo.member", description=__doc__)
    for name in ("nameserver", "group", "topic", "expression", "client-id"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--pace", type=int, default=0, help="messages per second; 0: no limit")
    logs.configure("WARNING", "text")
    options = parser.parse_args()
    gc.freeze()  # a full collection of the modules would stop the consumer for 20 ms
    asyncio.run(consume(options))


if __name__ == "__main__":
    main()
