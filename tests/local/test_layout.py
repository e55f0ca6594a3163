"""Goal: processes run where and as their cluster's options say, by default on loopback.

Method: the programs of a layout, and of the members of an etcd, without starting them.
"""

from __future__ import annotations

import sys
from pathlib import Path

from batonmq.local.etcd import etcd_members
from batonmq.local.layout import ClusterOptions, Layout
from batonmq.local.place import Place

AWAY = Place(host="127.0.0.9", launcher=("/usr/bin/env", "ROOM=2"))


def test_a_process_runs_on_loopback_unless_it_has_a_place(tmp_path: Path) -> None:
    layout = Layout(tmp_path, options := ClusterOptions(places={"storage": AWAY}))
    programs = {one.name: layout.program(one, "127.0.0.1:1") for one in options.members}
    plain = [sys.executable, "-P", "-m", "services.lockmgr"]
    assert programs["lockmgr"].command == plain
    assert layout.address("lockmgr").startswith("127.0.0.1:")
    assert programs["storage"].command == [*AWAY.launcher, *plain[:-1], "services.storage"]
    assert programs["storage"].env["BATON_STORAGE_HOST"] == AWAY.host
    assert layout.address("storage").startswith(f"{AWAY.host}:")
    assert layout.metrics_address("storage").startswith(f"{AWAY.host}:")


def test_services_may_be_started_by_other_programs(tmp_path: Path) -> None:
    layout = Layout(tmp_path, options := ClusterOptions(programs="other.programs"))
    modules = {layout.program(one, "127.0.0.1:1").command[-1] for one in options.members}
    assert modules == {
        f"other.programs.{one}" for one in ("offsets", "storage", "lockmgr", "nameserver")
    }


def test_members_of_etcd_know_where_the_others_are(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("a", "b")]
    first, second = etcd_members(folders, [tmp_path / "log"] * 2, {"etcd-1": AWAY})
    assert first.endpoint.startswith("127.0.0.1:")
    assert second.endpoint.startswith(f"{AWAY.host}:")
    assert tuple(second.child.program.command[:2]) == AWAY.launcher
    for one in (first, second):
        assert f",etcd-1=http://{AWAY.host}:" in " ".join(one.child.program.command)
