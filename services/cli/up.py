"""`baton up`: a whole cluster on this machine."""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

import click
from click.exceptions import Exit

from batonmq.cli import context_file
from batonmq.cli.command_classes import command
from batonmq.cli.context_file import ContextError
from batonmq.cli.global_options import GlobalOptions
from batonmq.cli.output import Columns, Minor, Output, OutputFormat
from batonmq.cli.session import CommandSession, global_options, local_session
from batonmq_server.local.child_process import NotReady
from batonmq_server.local.cluster import ClusterFailed, LocalCluster, to_stderr
from batonmq_server.local.console import PORT as CONSOLE_PORT
from batonmq_server.local.console import LocalConsole
from batonmq_server.local.etcd import EtcdNotFound, find_etcd, version_problem
from batonmq_server.local.layout import (
    PORTS_FILE,
    ClusterOptions,
    EtcdsChanged,
    TlsSetupFailed,
    highly_available,
    stored_brokers,
)
from batonmq_server.local.ports import ClusterDirInUse, NoFreePort, PortInUse, stored_ports
from batonmq_server.local.prometheus import (
    Prometheus,
    PrometheusNotFound,
    find_prometheus,
    scrape_targets,
)

NAMESERVER_PORT = 9876
GATEWAY_PORT = 8081
_COLUMNS: Columns = {
    "SERVICE": "name",
    "ADDRESS": "address",
    "METRICS": "metrics_address",
    "PID": Minor("pid"),
}


@command("up")
@click.option(
    "--data-dir",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory that keeps all data of the cluster.",
)
@click.option("--etcd", default="", metavar="HOST:PORT", help="Use a running etcd and start none.")
@click.option(
    "--cluster",
    default="baton",
    show_default=True,
    help="Name of the cluster; clusters that share an etcd need different names.",
)
@click.option(
    "--brokers",
    default=1,
    show_default=True,
    type=click.IntRange(min=1),
    help="Brokers to start; at least as many as the data directory has, and 2 with --profile ha.",
)
@click.option(
    "--nameserver-port",
    type=click.IntRange(0, 65_535),
    metavar="PORT",
    help="Port of the nameserver; 0 takes a free one. By default that of the last start on the "
    f"data directory, or {NAMESERVER_PORT}.",
)
@click.option(
    "--gateway",
    is_flag=True,
    help="Also start a gateway for clients of RocketMQ 5.",
)
@click.option(
    "--gateway-port",
    type=click.IntRange(0, 65_535),
    metavar="PORT",
    help="Port of the gateway; 0 takes a free one. By default that of the last start on the data "
    f"directory, or {GATEWAY_PORT}.",
)
@click.option(
    "--profile",
    default="single",
    show_default=True,
    type=click.Choice(["single", "ha"]),
    help="single: one instance of each service. ha: enough instances to lose one of each.",
)
@click.option(
    "--secure",
    is_flag=True,
    help="Use TLS with certificates created here, and check permissions; commands act as the "
    "administrator by a context that is written for them.",
)
@click.option(
    "--observe",
    is_flag=True,
    help="Also start the Prometheus installed on this machine, with rules and alerts.",
)
@click.option(
    "--console/--no-console",
    default=True,
    show_default=True,
    help="Start the console, web pages of the cluster.",
)
@click.option(
    "--console-port",
    type=click.IntRange(0, 65_535),
    metavar="PORT",
    help="Port of the console; 0 takes a free one. By default that of the last start on the data "
    f"directory, or {CONSOLE_PORT} if it is free; any free one with --nameserver-port 0.",
)
@click.option(
    "--log-level", default="INFO", show_default=True, help="Lowest level that services log."
)
@local_session
def up(
    session: CommandSession,
    data_dir: Path,
    etcd: str,
    cluster: str,
    brokers: int,
    nameserver_port: int | None,
    gateway: bool,
    gateway_port: int | None,
    profile: str,
    secure: bool,
    observe: bool,
    console: bool,
    console_port: int | None,
    log_level: str,
) -> None:
    """Start etcd and the services on loopback ports, and keep them running until Ctrl-C.

    All data is kept in the data directory: a cluster started on it again has the same messages,
    progress and addresses. A process that ends is reported and started again; if a process keeps
    ending, all are stopped and the exit status is 1.

    Without --secure every user of this machine can read and write everything.
    """
    remote = "gateway-clients" if secure else "gateway"
    stored = {"nameserver": NAMESERVER_PORT, remote: GATEWAY_PORT}
    stored |= stored_ports(data_dir / PORTS_FILE)
    os.umask(0o077)  # all files of the cluster are for this user only
    options = ClusterOptions(
        etcd=etcd,
        cluster=cluster,
        brokers=max(brokers, stored_brokers(data_dir)),
        log_level=log_level,
        nameserver_port=_first_given(nameserver_port, stored["nameserver"]),
        gateways=int(gateway),
        gateway_port=_first_given(gateway_port, stored[remote]) if gateway else 0,
        secure=secure,
        access=secure,
    )
    if profile == "ha":
        options = highly_available(options)
    defaults = global_options(click.get_current_context())
    wanted_port = _first_given(console_port, 0 if nameserver_port == 0 else CONSOLE_PORT)
    extras = _Extras(observe, wanted_port if console else None, console_port is not None)
    try:
        session.run(
            _up(session.output, LocalCluster(data_dir, options), defaults, extras),
            endless=True,
        )
    except ClusterDirInUse as error:
        _fail(session, "DATA_DIR_IN_USE", error, "Stop it, or give another --data-dir.")
    except PortInUse as error:
        remedy = (
            "It may be another cluster: stop it, or start this one with --nameserver-port 0, which "
            "takes a free port, and export the variable that it prints. Likewise --gateway-port 0 "
            "and --console-port 0."
        )
        _fail(session, "PORT_IN_USE", error, remedy)
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
    except EtcdsChanged as error:
        remedy = "Give the --profile that it was created with, or another --data-dir."
        _fail(session, "PROFILE_CHANGED", error, remedy)
    except ContextError as error:
        _fail(session, "BAD_CONTEXT", error, "")
    except (OSError, NoFreePort) as error:
        _fail(session, "NOT_STARTED", error, "")


@dataclass(frozen=True, slots=True)
class _Extras:
    """What is started beside the cluster.

    Attributes:
        console_port: Port of the console; None without a console.
        port_chosen: Whether the user has given that port.
    """

    observe: bool
    console_port: int | None
    port_chosen: bool


def _first_given(chosen: int | None, otherwise: int) -> int:
    return otherwise if chosen is None else chosen


async def _up(
    output: Output, cluster: LocalCluster, defaults: GlobalOptions, extras: _Extras
) -> None:
    if extras.observe:
        find_prometheus()  # fails before anything is started
    to_stderr(f"starting a cluster on {cluster.data_dir}")
    if not cluster.options.etcd and (problem := version_problem(find_etcd())):
        to_stderr(f"warning: {problem} (docs/reference/operations.md, etcd)")
    async with cluster, AsyncExitStack() as exits:
        name = _write_context(cluster, defaults.config)
        prometheus_url = ""
        if extras.observe:
            prometheus = Prometheus(cluster.data_dir / "prometheus", scrape_targets(cluster))
            await exits.enter_async_context(prometheus)
            prometheus_url = f"http://{prometheus.address}"
            page = await prometheus.alerts_page()
            to_stderr(f"Prometheus is at http://{prometheus.address}, with alerts at {page}")
        variables = cluster_variables(
            cluster.nameserver, name, uses_tls=defaults.security is not None
        )
        console_url = await _start_console(exits, cluster, extras, prometheus_url)
        _announce(output, cluster, name, variables, console_url)
        for address in cluster.remote_addresses:
            tls = f", with TLS; trust {cluster.security.ca_file}" if cluster.security else ""
            to_stderr(f"clients of RocketMQ 5 call {address}{tls}")
        if name:
            to_stderr("access control is on; grant roles with: baton access grant")
        else:
            to_stderr("TLS IS OFF: every user of this machine can read and write everything")
        try:
            await asyncio.Event().wait()
        finally:
            to_stderr("stopping")


async def _start_console(
    exits: AsyncExitStack, cluster: LocalCluster, extras: _Extras, prometheus: str
) -> str:
    """Start the console, and return its URL; empty if it is not wanted or does not start."""
    if extras.console_port is None:
        return ""
    console = LocalConsole(
        cluster,
        to_stderr,
        port=extras.console_port,
        chosen=extras.port_chosen,
        prometheus=prometheus,
    )
    try:
        await exits.enter_async_context(console)
    except NotReady as error:
        to_stderr(f"warning: the cluster runs without a console: {error}")
        return ""
    return console.url


def _write_context(cluster: LocalCluster, path: Path) -> str:
    """Write a context for a secure cluster, and return its name; empty without TLS.

    The context is made the current one if there is none.

    Raises:
        ContextError: the file can't be used.
    """
    security, name = cluster.security, cluster.options.cluster
    if security is None:
        return ""
    values = {
        "nameserver": cluster.nameserver,
        "ca_file": security.ca_file,
        "cert_file": security.cert_file,
        "key_file": security.key_file,
    }
    contexts = context_file.read(path).with_changes(name, values)
    context_file.write(path, contexts if contexts.current else contexts.with_current(name))
    return name


def cluster_variables(nameserver: str, context: str, *, uses_tls: bool) -> str:
    """Return the variables with which other commands find the cluster.

    Args:
        context: Name of the cluster's context; empty if the cluster has no TLS.
        uses_tls: Whether commands would use TLS otherwise, for instance by the current context.
    """
    if context:
        return f"BATON_CONTEXT={context}"
    return f"BATON_NAMESERVER={nameserver}{' BATON_TLS=false' if uses_tls else ''}"


def _announce(
    output: Output, cluster: LocalCluster, name: str, variables: str, console_url: str
) -> None:
    """Print the addresses of the cluster.

    Args:
        name: Name of the cluster's context; empty for none.
        variables: Variables with which other commands find the cluster.
        console_url: URL of the console; empty for none.
    """
    endpoints = [asdict(endpoint) for endpoint in cluster.endpoints()]
    if output.form is OutputFormat.JSON:
        item = {"nameserver": cluster.nameserver, "context": name or None, "endpoints": endpoints}
        item["console"] = console_url or None
        output.line(item, "")
        return
    output.items(endpoints, _COLUMNS)
    output.note(f"\nexport {variables}\n")
    if console_url:
        output.note(f"console: {console_url}\n")
    to_stderr(f"logs are in {cluster.data_dir / 'logs'}; Ctrl-C stops everything")


def _fail(session: CommandSession, reason: str, error: Exception, remedy: str) -> NoReturn:
    session.output.failure(reason, str(error), remedy)
    raise Exit(1) from error
