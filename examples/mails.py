"""Mails in order per customer: the slow mail server of one customer delays no other customer.

    baton up                                   # in another terminal
    python examples/mails.py [NAMESERVER]

NAMESERVER is $BATON_NAMESERVER by default, or else 127.0.0.1:9876. The customer is the ordering
key, and the consumer has `order="key"`: the mails of a customer are sent one after the other, those
of different customers side by side. The first attempt of every tenth mail fails: its customer waits
for the retry, and no other customer does.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections import defaultdict

from batonmq import Admin, Consumer, ConsumerSettings, Message, Producer, ReceivedMessage

TOPIC, GROUP = "mails", "mail-sender"
CUSTOMERS, MAILS = 40, 5
SLOW, SLOW_S = "customer-00", 0.3
NAMESERVER = os.environ.get("BATON_NAMESERVER", "127.0.0.1:9876")
SETTINGS = ConsumerSettings(
    consume_from="first", order="key", queue_concurrency=16, concurrency=64, retry_first_ms=50
)


class Outbox:
    """Sends mails.

    Attributes:
        sent: Number of each sent mail by customer, in the order of sending.
        late: Customers with a mail that was sent after the last one of the slow customer.
        failures: Number of failed attempts.
    """

    def __init__(self, run: str) -> None:
        self._run = run
        self.complete = asyncio.Event()
        self.sent: dict[str, list[int]] = defaultdict(list)
        self.late: set[str] = set()
        self.failures = 0

    async def send(self, message: ReceivedMessage) -> None:
        """Send a mail."""
        run, number = message.body.decode().split()
        customer = message.ordering_key
        if run != self._run or customer is None:
            return
        await asyncio.sleep(SLOW_S if customer == SLOW else 0.005)
        if message.offset % 10 == 0 and message.attempts == 1:
            self.failures += 1
            raise ConnectionError("the mail server is busy")
        self.sent[customer].append(int(number))
        if len(self.sent[SLOW]) == MAILS and customer != SLOW:
            self.late.add(customer)
        if sum(map(len, self.sent.values())) == CUSTOMERS * MAILS:
            self.complete.set()


async def submit(nameserver: str, run: str) -> None:
    """Submit the mails of all customers by turns; each customer's mails go to one queue."""
    async with Admin(nameserver) as admin, Producer(nameserver) as producer:
        await admin.create_topic(TOPIC, 2)
        for number in range(MAILS):
            for customer in range(CUSTOMERS):
                mail = Message(f"{run} {number}".encode())
                await producer.submit(TOPIC, mail, ordering_key=f"customer-{customer:02}")


async def deliver(nameserver: str, outbox: Outbox) -> None:
    """Send all mails with one consumer."""
    async with (
        Consumer(nameserver, GROUP, {TOPIC: "*"}, SETTINGS) as consumer,
        asyncio.timeout(60),
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(consumer.run(outbox.send))
        await outbox.complete.wait()
        consumer.stop()


async def main(nameserver: str = NAMESERVER) -> None:
    """Submit and send mails; check the order of each customer, and that none waited."""
    run = secrets.token_hex(3)
    outbox = Outbox(run)
    await submit(nameserver, run)
    await deliver(nameserver, outbox)
    if any(numbers != list(range(MAILS)) for numbers in outbox.sent.values()):
        sys.exit("the mails of a customer are not in order")
    if outbox.late:
        sys.exit(f"customers have waited for {SLOW}: {sorted(outbox.late)}")
    print(
        f"{CUSTOMERS * MAILS} mails in order per customer, {outbox.failures} at the second "
        "attempt; no customer waited for the slow one"
    )


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
