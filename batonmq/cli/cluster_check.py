"""`baton cluster check` and `baton cluster config`: what is wrong, and what to do."""

from __future__ import annotations

from dataclasses import asdict

import click
from click.exceptions import Exit

from batonmq.admin.cluster_checks import CHECKS, CheckVerdict, cluster_verdicts
from batonmq.admin.cluster_reader import read_cluster
from batonmq.admin.node_state import NodeReport, node_reports
from batonmq.admin.setting_drift import ConfigDrift, config_drift, masked_settings
from batonmq.cli.command_classes import command
from batonmq.cli.output import Columns, Prose, counted
from batonmq.cli.session import CommandSession, cluster_session
from batonmq.errors import InvalidArgument

_COLUMNS: Columns = {
    "CHECK": "name",
    "RESULT": "level",
    "FOUND": Prose(lambda item: "; ".join(item["findings"])),
    "REMEDY": Prose("remedy"),
}
_MORE_COLUMNS: Columns = {"QUESTION": Prose("question")}
_DRIFT_COLUMNS: Columns = {
    "NODES": "scope",
    "VARIABLE": "variable",
    "NODE": "node_id",
    "VALUE": "value",
}


@command("check")
@click.option(
    "--only",
    metavar="NAMES",
    default="",
    help="Only these checks, separated by commas; by default all.",
)
@click.option("--all", "all_", is_flag=True, help="Show the checks that found nothing, too.")
@cluster_session
def check(session: CommandSession, only: str, all_: bool) -> None:
    """Check the cluster, and say what to do about each finding. Changes nothing.

    Needs the role admin on the cluster. Exit status 1 if a check has failed, or could not be
    carried out; warnings leave it 0.
    """
    names = {name.strip() for name in only.split(",") if name.strip()}
    if unknown := sorted(names - {one.name for one in CHECKS}):
        known = ", ".join(one.name for one in CHECKS)
        raise click.UsageError(f"no check {', '.join(unknown)}; the checks are {known}")
    found = [one for one in session.run(_check(session)) if not names or one.name in names]
    shown = [asdict(one) for one in found if all_ or names or one.findings]
    counts = {level: sum(one.level == level for one in found) for level in ("ok", "warning")}
    bad = [one for one in found if not one.level.passed]
    session.output.detail(
        {"checks": [asdict(one) for one in found]}, shown, _COLUMNS, _MORE_COLUMNS
    )
    session.output.note(
        f"{counted(len(found), 'check')}: {counts['ok']} ok, {counts['warning']} with warnings, "
        f"{len(bad)} not passed"
    )
    if bad:
        raise Exit(1)


async def _check(session: CommandSession) -> tuple[CheckVerdict, ...]:
    async with session.admin() as admin:
        return cluster_verdicts(await read_cluster(admin))


@command("config")
@click.option("--diff", is_flag=True, help="Exit status 1 if settings differ.")
@click.option("--service", default="", metavar="NAME", help="Only nodes of this service.")
@cluster_session
def config(session: CommandSession, diff: bool, service: str) -> None:
    """Show settings that differ between nodes of one service. Secrets are not compared.

    Settings that differ by nature, such as names, addresses and folders, are left out. For the
    settings of one node: baton config print --remote. Exit status 1 if a node does not answer.
    """
    reports = session.run(_reports(session, service))
    drifts = config_drift(reports)
    silent = [one for one in reports if one.problem]
    masked = masked_settings(reports)
    session.output.detail(
        {
            "drifts": [asdict(one) for one in drifts],
            "nodes": [one.name for one in reports],
            "not_compared": list(masked),
        },
        [row for one in drifts for row in _rows(one)],
        _DRIFT_COLUMNS,
    )
    answered = counted(len(reports) - len(silent), "node")
    session.output.note(f"{counted(len(drifts), 'setting')} with several values on {answered}")
    if masked:
        session.output.note(f"secrets, not compared: {', '.join(masked)}")
    session.output.problems([f"{one.name}: {one.problem}" for one in silent])
    if diff and drifts:
        raise Exit(1)


async def _reports(session: CommandSession, service: str) -> tuple[NodeReport, ...]:
    async with session.admin() as admin:
        nodes = [n for n in (await admin.cluster()).nodes if service in ("", n.service)]
        if not nodes:
            raise InvalidArgument(
                f"no node of the service {service!r} is registered",
                remedy="See: baton cluster status.",
                facts={"service": service},
            )
        return await node_reports(admin, nodes)


def _rows(drift: ConfigDrift) -> list[dict[str, str]]:
    return [
        {"scope": drift.scope, "variable": drift.variable, "node_id": node_id, "value": value}
        for node_id, value in drift.values.items()
    ]
