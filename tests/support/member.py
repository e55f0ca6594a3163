"""One member of a group as a process: `python -m tests.support.member`.

Every handler writes a line when it starts and a line when it ends, without a buffer, so that the
lines survive kill -9. SIGTERM makes the member leave gracefully. Lines:

    start QUEUE_ID OFFSET TOKEN REDELIVERED NUMBER MONOTONIC_US    (NUMBER: the message's body)
    done  QUEUE_ID OFFSET TOKEN REDELIVERED NUMBER MONOTONIC_US
    own   KIND QUEUE_ID TOKEN MONOTONIC_US
    fail  REASON
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
from pathlib import Path

from batonmq._consumer.consumer import Consumer
from batonmq._consumer.consumer_settings import ConsumerSettings
from batonmq._consumer.message import ReceivedMessage
from batonmq._consumer.session import OwnershipEvent
from batonmq._process import logs
from batonmq.errors import BatonError

KEEP_ALIVE_MS = 1_000
FAILED = 3


def now_us() -> int:
    """Return the monotonic time in microseconds; all processes of a machine share this clock."""
    return int(asyncio.get_running_loop().time() * 1_000_000)


class Lines:
    """An unbuffered journal: a written line survives kill -9."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, *words: object) -> None:
        """Add a line."""
        os.write(self._fd, (" ".join(map(str, words)) + "\n").encode())

    def message(self, kind: str, message: ReceivedMessage) -> None:
        """Add a line about a message."""
        self.write(
            kind, message.queue_id, message.offset, message.token, int(message.redelivered),
            message.body.decode(), now_us(),
        )  # fmt: skip

    def ownership(self, event: OwnershipEvent) -> None:
        """Add a line about a change of queue ownership."""
        self.write("own", event.kind, event.queue.queue_id, event.token, now_us())


async def consume(options: argparse.Namespace, lines: Lines) -> None:
    """Consume until stopped; write handler calls and ownership changes to the journal."""

    async def handle(message: ReceivedMessage) -> None:
        lines.message("start", message)
        if int(message.body) == options.stick:
            await asyncio.Event().wait()
        slow = int(message.body) < options.slow_below
        await asyncio.sleep(options.handle_ms / 1000 * (50 if slow else 1))
        lines.message("done", message)

    settings = ConsumerSettings(
        consume_from="first",
        commit_interval_ms=options.commit_ms,
        keep_alive_ms=KEEP_ALIVE_MS,
        queue_concurrency=options.parallel,
        drain_timeout_ms=options.drain_ms,
        start_timeout_ms=options.start_ms,
        commit_on_pull=bool(options.commit_on_pull),
        order="key" if options.by_key else "none",
        send_back=False,  # the journal names queues by number: those of one topic
    )
    consumer = Consumer(
        options.nameserver,
        options.group,
        {options.topic: options.expression},
        settings,
        client_id=options.client_id,
        on_ownership=lines.ownership,
    )
    async with consumer:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, consumer.stop)
        lines.write("own", "joined", -1, 0, now_us())
        await consumer.run(handle)


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(prog="tests.support.member", description=__doc__)
    for name in ("nameserver", "group", "topic", "expression", "client-id"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--parallel", type=int, default=1, help="handlers at once per queue")
    parser.add_argument("--handle-ms", type=int, default=0, help="how long a handler takes")
    parser.add_argument("--commit-ms", type=int, default=200, help="interval of commits")
    parser.add_argument("--drain-ms", type=int, default=30_000, help="drain timeout")
    parser.add_argument("--start-ms", type=int, default=30_000, help="start timeout")
    parser.add_argument(
        "--commit-on-pull", type=int, default=1, help="0: acks are sent in calls of their own"
    )
    parser.add_argument(
        "--by-key", type=int, default=0, help="1: messages of an ordering key go in order"
    )
    parser.add_argument(
        "--slow-below", type=int, default=0, help="messages below this number take 50 times as long"
    )
    parser.add_argument("--stick", type=int, default=-1, help="number whose handler never ends")
    options = parser.parse_args()
    logs.configure("INFO", "text")
    lines = Lines(options.journal)
    try:
        asyncio.run(consume(options, lines))
    except BatonError as error:
        lines.write("fail", error.reason, error.message)
        raise SystemExit(FAILED) from error


if __name__ == "__main__":
    main()
