"""`baton lock …`: the locks of queues, each named as GROUP TOPIC BROKER QUEUE."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial

import click

from batonmq._core.queues import QueueRef
from batonmq.admin.locks import LockDetail, Locks
from batonmq.admin.operation import Operation
from batonmq.cli.arguments import QUEUE_ID, group_argument, topic_argument
from batonmq.cli.change_options import by_option, op_id_option, operation, reason_option
from batonmq.cli.command_classes import LazyCommand, LazyGroup, argument
from batonmq.cli.output import Columns, Item, Minor, counted, described, duration
from batonmq.cli.session import CommandSession, cluster_session

commands = LazyGroup(
    "lock",
    help="Show and release the locks of queues.",
    no_args_is_help=True,
    lazy={"describe": LazyCommand("batonmq.cli.lock:show", hidden=True)},
)
broker_argument = partial(argument, metavar="BROKER", help="Broker of the queue.")
queue_argument = partial(argument, type=QUEUE_ID, metavar="QUEUE", help="Id of the queue.")


def _state(item: Item) -> str:
    """Return the state; an owner with an expired lease does not own the queue for long."""
    return "expired" if item["lease_expired"] else str(item["state"])


_COLUMNS: Columns = {
    "GROUP": "group",
    "TOPIC": "topic",
    "BROKER": "broker",
    "QUEUE": "queue_id",
    "STATE": _state,
    "TOKEN": "token",
    "OWNER": "client_id",
    "HELD": Minor(lambda item: item["client_id"] and duration(item["held_ms"])),
    "LEASE-AGE": Minor(lambda item: item["client_id"] and duration(item["lease_age_ms"])),
    "SUBSCRIPTION": Minor(lambda item: item["subscription_generation"] or None),
    "WAITERS": Minor(lambda item: ",".join(item["waiters"])),
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


@commands.command("list")
@click.option("--group", default="", help="Only this group.")
@click.option("--topic", default="", help="Only this topic.")
@cluster_session
def list_(session: CommandSession, group: str, topic: str) -> None:
    """List the owner, the subscription and the waiters of each queue.

    The state is `expired` if the lease of the owner has expired: its process is dead, paused or cut
    off, and another member gets the queue as soon as it acquires it.
    """
    session.run(_list(session, group, topic))


async def _list(session: CommandSession, group: str, topic: str) -> None:
    async with session.admin() as admin:
        pages = ([asdict(lock) for lock in page] async for page in admin.lock_pages(group, topic))
        await session.output.item_pages(pages, _COLUMNS, _MORE_COLUMNS)


@commands.command()
@group_argument("group")
@topic_argument("topic")
@broker_argument("broker")
@queue_argument("queue_id")
@cluster_session
def show(session: CommandSession, group: str, topic: str, broker: str, queue_id: int) -> None:
    """Show one lock: its lease, a hand-over in progress, and the last denials."""
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
    for line in ("", *describe_lock(detail)):
        session.output.note(line)


@commands.command()
@group_argument("group")
@topic_argument("topic")
@broker_argument("broker")
@queue_argument("queue_id")
@click.option("--force", is_flag=True, help="Release it; otherwise only the lock is shown.")
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
    """Release the lock of a queue, whatever its owner is doing.

    The owner's acknowledgements are rejected from then on. The next owner gets the messages in
    flight again, flagged as redelivered, while the former owner may still be handling them. The
    same owner acquires the queue again at once if it is alive and still assigned the queue.
    """
    if force and not reason:
        raise click.UsageError("--reason is required with --force")
    queue = QueueRef(topic, broker, queue_id)
    if force:
        session.run(_force_release(session, group, queue, operation(by, reason, op_id)))
        return
    session.run(_show(session, group, queue))
    session.output.note("nothing was changed; release it with --force --reason WHY")


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
        f"{queue} is released; its owner was {taken.client_id or 'none'}, with up to "
        f"{counted(taken.maybe_seen_count, 'message')} in flight; the new token is {taken.token}",
    )


@commands.command("release-all")
@argument("client_id", metavar="CLIENT_ID", help="Client id of the owner.")
@click.option("--group", default="", help="Only in this group.")
@cluster_session
def release_all(session: CommandSession, client_id: str, group: str) -> None:
    """Release the queues that a client has closed but not released.

    No queue is taken from a client that still uses it: a queue that is not closed is kept, and
    listed.
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
        session.output.note(f"{client_id} owns no queue")
        return
    session.output.note(f"released: {counted(count, 'queue')}; kept: {len(kept)}")
    if kept:
        session.output.note(
            "a queue is kept until its owner closes it or its lease expires; "
            "see baton lock release --force"
        )


def describe_lock(detail: LockDetail) -> Iterator[str]:
    """Yield what the table does not show of a lock, as lines of text."""
    lock = detail.lock
    if lock.client_id:
        left = detail.lease_left_ms
        end = f"expires in {duration(left)}" if left else "has expired"
        yield f"lease of {lock.client_id} {end}"
    elif not lock.token:
        yield "this queue has never had an owner; check the names with baton lock list"
    if detail.owner_evicted:
        yield f"{lock.client_id} is not a member of the group any more"
    if detail.pending_step:
        yield f"hand-over in progress: {detail.pending_step}, attempt {detail.pending_attempt}"
    if detail.offsets_token is not None and detail.offsets_token != lock.token:
        yield f"offsets has token {detail.offsets_token}"
    yield f"the term of the lock manager is {detail.term}"
    for denial in detail.denials:
        error = denial.error
        yield (
            f"denied {duration(denial.age_ms)} ago: {denial.client_id}: "
            f"{error.reason}: {error.message}"
        )
