"""Goal: the audit log has each refusal and each call of an operator, and no caller can fill it.

Method: the log itself with a clock of the test, and the edge with grants in a real etcd.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton.nameserver.v1 import access_service_pb2, stored_access_pb2
from batonmq._common.clock import Clock
from batonmq._process.config import ConfigError
from batonmq.errors import PermissionDenied
from batonmq_server.nameserver.config import NameserverSettings
from batonmq_server.runtime.access.audit_log import FILES, LINE_INTERVAL_MS, AuditLog
from batonmq_server.runtime.access.permissions import OPERATE
from batonmq_server.runtime.etcd.session import EtcdSession
from batonmq_server.runtime.tls import check_files
from tests.access.edge_scene import METHODS, request_of, scene
from tests.access.test_admission import APPEND, refusal
from tests.storage.schedule_scene import SetClock

GRANT = "/baton.nameserver.v1.AccessService/Grant"
DENIED = PermissionDenied("app lacks produce on topic:orders", facts={"identity": "app"})


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_refusals_of_one_kind_share_a_line_with_their_count(tmp_path: Path) -> None:
    path, clock = tmp_path / "audit", SetClock()
    audit = AuditLog(str(path), 1 << 20, "storage/a", clock)
    for _ in range(1_000):
        audit.refused(APPEND, "app", DENIED)
    audit.refused(APPEND, "other", DENIED)
    clock.pass_ms(LINE_INTERVAL_MS)
    audit.refused(APPEND, "app", DENIED)
    audit.close()
    assert [(one["identity"], one["count"]) for one in lines(path)] == [
        ("app", 1), ("other", 1), ("app", 1_000),
    ]  # fmt: skip
    first = lines(path)[0]
    assert first["time"] == "2023-11-14T22:13:20.000Z"
    assert (first["kind"], first["reason"]) == ("refused", "PERMISSION_DENIED")


def test_size_of_the_log_is_bounded(tmp_path: Path) -> None:
    audit = AuditLog(str(tmp_path / "audit"), 100_000, "storage/a", Clock())
    for _ in range(2_000):
        audit.operated(GRANT, "carol", [OPERATE], None, "OK")
    audit.close()
    files = list(tmp_path.iterdir())
    assert len(files) == FILES
    assert sum(one.stat().st_size for one in files) <= 100_000


def test_request_with_line_breaks_stays_one_line(tmp_path: Path) -> None:
    path = tmp_path / "audit"
    audit = AuditLog(str(path), 1 << 20, "storage/a", Clock())
    request = access_service_pb2.GrantRequest(identity='x"\n{"kind": "operated"}' * 1_000)
    audit.operated(GRANT, "carol\n", [OPERATE], request, "OK")
    audit.close()
    (line,) = lines(path)
    assert line["identity"] == "carol\n"
    assert len(line["request"]) == 2_000


@pytest.mark.parametrize(
    "kind", [access_service_pb2.CreateAccessKeyRequest, access_service_pb2.RotateAccessKeyRequest]
)
def test_secret_that_an_operator_chose_is_not_recorded(tmp_path: Path, kind: Any) -> None:
    path = tmp_path / "audit"
    audit = AuditLog(str(path), 1 << 20, "nameserver/a", Clock())
    request = kind(access_key="SHOP", secret="open-sesame")
    audit.operated(GRANT, "carol", [OPERATE], request, "OK")
    audit.close()
    assert "open-sesame" not in path.read_text()
    assert lines(path)[0]["request"] == 'access_key: "SHOP" secret: "(masked)"'
    assert request.secret == "open-sesame"  # the servicer needs it


def test_audit_file_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    values: dict[str, Any] = {"audit_file": str(tmp_path / "missing" / "audit")}
    settings = NameserverSettings(**values)
    with pytest.raises(ConfigError, match="audit_file"):
        check_files(settings)


async def test_calls_of_an_operator_and_refusals_are_in_the_log(
    etcd: EtcdSession, tmp_path: Path
) -> None:
    path = tmp_path / "audit"
    async with scene(etcd) as at:
        audit = AuditLog(str(path), 1 << 20, "nameserver/a", Clock())
        at.guard.audits.append(audit)
        await at.know("carol", ("admin", "cluster"))
        await at.know("app", ("consume", "topic:orders"))
        grant = stored_access_pb2.AccessGrant(role=stored_access_pb2.ROLE_CONSUME)
        request = access_service_pb2.GrantRequest(identity="billing", grant=grant)
        await at.call(GRANT, request, "carol")
        await refusal(at.call(GRANT, request, "app"))
        await refusal(at.call(APPEND, request_of(METHODS[APPEND]), "app"))
        await refusal(at.call(GRANT, request, "unknown"))
        audit.close()
    entries = [(one["kind"], one["call"], one["identity"], one["reason"]) for one in lines(path)]
    assert entries == [
        ("operated", GRANT, "carol", "OK"),
        ("refused", GRANT, "app", "PERMISSION_DENIED"),
        ("refused", APPEND, "app", "PERMISSION_DENIED"),
        ("refused", GRANT, "", "UNAUTHENTICATED"),
    ]
    first = lines(path)[0]
    assert first["needs"] == ["admin on cluster"]
    assert 'identity: "billing"' in first["request"]
    assert "secret" not in path.read_text()
