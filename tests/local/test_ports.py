"""Goal: ports are kept if possible and never collide, and a directory has one user at a time.

Method: real sockets on loopback and real files; a second process for the lock.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from batonmq_server.local.ports import (
    HOST,
    ClusterDirInUse,
    NoFreePort,
    PortInUse,
    claims_folder,
    is_free,
    keep_ports,
    lock_data_dir,
    stored_ports,
)

NAMES = ["a", "b", "c"]


@contextmanager
def _occupied(port: int) -> Iterator[int]:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((HOST, port))
        server.listen()
        yield server.getsockname()[1]


def test_ports_are_distinct_free_and_kept(tmp_path: Path) -> None:
    first = keep_ports(tmp_path / "ports.json", NAMES)
    assert len(set(first.values())) == 3
    assert all(is_free(port) for port in first.values())
    assert keep_ports(tmp_path / "ports.json", NAMES) == first


def test_clusters_that_start_at_one_time_get_different_ports(tmp_path: Path) -> None:
    """No server listens yet, so all ports look free to both clusters."""
    names = [str(number) for number in range(10)]
    chosen = [
        port
        for number in range(60)
        for port in keep_ports(tmp_path / f"{number}.json", names).values()
    ]
    assert len(set(chosen)) == 600


def test_port_in_use_is_replaced_and_other_ports_are_kept(tmp_path: Path) -> None:
    first = keep_ports(tmp_path / "ports.json", NAMES)
    with _occupied(first["b"]):
        second = keep_ports(tmp_path / "ports.json", NAMES)
    assert second["b"] not in first.values()
    assert (second["a"], second["c"]) == (first["a"], first["c"])


def test_required_port_is_used_whatever_is_stored(tmp_path: Path) -> None:
    path = tmp_path / "ports.json"
    stored = keep_ports(path, NAMES)
    other = keep_ports(tmp_path / "other.json", ["wanted"])["wanted"]
    assert keep_ports(path, NAMES, required={"a": other}) == {**stored, "a": other}


def test_required_port_in_use_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "ports.json"
    stored = keep_ports(path, NAMES)
    with _occupied(stored["a"]) as port, pytest.raises(PortInUse, match=f"port {port} on"):
        keep_ports(path, NAMES, required={"a": port})
    assert stored_ports(path) == stored


def test_preferred_port_is_used_if_it_is_free_and_none_is_stored(tmp_path: Path) -> None:
    # The kernel might give an ephemeral port to an outgoing connection in between.
    with _occupied(keep_ports(tmp_path / "0.json", ["wanted"])["wanted"]) as wanted:
        assert keep_ports(tmp_path / "1.json", NAMES, {"a": wanted})["a"] != wanted
    assert keep_ports(tmp_path / "2.json", NAMES, {"a": wanted})["a"] == wanted
    kept = keep_ports(tmp_path / "1.json", NAMES, {"a": wanted})
    assert kept["a"] != wanted


@pytest.mark.parametrize("spoilt", ["", "[1]", '{"a": "x", "b": 70000}', "{"])
def test_damaged_port_file_is_replaced(tmp_path: Path, spoilt: str) -> None:
    path = tmp_path / "ports.json"
    path.write_text(spoilt)
    chosen = keep_ports(path, NAMES)
    assert json.loads(path.read_text()) == chosen
    assert sorted(chosen) == NAMES


def test_second_lock_is_rejected_and_names_the_first_process(tmp_path: Path) -> None:
    with (
        lock_data_dir(tmp_path / "d"),
        pytest.raises(ClusterDirInUse, match=rf"used by process {os.getpid()}"),
        lock_data_dir(tmp_path / "d"),
    ):
        raise AssertionError("locked twice")
    with lock_data_dir(tmp_path / "d"):
        pass


def test_lock_of_a_killed_process_is_released(tmp_path: Path) -> None:
    code = f"""
import pathlib, time
from batonmq_server.local.ports import lock_data_dir
with lock_data_dir(pathlib.Path({str(tmp_path)!r})):
    print("locked", flush=True)
    time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"locked\n"
        with pytest.raises(ClusterDirInUse, match=str(holder.pid)), lock_data_dir(tmp_path):
            raise AssertionError("locked twice")
        holder.kill()
    with lock_data_dir(tmp_path):
        pass


def test_claims_are_in_a_folder_that_only_this_user_can_use(tmp_path: Path) -> None:
    folder = claims_folder(tmp_path)
    folder.chmod(0o777)
    assert claims_folder(tmp_path) == folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(NoFreePort, match="is not a folder of this user"):
        claims_folder(tmp_path)
    assert claims_folder().is_relative_to(Path.home())


@pytest.mark.parametrize("name", ["lock", "ports.tmp"])
def test_link_in_the_place_of_a_file_is_not_followed(tmp_path: Path, name: str) -> None:
    """Such a link emptied the file that it led to."""
    victim, data_dir = tmp_path / "victim", tmp_path / "d"
    victim.write_text("precious")
    data_dir.mkdir()
    (data_dir / name).symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"):
        if name == "lock":
            with lock_data_dir(data_dir):
                pass
        else:
            keep_ports(data_dir / "ports.json", NAMES)
    assert victim.read_text() == "precious"
