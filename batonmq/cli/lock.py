"""`baton lock …`. A queue is named as `baton lock list` shows it: GROUP TOPIC BROKER QUEUE."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated

from functools import partial

import click

from batonmq._core.queues import QueueRef
from batonmq.admin.locks import LockDetail, Locks
from batonmq.admin.operation import Operation
from batonmq.cli.arguments import group_argument, topic_argument
from batonmq.cli.change_options import by_option, op_id_option, reason_option, operation
from batonmq.cli.output import Columns, counted, described, duration
from batonmq.cli.session import CommandSession, local_session, cluster_session, open_session

app = click.Group(help="Look at the locks on queues, and break them.", no_args_is_help=True)
broker_argument = partial(argument, metavar="BROKER", help="The queue's broker.")
queue_argument = partial(
    argument, type=click.IntRange(min=0), metavar="QUEUE", help="The queue's index."
)

_COLUMNS: Columns = {
    "GROUP": "group",
    "TOPIC": "topic",
    "BROKER": "broker",
    "QUEUE": "queue_id",
    "STATE": "state",
    "TOKEN": "token",
    "OWNER": "client_id",
    "HELD": lambda item: item["client_id"] and duration(item["held_ms"]),
    "LEASE-AGE": lambda item: item["client_id"] and duration(item["lease_age_ms"]),
    "SUBSCRIPTION": lambda item: item["subscription_generation"] or None,
    "WAITERS": lambda item: ",".join(item["waiters"]),
}
_MORE_COLUMNS: Columns = {
    "GENERATION": "generation",
    "INCARNATION": lambda item: item["incarnation_id"] and f"{item['incarnation_id']:016x}",
}
_KEPT_COLUMNS: Columns = {
    "GROUP": "group",
    "TOPIC": "topic",
    "BROKER": "broker",
    "QUEUE": "queue_id",
}


@app.command("list")
@click.option("--group", default="", help="Only of this group.")
@click.option("--topic", default="", help="Only of this topic.")
@cluster_session
def list_(session: CommandSession, group: str, topic: str) -> None:
    """List who owns which queue, under which subscription, and who waits for it."""
    session.run(_list(session, group, topic))


async def _list(session: CommandSession, group: str, topic: str) -> None:
    async with session.admin() as admin:
        pages = ([asdict(lock) for lock in page] async for page in admin.lock_pages(group, topic))
        await session.output.item_pages(pages, _COLUMNS, _MORE_COLUMNS)


@app.command()
@group_argument("group")
@topic_argument("topic")
@broker_argument("broker")
@queue_argument("queue_id")
@cluster_session
def show(session: CommandSession, group: str, topic: str, broker: str, queue_id: int) -> None:
    """Show everything known of one lock: its lease, a hand-over under way, the last refusals."""
    session.run(_show(session, group, QueueRef(topic, broker, queue_id)))


async def _show(session: CommandSession, group: str, queue: QueueRef) -> None:
    async with session.admin() as admin:
        detail = await Locks(admin).describe(group, queue)
    lock = asdict(detail.lock)
    item = lock | {
        "term": detail.term,
        "lease_left_ms": detail.lease_left_ms,
        "pending_step": detail.pending_step,
        "pending_attempt": detail.pending_attempt,
        "offsets_token": detail.offsets_token,
        "owner_evicted": detail.owner_evicted,
        "denials": [
            {"client_id": d.client_id, "age_ms": d.age_ms, "error": described(d.error)}
            for d in detail.denials
        ],
    }
    session.output.detail(item, [lock], _COLUMNS, _MORE_COLUMNS)
    for line in ("", *about(detail)):
        session.output.note(line)


@app.command()
@group_argument("group")
@topic_argument("topic")
@broker_argument("broker")
@queue_argument("queue_id")
@click.option("--force", is_flag=True, help="Do it; without, only the owner is shown.")
@reason_option
@by_option
@op_id_option
@cluster_session
def release(
    session: CommandSession,
    group: str,
    topic: str,
    broker: str,
    queue_id: int,
    force: bool,
    reason: str,
    by: str,
    op_id: str,
) -> None:
    """Take a queue from its owner, whatever it is doing.

    Its acknowledgements are refused from then on. Another owner gets what was in its hands again,
    flagged as redelivered, while the old one may still be at work on it. The same one, if it lives
    and is still dealt the queue, asks for it at once and goes on.
    """
    if force and not reason:
        raise click.UsageError("--reason is missing")
    queue = QueueRef(topic, broker, queue_id)
    if force:
        session.run(_force_release(session, group, queue, operation(by, reason, op_id)))
        return
    session.run(_show(session, group, queue))
    session.output.note("nothing was changed; take it away with --force --reason WHY")


async def _force_release(
    session: CommandSession, group: str, queue: QueueRef, done: Operation
) -> None:
    async with session.admin() as admin:
        taken = await Locks(admin).force_release(group, queue, done)
    named = {
        "group": group,
        "topic": queue.topic,
        "broker": queue.broker,
        "queue_id": queue.queue_id,
        "op_id": done.op_id,
    }
    session.output.line(
        named | asdict(taken),
        f"{queue} is taken from {taken.client_id or 'nobody'}; it may have had "
        f"{counted(taken.maybe_seen_count, 'message')} in hand; the token is {taken.token} now",
    )


app.command("describe", hidden=True)(show)


@app.command("release-all")
@argument("client_id", metavar="CLIENT_ID", help="The owner.")
@click.option("--group", default="", help="Only in this group.")
@cluster_session
def release_all(session: CommandSession, client_id: str, group: str) -> None:
    """Give back the queues that a client has closed and not released.

    Nothing is taken from a client that is at work: what it has not closed is kept, and listed.
    """
    session.run(_release_all(session, client_id, group))


async def _release_all(session: CommandSession, client_id: str, group: str) -> None:
    async with session.admin() as admin:
        released = await Locks(admin).release_all(client_id, group)
    kept = [{"group": group} | asdict(queue) for group, queue in released.kept]
    count = released.released_count
    item = {
        "client_id": client_id,
        "incarnation_ids": released.incarnation_ids,
        "released_count": count,
        "kept": kept,
    }
    session.output.detail(item, kept, _KEPT_COLUMNS)
    session.output.note("")
    if not released.incarnation_ids:
        session.output.note(f"{client_id} owns nothing")
        return
    session.output.note(f"given back: {counted(count, 'queue')}; kept: {len(kept)}")
    if kept:
        session.output.note(
            "a queue is kept until its owner closes it or its lease ends; "
            "see baton lock release --force"
        )


def about(detail: LockDetail) -> Iterator[str]:
    """What a table of locks does not show of one; for people."""
    lock = detail.lock
    if lock.client_id:
        left = detail.lease_left_ms
        end = f"ends in {duration(left)}" if left else "has ended"
        yield f"lease of {lock.client_id} {end}"
    if detail.owner_evicted:
        yield f"{lock.client_id} is no member of the group any more"
    if detail.pending_step:
        yield f"hand-over is at {detail.pending_step}, attempt {detail.pending_attempt}"
    if detail.offsets_token is not None and detail.offsets_token != lock.token:
        yield f"the token at offsets is {detail.offsets_token}"
    yield f"the lock manager's term is {detail.term}"
    for denial in detail.denials:
        error = denial.error
        yield (
            f"refused {duration(denial.age_ms)} ago: {denial.client_id}: "
            f"{error.reason}: {error.message}"
        )
