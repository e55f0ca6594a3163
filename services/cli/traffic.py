"""`baton traffic`: send messages while the cluster is disturbed, and check the deliveries."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from pathlib import Path

import click
from click.exceptions import Exit

from batonmq.cli.command_classes import command
from batonmq.cli.session import CommandSession, cluster_session
from batonmq_server.demo.member_processes import MemberFailed
from batonmq_server.demo.traffic import TrafficPlan, run


@command("traffic")
@click.option(
    "--members",
    default=3,
    show_default=True,
    type=click.IntRange(min=1),
    help="Members of the group that handles the messages.",
)
@click.option(
    "--rate",
    default=200,
    show_default=True,
    type=click.IntRange(min=1),
    help="Messages sent per second.",
)
@click.option(
    "--seconds",
    default=0,
    show_default=True,
    type=click.FloatRange(min=0),
    help="How long to send; 0: until SIGTERM or Ctrl-C.",
)
@click.option(
    "--repeats",
    is_flag=True,
    help="Accept messages handled twice, if the second delivery was flagged as redelivered.",
)
@cluster_session
def traffic(
    session: CommandSession, members: int, rate: int, seconds: float, repeats: bool
) -> None:
    """Send to topic `traffic`, handle in group `drivers`, and compare the two.

    Prints progress once a second as a line of JSON; the last line is the result. Exit status 1
    unless no message was lost, none was handled twice, and the order was kept.
    """
    with tempfile.TemporaryDirectory(prefix="baton-traffic-") as folder:
        plan = TrafficPlan(
            nameserver=session.nameserver,
            rate=rate,
            members=members,
            seconds=seconds,
            folder=Path(folder),
            security=session.security,
        )
        try:
            result = session.run(run(plan))
        except MemberFailed as error:
            session.output.failure("TRAFFIC_FAILED", str(error), "")
            raise Exit(1) from error
    good = result.ok(repeats)
    print(json.dumps({**asdict(result), "ok": good}), flush=True)
    if not good:
        raise Exit(1)
