"""Goal: processes run as the options of their cluster say, by default on loopback.

Method: the programs of a layout, and of the members of an etcd, without starting them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.exceptions import InvalidSignature

from batonmq_server.local.etcd import etcd_members
from batonmq_server.local.layout import (
    ClusterOptions,
    EtcdsChanged,
    Layout,
    TlsSetupFailed,
    highly_available,
    stored_brokers,
)
from batonmq_server.local.process_host import ProcessHost

AWAY = ProcessHost(address="127.0.0.9", launcher=("/usr/bin/env", "ROOM=2"))


def test_process_runs_on_loopback_unless_it_has_a_host(tmp_path: Path) -> None:
    layout = Layout(tmp_path, options := ClusterOptions(hosts={"storage": AWAY}))
    programs = {one.name: layout.program(one, "127.0.0.1:1") for one in options.instances}
    plain = [sys.executable, "-m", "batonmq_server.lockmgr"]
    assert programs["lockmgr"].command == plain
    assert layout.address("lockmgr").startswith("127.0.0.1:")
    assert programs["storage"].command == [*AWAY.launcher, *plain[:-1], "batonmq_server.storage"]
    assert programs["storage"].env["BATON_STORAGE_HOST"] == AWAY.address
    assert programs["storage"].env["BATON_STORAGE_INSECURE_NETWORK"] == "True"
    assert layout.address("storage").startswith(f"{AWAY.address}:")
    assert layout.metrics_address("storage").startswith(f"{AWAY.address}:")


def test_services_can_be_started_by_other_programs(tmp_path: Path) -> None:
    layout = Layout(tmp_path, options := ClusterOptions(programs="other.programs"))
    modules = {layout.program(one, "127.0.0.1:1").command[-1] for one in options.instances}
    assert modules == {
        f"other.programs.{one}" for one in ("offsets", "storage", "lockmgr", "nameserver")
    }


def test_etcd_members_know_the_addresses_of_the_others(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("a", "b")]
    first, second = etcd_members(folders, [tmp_path / "log"] * 2, {"etcd-1": AWAY})
    assert first.endpoint.startswith("127.0.0.1:")
    assert second.endpoint.startswith(f"{AWAY.address}:")
    assert tuple(second.child.program.command[:2]) == AWAY.launcher
    for one in (first, second):
        assert f",etcd-1=http://{AWAY.address}:" in " ".join(one.child.program.command)


def test_etcd_syncs_its_data_unless_that_is_switched_off(tmp_path: Path) -> None:
    for fsync in (True, False):
        (etcd,) = etcd_members([tmp_path / "etcd"], [tmp_path / "log"], {}, fsync=fsync)
        assert ("--unsafe-no-fsync" not in etcd.child.program.command) == fsync


def test_secure_cluster_uses_certificates_everywhere(tmp_path: Path) -> None:
    layout = Layout(tmp_path, options := ClusterOptions(secure=True))
    (storage,) = [one for one in options.instances if one.service == "storage"]
    env, tls = layout.program(storage, "127.0.0.1:1").env, tmp_path / "tls"
    for user, folder, name in (("TLS", tls, "storage"), ("ETCD", tls / "etcd", "etcd")):
        assert env[f"BATON_STORAGE_{user}_CA_FILE"] == str(folder / "ca.pem")
        assert env[f"BATON_STORAGE_{user}_CERT_FILE"] == str(folder / f"{name}.pem")
        assert env[f"BATON_STORAGE_{user}_KEY_FILE"] == str(folder / f"{name}.key")
    assert "BATON_STORAGE_INSECURE_NETWORK" not in env
    assert "BATON_STORAGE_ACCESS" not in env
    shown = layout.security()
    assert shown is not None
    assert shown.cert_file == str(tls / "admin.pem")
    (etcd,) = etcd_members([tmp_path / "etcd"], [tmp_path / "log"], {}, layout.security("etcd"))
    command = " ".join(etcd.child.program.command)
    assert "--listen-client-urls=https://" in command
    assert "--listen-peer-urls=https://" in command
    assert "--client-cert-auth" in command
    assert "--peer-client-cert-auth" in command


def test_administrator_has_all_permissions_and_etcd_trusts_its_own_authority_only(
    tmp_path: Path,
) -> None:
    layout = Layout(tmp_path, options := ClusterOptions(secure=True, access=True))
    for member in options.instances:
        env, upper = layout.program(member, "127.0.0.1:1").env, member.service.upper()
        assert env[f"BATON_{upper}_ACCESS"] == "True"
        assert env[f"BATON_{upper}_ACCESS_ADMINS"] == "admin"
    trusted = x509.load_pem_x509_certificate((tmp_path / "tls" / "etcd" / "ca.pem").read_bytes())
    own = x509.load_pem_x509_certificate((tmp_path / "tls" / "etcd" / "etcd.pem").read_bytes())
    own.verify_directly_issued_by(trusted)
    for name in ("admin", "storage"):
        other = x509.load_pem_x509_certificate((tmp_path / "tls" / f"{name}.pem").read_bytes())
        with pytest.raises(InvalidSignature):
            other.verify_directly_issued_by(trusted)


def test_access_control_without_tls_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(TlsSetupFailed, match="identity of callers is unknown"):
        Layout(tmp_path, ClusterOptions(access=True))


def test_authority_is_kept_and_certificates_are_issued_at_each_start(tmp_path: Path) -> None:
    files = [tmp_path / "tls" / name for name in ("ca.pem", "storage.pem")]
    kept = []
    for _ in range(2):
        Layout(tmp_path, ClusterOptions(secure=True))
        kept.append([file.read_bytes() for file in files])
    assert kept[0][0] == kept[1][0]
    assert kept[0][1] != kept[1][1]


def test_running_etcd_is_used_without_tls(tmp_path: Path) -> None:
    layout = Layout(tmp_path, options := ClusterOptions(secure=True, etcd="127.0.0.1:1"))
    env = layout.program(options.instances[0], "127.0.0.1:1").env
    assert "BATON_OFFSETS_TLS_CERT_FILE" in env
    assert "BATON_OFFSETS_ETCD_CA_FILE" not in env


def test_several_etcd_members_can_not_change_to_or_from_tls(tmp_path: Path) -> None:
    (tmp_path / "etcd").mkdir()
    with pytest.raises(TlsSetupFailed, match="created without --secure"):
        Layout(tmp_path, ClusterOptions(etcds=3, secure=True))
    Layout(tmp_path, ClusterOptions(secure=True))
    with pytest.raises(TlsSetupFailed, match="created with --secure"):
        Layout(tmp_path, ClusterOptions(etcds=3))


def test_brokers_of_a_data_directory_are_counted_with_and_without_replicas(tmp_path: Path) -> None:
    assert stored_brokers(tmp_path / "absent") == 0
    for name in ("storage", "storage-1"):
        (tmp_path / "single" / name).mkdir(parents=True)
    for name in ("storage-0-a", "storage-0-b", "storage-1-a", "storage-1-b"):
        (tmp_path / "ha" / name).mkdir(parents=True)
    (tmp_path / "single" / "storage.txt").touch()
    assert stored_brokers(tmp_path / "single") == 2
    assert stored_brokers(tmp_path / "ha") == 2


def test_highly_available_cluster_has_the_brokers_that_were_asked_for() -> None:
    chosen = highly_available(ClusterOptions(brokers=3))
    assert chosen.names_of("storage") == tuple(
        f"storage-{number}-{letter}" for number in range(3) for letter in "ab"
    )
    assert highly_available(ClusterOptions()).brokers == 2


@pytest.mark.parametrize(("before", "now"), [(1, 3), (3, 1)])
def test_number_of_etcd_members_of_a_data_directory_can_not_change(
    tmp_path: Path, before: int, now: int
) -> None:
    layout = Layout(tmp_path, ClusterOptions(etcds=before))
    for number in range(before):
        (layout.etcd_dir(number) / "data").mkdir(parents=True)
    Layout(tmp_path, ClusterOptions(etcds=before))
    with pytest.raises(EtcdsChanged, match=f"the data of {before} etcd members.* have {now}"):
        Layout(tmp_path, ClusterOptions(etcds=now))
    Layout(tmp_path, ClusterOptions(etcds=now, etcd="127.0.0.1:2379"))  # its members are not used
