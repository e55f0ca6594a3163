"""Goal: commands reach a secure cluster by options, variables or a context, and show no secret.

Method: commands in this process on a file of the test, some against a secure cluster as processes.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from batonmq._connection.security import Security
from batonmq.cli.context_file import Context
from batonmq.cli.tls_options import TlsOptions, choose_security
from batonmq_server.cli.up import cluster_variables
from batonmq_server.local.certificates import CertificateAuthority, CertificateSubject
from batonmq_server.local.layout import SERVICES
from tests.cli.baton import RunningCluster, baton, up
from tests.support.conditions import until_now

SECRET = "a-token-that-is-never-shown"
NO_OPTIONS: TlsOptions = dict.fromkeys(
    ("tls", "ca_file", "cert_file", "key_file", "server_name", "token_file")
)
PAIR = {"cert_file": "c.pem", "key_file": "c.key"}


def test_tls_is_off_by_default() -> None:
    assert choose_security(NO_OPTIONS, "", Context()) is None
    assert choose_security({**NO_OPTIONS, "tls": True}, "", Context()) == Security()


def test_certificate_options_win_over_the_context_as_a_pair() -> None:
    context = Context(ca_file="ca.pem", cert_file="old.pem", key_file="old.key")
    assert choose_security(NO_OPTIONS, "", context) == Security(
        ca_file="ca.pem", cert_file="old.pem", key_file="old.key"
    )
    assert choose_security({**NO_OPTIONS, **PAIR}, "", context) == Security(
        ca_file="ca.pem", cert_file="c.pem", key_file="c.key"
    )
    assert choose_security({**NO_OPTIONS, "tls": False}, "", context) is None


def test_token_in_the_environment_wins_over_the_token_file_of_the_context() -> None:
    context = Context(ca_file="ca.pem", token_file="token")
    security = choose_security(NO_OPTIONS, SECRET, context)
    assert security is not None
    assert security.token is not None
    assert (security.token.reveal(), security.token_file) == (SECRET, "")
    assert SECRET not in repr(security)


def test_context_stores_absolute_paths(contexts: Path, tmp_path: Path) -> None:
    done = baton("context", "set", "prod", "--nameserver", ",", "--ca-file", "ca.pem", "--tls")
    assert done.code == 0
    shown = baton("context", "show", "--format", "json").json
    assert (shown["tls"], shown["ca_file"]) == (True, str(Path("ca.pem").absolute()))
    assert "tls = true" in contexts.read_text()
    assert baton("context", "set", "prod", "--no-tls", "--ca-file", "").code == 0
    shown = baton("context", "show", "--format", "json").json
    assert (shown["tls"], shown["ca_file"]) == (None, None)


def test_missing_file_is_named(contexts: Path) -> None:
    baton("context", "set", "prod", "--nameserver", "127.0.0.1:1", "--ca-file", "/nowhere/ca.pem")
    refused = baton("topic", "list")
    assert refused.code == 1
    assert "/nowhere/ca.pem: No such file" in refused.err
    incomplete = baton("--cert-file", "c.pem", "topic", "list")
    assert incomplete.code == 1
    assert "key_file" in incomplete.err
    assert baton("--cert-file", "c.pem", "context", "list").code == 0, (
        "the context can still be repaired"
    )


def test_named_context_is_not_mixed_with_variables(
    contexts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    baton("context", "set", "prod", "--nameserver", "127.0.0.1:1")
    monkeypatch.setenv("BATON_CA_FILE", "/nowhere/ca.pem")
    monkeypatch.setenv("BATON_TOKEN", SECRET)
    assert "/nowhere/ca.pem" in baton("topic", "list").err
    named = baton("--context", "prod", "topic", "list")
    assert "/nowhere/ca.pem" not in named.err
    assert "UNREACHABLE" in named.err


def test_cluster_variables_turn_tls_off_if_a_context_has_it() -> None:
    assert cluster_variables("a:1", "", uses_tls=False) == "BATON_NAMESERVER=a:1"
    assert cluster_variables("a:1", "", uses_tls=True) == "BATON_NAMESERVER=a:1 BATON_TLS=false"
    assert cluster_variables("a:1", "baton", uses_tls=True) == "BATON_CONTEXT=baton"


def test_variables_reach_a_cluster_without_tls_despite_a_context_with_tls(
    contexts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    baton("context", "set", "prod", "--nameserver", "127.0.0.1:1", "--ca-file", "/nowhere/ca.pem")
    assert "/nowhere/ca.pem" in baton("topic", "list").err
    monkeypatch.setenv("BATON_TLS", "false")
    assert "127.0.0.1:1" in baton("topic", "list").err


def test_failed_token_creation_leaves_no_file(tmp_path: Path) -> None:
    file = tmp_path / "billing.token"
    arguments = (
        "--nameserver",
        "127.0.0.1:1",
        "access",
        "token",
        "create",
        "b",
        "--file",
        str(file),
    )
    refused = baton(*arguments)
    assert (refused.code, file.exists()) == (1, False)
    assert "UNREACHABLE" in refused.err
    file.write_text("mine")
    refused = baton(*arguments)
    assert (refused.code, file.read_text()) == (1, "mine")
    assert f"FILE_EXISTS: {file} exists already" in refused.err


@pytest.mark.timeout(120)
def test_no_command_shows_a_secret(
    contexts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = CertificateAuthority(tmp_path / "tls")
    files = authority.issue(CertificateSubject(name="storage", hosts=("127.0.0.1",)))
    key = Path(files.key_file).read_text().splitlines()[1]
    token = tmp_path / "token"
    token.write_text(SECRET)
    settings = {
        "TLS_CERT_FILE": files.cert_file,
        "TLS_KEY_FILE": files.key_file,
        "TLS_CA_FILE": files.ca_file,
        "TOKEN_FILE": str(token),
    }
    for name, value in settings.items():
        monkeypatch.setenv(f"BATON_STORAGE_{name}", value)
    monkeypatch.setenv("BATON_TOKEN", SECRET)
    monkeypatch.setenv("BATON_CA_FILE", files.ca_file)
    for arguments in (
        ("config", "print", "storage"),
        ("context", "set", "prod", "--nameserver", "127.0.0.1:1", "--token-file", str(token)),
        ("context", "show"),
        ("context", "list", "--format", "wide"),
        ("topic", "list", "--format", "json"),
        ("debug", "bundle", "--out", str(tmp_path / "bundle.tar.gz")),
    ):
        done = baton(*arguments)
        assert SECRET not in done.out + done.err, arguments
        assert key not in done.out + done.err, arguments
    assert SECRET not in contexts.read_text()
    with tarfile.open(tmp_path / "bundle.tar.gz") as bundle:
        packed = b"".join(file.read() for one in bundle if (file := bundle.extractfile(one)))
    assert files.key_file.encode() in packed, "the bundle has the settings"
    assert SECRET.encode() not in packed
    assert key.encode() not in packed


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningCluster, Path]]:
    """A secure cluster, and the file of the contexts that it wrote."""
    folder = tmp_path_factory.mktemp("up")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BATON_CONFIG", str(folder / "contexts.toml"))
        with up(folder / "data", "--secure") as running:
            yield running, folder / "contexts.toml"
            assert running.interrupt() == 0


@pytest.mark.long
@pytest.mark.e2e
@pytest.mark.timeout(120)
def test_commands_reach_a_secure_cluster_by_its_context(
    secure: tuple[RunningCluster, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, contexts = secure
    monkeypatch.setenv("BATON_CONFIG", str(contexts))
    assert running.announced["context"] == "baton"
    assert "TLS IS OFF" not in running.stderr_text()
    assert baton("topic", "create", "orders").code == 0
    lines = tmp_path / "lines"
    lines.write_text("1\n2\n3\n")
    assert baton("produce", "orders", "--file", str(lines)).code == 0
    read = baton("consume", "orders", "--group", "g", "--from", "first", "--format", "json")
    assert sorted(line["body"] for line in read.json_lines) == ["1", "2", "3"]
    until_now(lambda: baton("cluster", "status").code == 0)
    status = baton("cluster", "status", "--format", "json").json
    assert {node["service"] for node in status["nodes"]} == set(SERVICES)
    assert baton("bench", "produce", "--count", "100", "--format", "json").code == 0
    assert baton("top", "--once", "--seconds", "1").code == 0
    monkeypatch.setattr("batonmq.admin.diagnostics._TIMEOUT_S", 30)
    bundle = baton("debug", "bundle", "--out", str(tmp_path / "b.tar.gz"), "--format", "json").json
    assert bundle["problems"] == []


@pytest.mark.e2e
@pytest.mark.timeout(120)
def test_traffic_over_tls_prints_its_result_last(
    secure: tuple[RunningCluster, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_CONFIG", str(secure[1]))
    done = baton("traffic", "--seconds", "3", "--rate", "100", "--members", "2")
    assert done.code == 0
    verdict = done.json_lines[-1]
    assert verdict["ok"]
    assert verdict["consumed"] == verdict["sent"] > 50
    assert verdict["lost"] == verdict["duplicated"] == verdict["misordered"] == 0


@pytest.mark.e2e
@pytest.mark.timeout(120)
def test_other_clients_of_a_secure_cluster_need_grants(
    secure: tuple[RunningCluster, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, contexts = secure
    monkeypatch.setenv("BATON_CONFIG", str(contexts))
    assert "access control is on" in running.stderr_text()
    token = tmp_path / "billing.token"
    assert baton("access", "token", "create", "billing", "--file", str(token)).code == 0
    arguments = ("--token-file", str(token), "--format", "json", "topic", "create", "bills")

    def reason() -> str:
        error = json.loads(baton(*arguments).err.splitlines()[-1])
        return str(error["error"]["reason"])

    # The nameserver applies a new token or grant after a short delay.
    until_now(lambda: reason() == "PERMISSION_DENIED")
    assert baton("access", "grant", "billing", "admin", "topic:bills").code == 0
    shown = baton(
        "--format", "json", "quota", "set", "billing", "--topics", "1", "--in-flight", "9"
    )
    assert json.loads(shown.out) == json.loads(baton("--format", "json", "quota", "list").out)[0]
    assert baton("quota", "set", "billing").code == 2, "a limit is required"
    until_now(lambda: baton(*arguments).code == 0)
    blocked = baton("access", "block", "identity:billing", "--reason", "left")
    assert blocked.out == "identity:billing is blocked\n"
    listed = json.loads(baton("--format", "json", "access", "blocks").out)
    assert [(one["subject"], one["reason"], one["by"]) for one in listed] == [
        ("identity:billing", "left", "admin")
    ]
    until_now(lambda: reason() == "UNAUTHENTICATED")
    assert baton("access", "unblock", "identity:billing").code == 0
    until_now(lambda: baton(*arguments).code == 0)


@pytest.mark.e2e
@pytest.mark.timeout(120)
def test_bound_token_works_with_its_certificate_and_blocked_certificates_do_not(
    secure: tuple[RunningCluster, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, contexts = secure
    monkeypatch.setenv("BATON_CONFIG", str(contexts))
    authority = CertificateAuthority(running.stderr.parent / "data" / "tls")
    shop, thief = (authority.issue(CertificateSubject(name=name)) for name in ("shop", "thief"))
    token = tmp_path / "shop.token"
    argv = ("access", "token", "create", "shop", "--bind-to", shop.cert_file, "--file", str(token))
    assert baton(*argv).code == 0
    assert baton("access", "grant", "shop", "admin", "cluster").code == 0

    def reason(files: Security) -> str:
        certificate = ("--cert-file", files.cert_file, "--key-file", files.key_file)
        arguments = ("--token-file", str(token), *certificate, "--format", "json", "topic", "list")
        done = baton(*arguments)
        if done.code == 0:
            return "OK"
        return str(json.loads(done.err.splitlines()[-1])["error"]["reason"])

    until_now(lambda: reason(shop) == "OK")
    assert reason(thief) == "UNAUTHENTICATED"
    assert baton("access", "block", "--certificate", shop.cert_file).code == 0
    until_now(lambda: reason(shop) == "UNAUTHENTICATED")
    assert baton("access", "unblock", "--certificate", shop.cert_file).code == 0
    assert baton("access", "block").code == 2, "a subject or a certificate is required"
    assert baton("access", "block", "--certificate", str(token)).code == 2


@pytest.mark.long
@pytest.mark.e2e
@pytest.mark.timeout(120)
def test_rejected_client_gets_the_reason_and_a_remedy(
    secure: tuple[RunningCluster, Path], tmp_path: Path
) -> None:
    running, _ = secure
    authority = CertificateAuthority(running.stderr.parent / "data" / "tls")
    old = authority.issue(CertificateSubject(name="old"), days=-1)
    trusting = ("--ca-file", str(authority.ca_file))
    arguments = ("--nameserver", running.nameserver, "--format", "json")
    cases = {
        (): "it uses TLS",
        (*trusting, "--cert-file", old.cert_file, "--key-file", old.key_file): "has expired",
    }  # fmt: skip
    for options, reason in cases.items():
        refused = baton(*arguments, *options, "topic", "list")
        assert refused.code == 1
        error = json.loads(refused.err.splitlines()[-1])["error"]
        assert (error["reason"], reason in error["message"]) == ("UNREACHABLE", True), error
        assert error["remedy"]


@pytest.mark.e2e
@pytest.mark.timeout(120)
def test_access_keys_are_created_rotated_and_revoked(
    secure: tuple[RunningCluster, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_CONFIG", str(secure[1]))
    secret = tmp_path / "secret"
    secret.write_text("the-secret-of-before\n")
    key = ("access", "key")
    create = (*key, "create", "shop", "--access-key", "OLDKEY", "--secret-file", str(secret))
    made = baton(*create, "--scope", "produce", "topic:orders")
    assert (made.code, made.out.split()) == (0, ["OLDKEY", "the-secret-of-before"]), made
    assert "not shown again" in made.err
    again = baton(*create)
    assert again.code == 1, "a name is used once"
    rows = baton("access", "list", "shop", "--format", "json").json
    (listed,) = [row for row in rows if row["access_key"]]
    assert (listed["access_key"], listed["scopes"]) == (
        "OLDKEY", [{"role": "produce", "resource": "topic:orders"}],
    )  # fmt: skip
    file = tmp_path / "pair.json"
    rotated = baton(*key, "rotate", "OLDKEY", "--overlap", "1h", "--file", str(file))
    assert rotated.code == 0, rotated
    pair = json.loads(file.read_text())
    assert (rotated.code, pair["access_key"]) == (0, "OLDKEY")
    assert (file.stat().st_mode & 0o777, len(pair["secret"]) > 30) == (0o600, True)
    assert pair["secret"] not in rotated.out + rotated.err
    refused = baton(*key, "rotate", "OLDKEY", "--file", str(file))
    assert (refused.code, json.loads(file.read_text())) == (1, pair)
    revoked = [baton(*key, "revoke", "OLDKEY", "--format", "json").json for _ in range(2)]
    assert [one["revoked"] for one in revoked] == [True, False]
    left = tmp_path / "left.json"
    unknown = baton(*key, "rotate", "OLDKEY", "--file", str(left))
    assert (unknown.code, left.exists()) == (1, False), unknown
