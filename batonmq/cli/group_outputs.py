"""`baton group outputs`: what storage remembers of the outputs of a group's transformers."""

from __future__ import annotations

from dataclasses import asdict

from batonmq.admin.outputs import remembered_outputs
from batonmq.cli.arguments import group_argument
from batonmq.cli.command_classes import command
from batonmq.cli.output import Columns, Minor, counted, wall_time
from batonmq.cli.session import CommandSession, cluster_session

_COLUMNS: Columns = {
    "TOPIC-ID": "topic_id",
    "BROKER": "input_broker",
    "QUEUE": "queue_id",
    "STORED-AT": "broker",
    "TOKEN": "token",
    "FLOOR": "floor",
    "OUTPUTS": "output_count",
    "LAST-STORED": lambda item: wall_time(item["used_unix_ms"]),
    "FORGOTTEN-UNTIL": Minor(lambda item: wall_time(item["forgotten_unix_ms"])),
}


@command("outputs")
@group_argument("name")
@cluster_session
def outputs(session: CommandSession, name: str) -> None:
    """Show which outputs of the group's transformers storage remembers, by input queue.

    These are the outputs of inputs that are not committed. FLOOR is the committed offset that
    storage knows; outputs of inputs below it are refused.
    """
    session.run(_outputs(session, name))


async def _outputs(session: CommandSession, name: str) -> None:
    async with session.admin() as admin:
        found, problems = await remembered_outputs(admin, name)
    session.output.items([asdict(one) for one in found], _COLUMNS)
    count = sum(one.output_count for one in found)
    session.output.note(f"{counted(count, 'remembered output')} on all brokers")
    session.output.problems(problems)
