"""`baton traffic`: messages that flow while something happens to the cluster, and a verdict."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import click
from click.exceptions import Exit

from batonmq.cli.session import cluster_session, open_session
from batonmq_server.demo.member_processes import MemberFailed
from batonmq_server.demo.traffic import TrafficPlan, run


@click.command("traffic")
@click.option(
    "--members",
    default=3,
    show_default=True,
    type=click.IntRange(min=1),
    help="How many handle the messages.",
)
@click.option(
    "--rate",
    default=200,
    show_default=True,
    type=click.IntRange(min=1),
    help="Messages sent in a second.",
)
@click.option(
    "--seconds",
    default=0,
    show_default=True,
    type=click.FloatRange(min=0),
    help="0: until SIGTERM or Ctrl-C.",
)
@click.option("--repeats", is_flag=True, help="Messages marked as redelivered may come twice.")
@cluster_session
def traffic(
    session: CommandSession, members: int, rate: int, seconds: float, repeats: bool
) -> None:
    """Send to topic `traffic`, handle in group `drivers`, and compare.

    A line of JSON a second says how it goes, and the last one is the verdict. Exit status 1 unless
    nothing was lost, nothing came twice and everything was in order.
    """
    session = open_session(context, nameserver, None)
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
            outcome = session.run(run(plan))
        except MemberFailed as error:
            session.output.failure("TRAFFIC_FAILED", str(error), "")
            raise Exit(1) from error
    good = outcome.ok(repeats)
    print(json.dumps({**asdict(outcome), "ok": good}), flush=True)
    if not good:
        raise Exit(1)
