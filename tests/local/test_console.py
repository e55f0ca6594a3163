"""Goal: the console of a local cluster has the port that the user chooses.

Method: the object alone, which chooses its port when it is created; no process is started.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from batonmq_server.local.cluster import LocalCluster
from batonmq_server.local.console import LocalConsole
from batonmq_server.local.layout import ClusterOptions
from batonmq_server.local.ports import PortInUse, keep_ports


@dataclass
class StandIn:
    """The part of a cluster that the console reads."""

    data_dir: Path
    nameserver: str = "127.0.0.1:9876"
    options: ClusterOptions = field(default_factory=ClusterOptions)
    security: None = None


def console(folder: Path, **options: Any) -> LocalConsole:
    return LocalConsole(cast("LocalCluster", StandIn(folder)), print, **options)


def test_chosen_port_replaces_that_of_the_last_start(tmp_path: Path) -> None:
    last = console(tmp_path, port=0).address
    port = keep_ports(tmp_path / "other.json", ["other"])["other"]
    assert console(tmp_path, port=port).address == last
    assert console(tmp_path, port=port, chosen=True).address == f"127.0.0.1:{port}"
    assert console(tmp_path, port=0, chosen=True).address == f"127.0.0.1:{port}"


def test_chosen_port_in_use_is_an_error(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(PortInUse, match=f"{port} on 127.0.0.1, wanted for the console"):
            console(tmp_path, port=port, chosen=True)
