"""`baton message cancel`: cancel a scheduled message."""

from __future__ import annotations

from batonmq._producer.producer import Producer
from batonmq._producer.producer_settings import ProducerSettings
from batonmq.cli.command_classes import argument, command
from batonmq.cli.session import CommandSession, cluster_session


@command("cancel")
@argument("schedule_id", metavar="SCHEDULE_ID", help="Schedule id of the receipt.")
@cluster_session
def cancel(session: CommandSession, schedule_id: str) -> None:
    """Cancel a scheduled message that is not delivered yet."""
    session.run(_cancel(session, schedule_id))


async def _cancel(session: CommandSession, schedule_id: str) -> None:
    settings = ProducerSettings(security=session.security)
    async with Producer(session.nameserver, settings) as producer:
        await producer.cancel(schedule_id)
    session.output.line({"schedule_id": schedule_id}, f"{schedule_id} cancelled")
