"""`baton transaction …`: transactions that have not ended, and their ends by hand."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Any

import click

from batonmq._common.clock import Clock
from batonmq._core.transactions import TransactionState
from batonmq._producer.producer import Producer
from batonmq._producer.producer_settings import ProducerSettings
from batonmq.admin.transactions import TransactionDetail, Transactions
from batonmq.cli.command_classes import LazyGroup, argument
from batonmq.cli.output import Columns, Minor, Prose, counted, duration, wall_time
from batonmq.cli.session import CommandSession, cluster_session

commands = LazyGroup(
    "transaction", help="Show and end transactions of producers.", no_args_is_help=True
)
id_argument = partial(argument, metavar="TRANSACTION_ID", help="Id of the transaction.")
_COLUMNS: Columns = {
    "TRANSACTION": "transaction_id",
    "GROUP": "group",
    "TOPIC": "topic",
    "QUEUE": Minor("queue_id"),
    "KEYS": Minor(lambda item: ",".join(item["keys"])),
    "AGE": lambda item: None if item["age_ms"] is None else duration(item["age_ms"]),
    "CHECKS": "checks",
    "NEXT-CHECK": lambda item: wall_time(item["next_check_unix_ms"]),
    "PRODUCERS": "live_producers",
    "WHY-OPEN": Prose("why_open"),
}


@commands.command("list")
@click.option("--group", default="", help="Only this producer group.")
@click.option("--topic", default="", help="Only messages for this topic.")
@click.option(
    "--limit",
    default=100,
    show_default=True,
    type=click.IntRange(1, 100_000),
    help="Maximum number of transactions of each broker, the oldest first.",
)
@cluster_session
def list_(session: CommandSession, group: str, topic: str, limit: int) -> None:
    """List transactions that have not ended, and why."""
    session.run(_list(session, group, topic, limit))


async def _list(session: CommandSession, group: str, topic: str, limit: int) -> None:
    async with session.admin() as admin:
        found, open_count, problems = await Transactions(admin).find(
            group=group, topic=topic, count_max=limit
        )
    session.output.items([_item(one) for one in found], _COLUMNS)
    session.output.note(f"{counted(open_count, 'open transaction')} on all brokers")
    session.output.problems(problems)


@commands.command("show")
@id_argument("transaction_id")
@cluster_session
def show(session: CommandSession, transaction_id: str) -> None:
    """Show one transaction that has not ended, and why."""
    session.run(_show(session, transaction_id))


async def _show(session: CommandSession, transaction_id: str) -> None:
    async with session.admin() as admin:
        session.output.items([_item(await Transactions(admin).show(transaction_id))], _COLUMNS)


@commands.command("commit")
@id_argument("transaction_id")
@cluster_session
def commit(session: CommandSession, transaction_id: str) -> None:
    """Commit a transaction: its message becomes visible to consumers.

    Do it only if the local transaction of the producer is committed.
    """
    session.run(_end(session, transaction_id, TransactionState.COMMIT))


@commands.command("rollback")
@id_argument("transaction_id")
@cluster_session
def rollback(session: CommandSession, transaction_id: str) -> None:
    """Roll a transaction back: no consumer ever sees its message.

    Do it only if the local transaction of the producer is rolled back.
    """
    session.run(_end(session, transaction_id, TransactionState.ROLLBACK))


async def _end(session: CommandSession, transaction_id: str, state: TransactionState) -> None:
    settings = ProducerSettings(security=session.security, delivery_timeout_ms=10_000)
    async with Producer(session.nameserver, settings) as producer:
        receipt = await producer.end_transaction(transaction_id, state)
    item: dict[str, Any] = {"transaction_id": transaction_id, "state": state.value}
    if receipt is None:
        session.output.line(item, f"{transaction_id} rolled back")
        return
    item |= {"queue_id": receipt.queue.queue_id, "offset": receipt.offset}
    place = f"queue {receipt.queue.queue_id} at offset {receipt.offset}"
    session.output.line(item, f"{transaction_id} committed, in {place}")


def _item(one: TransactionDetail) -> dict[str, Any]:
    queue = one.queue
    age_ms = max(0, Clock().unix_ms() - one.begin_unix_ms) if one.begin_unix_ms else None
    item = asdict(one) | {"keys": list(one.keys), "why_open": one.why_open, "age_ms": age_ms}
    del item["queue"]
    return item | {
        "topic": None if queue is None else queue.topic,
        "broker": None if queue is None else queue.broker,
        "queue_id": None if queue is None else queue.queue_id,
    }
