"""Reminders that are delivered when they are due, not before; one is cancelled.

    baton up                                   # in another terminal
    python examples/reminders.py [NAMESERVER]

NAMESERVER is $BATON_NAMESERVER by default, or else 127.0.0.1:9876. A message may be scheduled up
to 40 days ahead. It is stored when it is sent, as durably as any other message.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys

from batonmq import Admin, Consumer, ConsumerSettings, Producer, ReceivedMessage

TOPIC, GROUP = "reminders", "bell"
NAMESERVER = os.environ.get("BATON_NAMESERVER", "127.0.0.1:9876")
DELAYS_MS = (2_000, 500, 1_500, 1_000)
SETTINGS = ConsumerSettings(consume_from="first")


async def remind(nameserver: str, run: str, due: dict[str, int]) -> str:
    """Schedule the reminders, and one more, which is cancelled.

    Args:
        due: Gets the due time of each reminder, by the wall clock of storage.

    Returns:
        The name of the cancelled reminder.
    """
    async with Admin(nameserver) as admin, Producer(nameserver) as producer:
        await admin.create_topic(TOPIC, 4)
        for delay_ms in DELAYS_MS:
            name = f"{run} in {delay_ms} ms"
            receipt = await producer.send(TOPIC, name.encode(), delay_ms=delay_ms)
            due[name] = receipt.deliver_unix_ms
        cancelled = f"{run} never"
        receipt = await producer.send(TOPIC, cancelled.encode(), delay_ms=1_200)
        await producer.cancel(receipt.schedule_id)
    return cancelled


async def main(nameserver: str = NAMESERVER) -> None:
    """Schedule reminders, and consume until the last one is delivered."""
    run = secrets.token_hex(3)
    due: dict[str, int] = {}
    delivered: dict[str, int] = {}
    cancelled = await remind(nameserver, run, due)
    async with (
        Consumer(nameserver, GROUP, {TOPIC: "*"}, SETTINGS) as consumer,
        asyncio.timeout(60),
    ):

        async def ring(message: ReceivedMessage) -> None:
            name = message.body.decode()
            delivered[name] = message.store_unix_ms
            if name in due:
                print(f"{name}: {message.store_unix_ms - due[name]} ms after it was due")
            if due.keys() <= delivered.keys():
                consumer.stop()

        await consumer.run(ring)
    if cancelled in delivered:
        sys.exit("a cancelled reminder was delivered")
    if any(delivered[name] < due[name] for name in due):
        sys.exit("a reminder was delivered before it was due")
    print(f"{len(due)} reminders delivered, none too early; the cancelled one was not delivered")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
