"""`baton up`: a whole cluster on this machine."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from batonmq.cli.output import Form, Output
from batonmq.cli.session import FormatOption, Session, open_session
from batonmq.local.cluster import ClusterFailed, LocalCluster, to_stderr
from batonmq.local.etcd import NoEtcd
from batonmq.local.layout import ClusterOptions, highly_available
from batonmq.local.ports import DataDirInUse, NoFreePort

NAMESERVER_PORT = 9876


class Profile(StrEnum):
    """How much of everything there is."""

    SINGLE = "single"
    HA = "ha"


def up(
    context: typer.Context,
    data_dir: Annotated[
        Path, typer.Option("--data-dir", file_okay=False, help="Where everything is kept.")
    ],
    *,
    etcd: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Use this etcd and start none.")
    ] = "",
    cluster: Annotated[
        str, typer.Option(help="Name of the cluster, for clusters that share an etcd.")
    ] = "baton",
    brokers: Annotated[
        int, typer.Option(min=1, help="Storage nodes to start; never fewer than the folder has.")
    ] = 1,
    profile: Annotated[
        Profile,
        typer.Option(help="single: one of each. ha: enough of everything to lose one of each."),
    ] = Profile.SINGLE,
    log_level: Annotated[str, typer.Option(help="Lowest level the services log.")] = "INFO",
    form: FormatOption = None,
) -> None:
    """Start etcd and the four services on loopback ports and keep them running until Ctrl-C.

    Everything is kept in the data directory: started again on it, the cluster has the same
    messages, progress and addresses. A process that dies is reported and started again; if one
    keeps dying, all are stopped and the exit status is 1.
    """
    session = open_session(context, None, form)
    options = ClusterOptions(
        etcd=etcd,
        cluster=cluster,
        brokers=max(brokers, len(list(data_dir.glob("storage*")))),
        log_level=log_level,
        nameserver_port=NAMESERVER_PORT,
    )
    if profile is Profile.HA:
        options = highly_available(options)
    try:
        session.run(_up(session.output, LocalCluster(data_dir, options)), endless=True)
    except DataDirInUse as error:
        _fail(session, "DATA_DIR_IN_USE", error, "Stop it, or give another --data-dir.")
    except ClusterFailed as error:
        _fail(session, "CLUSTER_FAILED", error, f"The logs are in {data_dir / 'logs'}.")
    except NoEtcd as error:
        _fail(session, "NO_ETCD", error, "")
    except (OSError, NoFreePort) as error:
        _fail(session, "NOT_STARTED", error, "")


async def _up(output: Output, cluster: LocalCluster) -> None:
    to_stderr(f"starting a cluster on {cluster.data_dir}")
    async with cluster:
        _announce(output, cluster)
        try:
            await asyncio.Event().wait()
        finally:
            to_stderr("stopping")


def _announce(output: Output, cluster: LocalCluster) -> None:
    endpoints = [asdict(endpoint) for endpoint in cluster.endpoints()]
    if output.form is Form.JSON:
        output.line({"nameserver": cluster.nameserver, "endpoints": endpoints}, "")
        return
    columns = {"SERVICE": "name", "ADDRESS": "address", "METRICS": "metrics_address", "PID": "pid"}
    output.items(endpoints, columns)
    output.note(f"\nexport BATON_NAMESERVER={cluster.nameserver}\n")
    to_stderr(f"logs are in {cluster.data_dir / 'logs'}; Ctrl-C stops everything")


def _fail(session: Session, reason: str, error: Exception, remedy: str) -> NoReturn:
    session.output.failure(reason, str(error), remedy)
    raise typer.Exit(1) from error
