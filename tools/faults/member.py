"""`python -m tools.faults.member`: a consumer in a process of its own.

Every handler call writes a line when it starts and one when it ends, unbuffered, so that a kill
loses none. SIGTERM makes the consumer leave gracefully. Lines:

    up    (SIGTERM is handled from here on)
    start BROKER QUEUE_ID OFFSET TOKEN REDELIVERED NUMBER MONOTONIC_US    (NUMBER: the body)
    done  the same
    own   KIND BROKER QUEUE_ID TOKEN MONOTONIC_US    (KIND: of `OwnershipEvent`)
    fail  REASON
"""

from __future__ import annotations

import argparse
import asyncio
import signal
from pathlib import Path

from batonmq._consumer.consumer import Consumer
from batonmq._consumer.consumer_settings import ConsumerSettings
from batonmq._consumer.message import ReceivedMessage
from batonmq._consumer.session import OwnershipEvent
from batonmq._process import logs
from batonmq.errors import BatonError
from tests.support.member import FAILED, KEEP_ALIVE_MS, Lines, now_us

TOPIC, GROUP = "faults", "survivors"
SPAN_MAX = 500
_HANDLE_S = 0.001


async def consume(nameserver: str, client_id: str, lines: Lines) -> None:
    """Consume until stopped; write handler calls and ownership changes to `lines`."""

    def note(kind: str, message: ReceivedMessage) -> None:
        lines.write(
            kind, message.broker, message.queue_id, message.offset, message.token,
            int(message.redelivered), message.body.decode(), now_us(),
        )  # fmt: skip

    def own(event: OwnershipEvent) -> None:
        lines.write(
            "own", event.kind, event.queue.broker, event.queue.queue_id, event.token, now_us()
        )

    async def handle(message: ReceivedMessage) -> None:
        note("start", message)
        await asyncio.sleep(_HANDLE_S)
        note("done", message)

    settings = ConsumerSettings(
        consume_from="first",
        commit_interval_ms=200,
        keep_alive_ms=KEEP_ALIVE_MS,
        span_max=SPAN_MAX,
        send_back=False,
    )
    consumer = Consumer(
        nameserver, GROUP, {TOPIC: "*"}, settings, client_id=client_id, on_ownership=own
    )
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, consumer.stop)
    lines.write("up")
    async with consumer:
        await consumer.run(handle)


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(prog="tools.faults.member", description=__doc__)
    parser.add_argument("nameserver")
    parser.add_argument("client_id")
    parser.add_argument("journal", type=Path)
    options = parser.parse_args()
    logs.configure("INFO", "text")
    lines = Lines(options.journal)
    try:
        asyncio.run(consume(options.nameserver, options.client_id, lines))
    except BatonError as error:
        lines.write("fail", error.reason, error.message)
        raise SystemExit(FAILED) from error


if __name__ == "__main__":
    main()
