"""The setting `access`.

Goal: access without TLS, where a token proves nothing, is rejected; the log and a metric show
whether access is on.
Method: the settings, and a guard made from them.
"""

from __future__ import annotations

import logging

import pytest
from prometheus_client import CollectorRegistry

from batonmq._process.config import ConfigError, load
from batonmq_server.nameserver.config import NameserverSettings
from batonmq_server.runtime.access.guard import Guard
from batonmq_server.runtime.etcd.session import EtcdSession

PREFIX = "BATON_NAMESERVER"
TLS = {f"{PREFIX}_TLS_{name}_FILE": name for name in ("CERT", "KEY", "CA")}


def test_access_without_tls_is_rejected() -> None:
    with pytest.raises(ConfigError, match="access needs tls_cert_file"):
        load(NameserverSettings, PREFIX, {f"{PREFIX}_ACCESS": "true"})


def test_access_is_off_by_default() -> None:
    assert not load(NameserverSettings, PREFIX, TLS).access
    assert load(NameserverSettings, PREFIX, {**TLS, f"{PREFIX}_ACCESS": "true"}).access


@pytest.mark.parametrize(
    ("on", "level", "logged"),
    [(True, "INFO", "access is on admins=root,carol"), (False, "WARNING", "ACCESS IS OFF")],
)
def test_log_and_metric_show_whether_access_is_on(
    etcd: EtcdSession, caplog: pytest.LogCaptureFixture, on: bool, level: str, logged: str
) -> None:
    registry = CollectorRegistry()
    guard = Guard(etcd, registry, on=on, admins=["root", " carol"])
    with caplog.at_level(logging.INFO):
        guard.add_rules({})
    (record,) = caplog.records
    assert record.levelname == level
    assert record.message.startswith(logged)
    assert registry.get_sample_value("baton_access_on") == on
