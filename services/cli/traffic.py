"""`baton traffic`: messages that flow while something happens to the cluster, and a verdict."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from batonmq.cli.session import NameserverOption, open_session
from batonmq_server.demo.member_processes import MemberFailed
from batonmq_server.demo.traffic import TrafficPlan, run


def traffic(
    context: typer.Context,
    *,
    nameserver: NameserverOption = None,
    members: Annotated[int, typer.Option(min=1, help="How many handle the messages.")] = 3,
    rate: Annotated[int, typer.Option(min=1, help="Messages sent in a second.")] = 200,
    seconds: Annotated[float, typer.Option(min=0, help="0: until SIGTERM or Ctrl-C.")] = 0,
    repeats: Annotated[
        bool, typer.Option("--repeats", help="Messages marked as redelivered may come twice.")
    ] = False,
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
            raise typer.Exit(1) from error
    good = outcome.ok(repeats)
    print(json.dumps({**asdict(outcome), "ok": good}), flush=True)
    if not good:
        raise typer.Exit(1)
