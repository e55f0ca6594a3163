"""The settings of access.

Goal: access without TLS, where a token proves nothing, is rejected, and so is an OIDC issuer
without what its tokens are checked by; the log and a metric show whether access is on.
Method: the settings, and what is made from them.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from batonmq._common.clock import Clock
from batonmq._process.config import ConfigError, load
from batonmq_server.nameserver.config import NameserverSettings
from batonmq_server.runtime.access.guard import Guard
from batonmq_server.runtime.access.oidc_keys import KeyUrl
from batonmq_server.runtime.etcd.session import EtcdSession
from batonmq_server.runtime.oidc_settings import key_source, oidc_tokens
from batonmq_server.runtime.tls import check_files

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


# ---- the OIDC issuer

ISSUER = {
    **TLS,
    f"{PREFIX}_ACCESS": "true",
    f"{PREFIX}_OIDC_ISSUER": "https://login.example.org/",
    f"{PREFIX}_OIDC_AUDIENCE": "baton, other",
    f"{PREFIX}_OIDC_JWKS_URL": "https://login.example.org/keys",
}


def test_settings_of_an_issuer_give_its_trust() -> None:
    settings = load(NameserverSettings, PREFIX, ISSUER)
    tokens = oidc_tokens(settings, Clock(), CollectorRegistry())
    assert tokens is not None
    assert tokens.trust.audiences == ("baton", "other")
    assert tokens.trust.algorithms == {"RS256", "ES256", "EdDSA"}
    assert (tokens.trust.identity_claim, tokens.trust.identity_prefix) == ("sub", "oidc:")
    assert isinstance(key_source(settings), KeyUrl)
    without = load(NameserverSettings, PREFIX, TLS)
    assert oidc_tokens(without, Clock(), CollectorRegistry()) is None


@pytest.mark.parametrize(
    ("name", "value", "expected_text"),
    [
        ("ACCESS", "false", "oidc_issuer needs access"),
        ("OIDC_AUDIENCE", " ,", "oidc_issuer needs oidc_audience"),
        ("OIDC_JWKS_URL", "", "either oidc_jwks_file or oidc_jwks_url"),
        ("OIDC_JWKS_FILE", "keys.json", "either oidc_jwks_file or oidc_jwks_url"),
        ("OIDC_JWKS_URL", "http://login.example.org/keys", "OIDC_JWKS_URL: String should match"),
        ("OIDC_ISSUER", "", "need oidc_issuer"),
        ("OIDC_IDENTITY_PREFIX", "service:", "must not be service:"),
        ("OIDC_IDENTITY_PREFIX", "", "OIDC_IDENTITY_PREFIX: String should match"),
        ("OIDC_ALGORITHMS", "RS256,HS256", "oidc_algorithms must be some of RS256, ES256, EdDSA"),
        ("OIDC_ALGORITHMS", "none", "oidc_algorithms must be some of"),
        ("OIDC_ALGORITHMS", "", "oidc_algorithms must be some of"),
    ],
)
def test_unusable_settings_of_an_issuer_are_refused(
    name: str, value: str, expected_text: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        load(NameserverSettings, PREFIX, {**ISSUER, f"{PREFIX}_{name}": value})
    assert expected_text in str(refused.value.problems)


@pytest.mark.parametrize("document", [None, "", '{"keys": []}'])
def test_file_without_usable_keys_is_refused_at_the_start(
    tmp_path: Path, document: str | None
) -> None:
    path = tmp_path / "keys.json"
    if document is not None:
        path.write_text(document)
    values: dict[str, Any] = {"oidc_jwks_file": str(path)}
    settings = NameserverSettings.model_construct(**values)
    with pytest.raises(ConfigError, match="oidc_jwks_file: "):
        check_files(settings)
