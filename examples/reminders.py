"""Reminders that come when they are due, not before; one is taken back in time.

    baton up                                   # in another terminal
    python examples/reminders.py [NAMESERVER]

NAMESERVER is 127.0.0.1:9876 by default. A message may be due up to 40 days ahead. It is stored, as
safely as any other, when it is sent.
"""

from __future__ import annotations

import asyncio
import secrets
import sys

from batonmq import Admin, Consumer, ConsumerSettings, Producer, ReceivedMessage

TOPIC, GROUP = "reminders", "bell"
DELAYS_MS = (2_000, 500, 1_500, 1_000)
SETTINGS = ConsumerSettings(consume_from="first")


async def remind(nameserver: str, run: str, due: dict[str, int]) -> str:
    """Send the reminders, the last one first; take one more back.

    Args:
        due: Filled with when each is due, by the wall clock of storage.

    Returns:
        The one that was taken back.
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


async def main(nameserver: str = "127.0.0.1:9876") -> None:
    """Send reminders, and listen until the last one has come."""
    run = secrets.token_hex(3)
    due: dict[str, int] = {}
    came: dict[str, int] = {}
    cancelled = await remind(nameserver, run, due)
    async with (
        Consumer(nameserver, GROUP, {TOPIC: "*"}, SETTINGS) as consumer,
        asyncio.timeout(60),
    ):

        async def ring(message: ReceivedMessage) -> None:
            name = message.body.decode()
            came[name] = message.store_unix_ms
            if name in due:
                print(f"{name}: {message.store_unix_ms - due[name]} ms after it was due")
            if due.keys() <= came.keys():
                consumer.stop()

        await consumer.run(ring)
    if cancelled in came:
        sys.exit("a reminder came that was taken back")
    if any(came[name] < due[name] for name in due):
        sys.exit("a reminder came before it was due")
    print(f"{len(due)} reminders came, none too early; the one that was taken back did not")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
