"""`baton up`: a whole cluster on this machine."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn

import click
from click.exceptions import Exit

from batonmq.cli import context_file
from batonmq.cli.context_file import ContextError
from batonmq.cli.output import Output, OutputFormat
from batonmq.cli.session import CommandSession, local_session, GlobalOptions, open_session
from batonmq_server.local.child_process import NotReady
from batonmq_server.local.cluster import ClusterFailed, LocalCluster, to_stderr
from batonmq_server.local.etcd import EtcdNotFound
from batonmq_server.local.layout import ClusterOptions, TlsSetupFailed, highly_available
from batonmq_server.local.ports import ClusterDirInUse, NoFreePort
from batonmq_server.local.prometheus import (
    Prometheus,
    PrometheusNotFound,
    find_prometheus,
    scrape_targets,
)

NAMESERVER_PORT = 9876


class Profile(StrEnum):
    """How much of everything there is."""

    SINGLE = "single"
    HA = "ha"


@click.command("up")
@click.option(
    "--data-dir",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Where everything is kept.",
)
@click.option("--etcd", default="", metavar="HOST:PORT", help="Use this etcd and start none.")
@click.option(
    "--cluster",
    default="baton",
    show_default=True,
    help="Name of the cluster, for clusters that share an etcd.",
)
@click.option(
    "--brokers",
    default=1,
    show_default=True,
    type=click.IntRange(min=1),
    help="Storage nodes to start; never fewer than the folder has.",
)
@click.option(
    "--profile",
    default="single",
    show_default=True,
    type=click.Choice(["single", "ha"]),
    help="single: one of each. ha: enough of everything to lose one of each.",
)
@click.option(
    "--secure",
    is_flag=True,
    help="Over TLS, with certificates that are made here, and with access on; commands act "
    "as the administrator, by a context.",
)
@click.option(
    "--observe",
    is_flag=True,
    help="Also start the Prometheus of this machine, with rules and alerts.",
)
@click.option(
    "--log-level", default="INFO", show_default=True, help="Lowest level the services log."
)
@local_session
def up(
    session: CommandSession,
    data_dir: Path,
    etcd: str,
    cluster: str,
    brokers: int,
    profile: str,
    secure: bool,
    observe: bool,
    log_level: str,
) -> None:
    """Start etcd and the four services on loopback ports and keep them running until Ctrl-C.

    Everything is kept in the data directory: started again on it, the cluster has the same
    messages, progress and addresses. A process that dies is reported and started again; if one
    keeps dying, all are stopped and the exit status is 1.

    Without --secure whoever is on this machine can read and write everything.
    """
    session, defaults = open_session(context, None, form), context.find_object(GlobalOptions)
    assert defaults is not None
    options = ClusterOptions(
        etcd=etcd,
        cluster=cluster,
        brokers=max(brokers, len(list(data_dir.glob("storage*")))),
        log_level=log_level,
        nameserver_port=NAMESERVER_PORT,
        secure=secure,
        access=secure,
    )
    if profile is Profile.HA:
        options = highly_available(options)
    try:
        session.run(
            _up(session.output, LocalCluster(data_dir, options), defaults, observe=observe),
            endless=True,
        )
    except ClusterDirInUse as error:
        _fail(session, "DATA_DIR_IN_USE", error, "Stop it, or give another --data-dir.")
    except ClusterFailed as error:
        _fail(session, "CLUSTER_FAILED", error, f"The logs are in {data_dir / 'logs'}.")
    except EtcdNotFound as error:
        _fail(session, "NO_ETCD", error, "")
    except PrometheusNotFound as error:
        _fail(session, "NO_PROMETHEUS", error, "Leave out --observe, or install it.")
    except NotReady as error:
        _fail(session, "NOT_READY", error, f"The log is in {data_dir / 'prometheus'}.")
    except TlsSetupFailed as error:
        _fail(session, "NOT_SECURED", error, "")
    except ContextError as error:
        _fail(session, "BAD_CONTEXT", error, "")
    except (OSError, NoFreePort) as error:
        _fail(session, "NOT_STARTED", error, "")


async def _up(
    output: Output, cluster: LocalCluster, defaults: GlobalOptions, *, observe: bool
) -> None:
    if observe:
        find_prometheus()  # before anything is started
    to_stderr(f"starting a cluster on {cluster.data_dir}")
    async with cluster, AsyncExitStack() as exits:
        name = _write_context(cluster, defaults.config)
        if observe:
            prometheus = Prometheus(cluster.data_dir / "prometheus", scrape_targets(cluster))
            await exits.enter_async_context(prometheus)
            to_stderr(f"Prometheus is at http://{prometheus.address}, with alerts at /alerts")
        reach = reached_by(cluster.nameserver, name, secured=defaults.security is not None)
        _announce(output, cluster, name, reach)
        if name:
            to_stderr("access is on: others may do what is granted to them (baton access grant)")
        else:
            to_stderr("TLS IS OFF: whoever is on this machine can read and write everything")
        try:
            await asyncio.Event().wait()
        finally:
            to_stderr("stopping")


def _write_context(cluster: LocalCluster, path: Path) -> str:
    """Name of the context that says how to reach a secure cluster; in use if none was.

    Raises:
        ContextError: the file can't be used.
    """
    security, name = cluster.security, cluster.options.cluster
    if security is None:
        return ""
    said = {
        "nameserver": cluster.nameserver,
        "ca_file": security.ca_file,
        "cert_file": security.cert_file,
        "key_file": security.key_file,
    }
    contexts = context_file.read(path).with_changes(name, said)
    context_file.write(path, contexts if contexts.current else contexts.used(name))
    return name


def reached_by(nameserver: str, context: str, *, secured: bool) -> str:
    """Variables by which other commands find a cluster.

    Args:
        context: Name of the one that knows; empty for none: it has no TLS.
        secured: They would use TLS, such as by the context that is in use.
    """
    if context:
        return f"BATON_CONTEXT={context}"
    return f"BATON_NAMESERVER={nameserver}{' BATON_TLS=false' if secured else ''}"


def _announce(output: Output, cluster: LocalCluster, name: str, reach: str) -> None:
    """Say where everything is.

    Args:
        name: Of the context that knows; empty for none.
        reach: Variables by which other commands find it.
    """
    endpoints = [asdict(endpoint) for endpoint in cluster.endpoints()]
    if output.form is OutputFormat.JSON:
        item = {"nameserver": cluster.nameserver, "context": name or None, "endpoints": endpoints}
        output.line(item, "")
        return
    columns = {"SERVICE": "name", "ADDRESS": "address", "METRICS": "metrics_address", "PID": "pid"}
    output.items(endpoints, columns)
    output.note(f"\nexport {reach}\n")
    to_stderr(f"logs are in {cluster.data_dir / 'logs'}; Ctrl-C stops everything")


def _fail(session: CommandSession, reason: str, error: Exception, remedy: str) -> NoReturn:
    session.output.failure(reason, str(error), remedy)
    raise Exit(1) from error
