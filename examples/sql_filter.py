"""Offers that are filtered by their properties on the storage node.

    baton up                                   # in another terminal
    python examples/sql_filter.py [NAMESERVER]

NAMESERVER is $BATON_NAMESERVER by default, or else 127.0.0.1:9876. Messages that do not match the
condition are not sent to the consumer.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from random import Random

from batonmq import Admin, BatonError, Consumer, ConsumerSettings, Producer, ReceivedMessage

TOPIC, GROUP = "flat-offers", "alice"
NAMESERVER = os.environ.get("BATON_NAMESERVER", "127.0.0.1:9876")
CITIES = ("Berlin", "Hamburg", "Leipzig")
WANTED = "sql: rent BETWEEN 500 AND 900 AND city IN ('Berlin', 'Hamburg') AND agent IS NULL"
WRONG = "sql: rent BETWEEN 500 OR 900"
SETTINGS = ConsumerSettings(consume_from="first")


def offers(run: str, count: int) -> dict[str, dict[str, str]]:
    """Return properties of random flats by number; half of them are offered by an agent."""
    random, found = Random(run), {}
    for number in range(count):
        flat = {"rent": str(random.randrange(300, 1_500)), "city": random.choice(CITIES)}
        found[f"{run}-{number:03}"] = flat | ({"agent": "yes"} if number % 2 else {})
    return found


def is_wanted(flat: dict[str, str]) -> bool:
    """Return whether a flat matches the condition `WANTED`."""
    return 500 <= int(flat["rent"]) <= 900 and flat["city"] != "Leipzig" and "agent" not in flat


async def send(nameserver: str, flats: dict[str, dict[str, str]]) -> None:
    """Send all offers, and then one matching offer as the last one of each queue."""
    async with Admin(nameserver) as admin, Producer(nameserver) as producer:
        topic = (await admin.create_topic(TOPIC, 4)).topic
        for number, flat in flats.items():
            await producer.send(TOPIC, number.encode(), properties=flat)
        last = {"rent": "600", "city": "Berlin"}
        for queue in topic.queues:
            await producer.send(TOPIC, b"last", properties=last, queue=queue)


async def receive(nameserver: str) -> list[str]:
    """Return the offers that are delivered before the last one of each queue."""
    found: list[str] = []
    async with (
        Consumer(nameserver, GROUP, {TOPIC: WANTED}, SETTINGS) as consumer,
        asyncio.timeout(60),
    ):
        ended = 0

        async def collect(message: ReceivedMessage) -> None:
            nonlocal ended
            if message.body == b"last":
                ended += 1
            else:
                found.append(message.body.decode())
            if ended == 4:
                consumer.stop()

        await consumer.run(collect)
    return found


async def try_wrong_condition(nameserver: str) -> str:
    """Return the error of an invalid condition, which is reported before anything is consumed."""
    try:
        async with Consumer(nameserver, "bob", {TOPIC: WRONG}, SETTINGS):
            return ""
    except BatonError as error:
        return f"{error.reason}: {error.message}"


async def main(nameserver: str = NAMESERVER) -> None:
    """Send offers, receive those that match, and compare."""
    flats = offers(secrets.token_hex(3), 200)
    await send(nameserver, flats)
    found = await receive(nameserver)
    for number in found:
        print(number, *flats[number].values())
    problem = await try_wrong_condition(nameserver)
    print(problem)
    if sorted(found) != [number for number, flat in flats.items() if is_wanted(flat)]:
        sys.exit("these are not the offers that match the condition")
    if not problem.startswith("BAD_EXPRESSION"):
        sys.exit("an invalid condition was accepted")
    print(f"{len(found)} of {len(flats)} offers match, and only these were delivered")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
