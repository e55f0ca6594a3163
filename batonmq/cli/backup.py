"""`baton backup …`: take, verify and restore snapshots of a cluster."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click
from click.exceptions import Exit

from batonmq.admin.backup_manifest import BackupManifest
from batonmq.admin.backup_restorer import (
    BackupRestorer,
    BackupVerification,
    RestorePlan,
    verify_backup,
)
from batonmq.admin.backup_store import open_backup_store
from batonmq.admin.backup_writer import (
    BackupPlan,
    BackupWriter,
    list_snapshots,
    read_backup_manifest,
)
from batonmq.admin.operation import Operation
from batonmq.cli.change_options import (
    by_option,
    check_can_ask,
    confirm,
    dry_run_option,
    yes_option,
)
from batonmq.cli.command_classes import LazyGroup, argument
from batonmq.cli.output import Columns, Minor, counted, duration, wall_time
from batonmq.cli.session import CommandSession, cluster_session, local_session
from batonmq.cli.sizes import size_text

commands = LazyGroup(
    "backup", help="Take, verify and restore snapshots of a cluster.", no_args_is_help=True
)
place_argument = argument(
    "place", metavar="PLACE", help="Folder, or URL of an object store such as s3://bucket/folder."
)
snapshot_option = click.option(
    "--snapshot",
    default=0,
    type=click.IntRange(min=0),
    metavar="NUMBER",
    help="Snapshot; by default the newest.",
)
_COLUMNS: Columns = {
    "SNAPSHOT": "number",
    "CLUSTER": Minor("cluster"),
    "PROGRESS-AS-OF": lambda item: wall_time(item["begin_unix_ms"]),
    "TOOK": lambda item: duration(item["end_unix_ms"] - item["begin_unix_ms"]),
    "TOPICS": "topic_count",
    "GROUPS": "group_count",
    "MESSAGES": "message_count",
    "SCHEDULED": Minor("scheduled_count"),
    "SIZE": lambda item: size_text(item["byte_count"]),
    "NEW": lambda item: size_text(item["new_byte_count"]),
}
_PLAN_COLUMNS: Columns = {
    "SNAPSHOT": "number",
    "TOPICS": "topic_count",
    "QUEUES": "queue_count",
    "GROUPS": "group_count",
    "NEW-MESSAGES": "message_count",
    "KEPT-MESSAGES": "kept_count",
}
_RESTORE_COLUMNS: Columns = {
    "TOPICS": "topic_count",
    "QUEUES": "queue_count",
    "MESSAGES": "message_count",
    "SIZE": lambda item: size_text(item["byte_count"]),
    "SCHEDULED": "scheduled_count",
    "GROUPS": "group_count",
}
_VERIFY_COLUMNS: Columns = {
    "SNAPSHOT": "number",
    "FILES": "file_count",
    "SIZE": lambda item: size_text(item["byte_count"]),
    "MESSAGES": "message_count",
}


@commands.command()
@place_argument
@dry_run_option
@cluster_session
def create(session: CommandSession, place: str, dry_run: bool) -> None:
    """Take a snapshot while the cluster is running: only what the backup does not have is copied.

    A snapshot has topics, messages, scheduled messages, groups with their progress, grants, blocks
    and quotas. No progress is beyond the messages of the snapshot. Needs the role admin on the
    cluster.
    """
    if dry_run:
        plan = session.run(_plan(session, place))
        session.output.items([asdict(plan)], _PLAN_COLUMNS)
        session.output.note("nothing was written")
        return
    manifest = session.run(_create(session, place))
    session.output.items([_item(manifest)], _COLUMNS)
    for note in manifest.notes:
        session.output.note(f"note: {note}")


async def _plan(session: CommandSession, place: str) -> BackupPlan:
    async with session.admin() as admin:
        return await BackupWriter(admin, open_backup_store(place)).plan()


async def _create(session: CommandSession, place: str) -> BackupManifest:
    async with session.admin() as admin:
        return await BackupWriter(admin, open_backup_store(place)).run()


@commands.command("list")
@place_argument
@local_session
def list_(session: CommandSession, place: str) -> None:
    """List the snapshots of a backup, the oldest first. Each can be restored by itself."""
    session.output.items([_item(one) for one in session.run(_manifests(place))], _COLUMNS)


async def _manifests(place: str) -> list[BackupManifest]:
    store = open_backup_store(place)
    return [await read_backup_manifest(store, number) for number in await list_snapshots(store)]


@commands.command("verify")
@place_argument
@snapshot_option
@local_session
def verify_(session: CommandSession, place: str, snapshot: int) -> None:
    """Read a snapshot back: every file, its checksum, the checksum of every batch, all offsets.

    Needs no cluster. Exit status 1 if something is missing or damaged.
    """
    manifest, found = session.run(_verify(place, snapshot))
    session.output.items([asdict(found) | {"number": manifest.number}], _VERIFY_COLUMNS)
    session.output.problems(found.problems)


async def _verify(place: str, snapshot: int) -> tuple[BackupManifest, BackupVerification]:
    store = open_backup_store(place)
    manifest = await read_backup_manifest(store, snapshot)
    return manifest, await verify_backup(store, manifest)


@commands.command()
@place_argument
@snapshot_option
@click.option(
    "--continue",
    "proceed",
    is_flag=True,
    help="Continue an interrupted restore of the same snapshot.",
)
@dry_run_option
@by_option
@yes_option
@cluster_session
def restore(
    session: CommandSession,
    place: str,
    snapshot: int,
    proceed: bool,
    dry_run: bool,
    by: str,
    yes: bool,
) -> None:
    """Restore a snapshot into an empty cluster, which may have other brokers.

    Offsets of each queue begin at 0, and progress is translated: what a group had handled counts as
    handled. Message ids and store times are new. Start producers and consumers afterwards. Rejected
    if the cluster has other topics, groups or messages; a dry run then has exit status 1.
    """
    if not dry_run:
        check_can_ask(yes=yes)
    manifest, plan = session.run(_plan_restore(session, place, snapshot, proceed))
    session.output.detail(
        asdict(plan) | {"snapshot": manifest.number, "notes": manifest.notes, "done": False},
        [asdict(plan)],
        _RESTORE_COLUMNS,
    )
    for line in plan.moved:
        session.output.note(f"queue {line}")
    if plan.problems:
        for problem in plan.problems:
            session.output.failure("NOT_EMPTY", problem, "")
        raise Exit(1)
    if dry_run:
        session.output.note("nothing was changed")
        return
    if not yes:
        confirm(session, f"Restore snapshot {manifest.number} of {manifest.cluster}?")
    operation = Operation(by, f"restore of snapshot {manifest.number}")
    session.run(_restore(session, place, manifest, operation, proceed))
    session.output.note(
        f"restored snapshot {manifest.number}: {counted(manifest.message_count, 'message')}, "
        f"{counted(len(manifest.groups), 'group')}"
    )
    for note in manifest.notes:
        session.output.note(f"note: {note}")


async def _plan_restore(
    session: CommandSession, place: str, snapshot: int, proceed: bool
) -> tuple[BackupManifest, RestorePlan]:
    store = open_backup_store(place)
    manifest = await read_backup_manifest(store, snapshot)
    async with session.admin() as admin:
        restorer = BackupRestorer(admin, store, manifest, Operation("", ""))
        return manifest, await restorer.plan(proceed=proceed)


async def _restore(
    session: CommandSession,
    place: str,
    manifest: BackupManifest,
    operation: Operation,
    proceed: bool,
) -> None:
    async with session.admin() as admin:
        await BackupRestorer(admin, open_backup_store(place), manifest, operation).run(
            proceed=proceed
        )


def _item(manifest: BackupManifest) -> dict[str, Any]:
    return {
        "number": manifest.number,
        "cluster": manifest.cluster,
        "begin_unix_ms": manifest.begin_unix_ms,
        "end_unix_ms": manifest.end_unix_ms,
        "topic_count": len(manifest.topics),
        "group_count": len(manifest.groups),
        "message_count": manifest.message_count,
        "scheduled_count": manifest.scheduled_count,
        "byte_count": sum(one.size for one in manifest.files),
        "new_byte_count": sum(one.size for one in manifest.written_by(manifest.number)),
        "notes": list(manifest.notes),
    }
