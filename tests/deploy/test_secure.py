"""Goal: every certificate that a secure overlay names is made, and is valid for its purpose.

Method: the certificates of `make-ca.sh` are compared with the rendered manifests, and the names of
settings and variables with those that services and `baton` have. The scripts also run with an
openssl that fails in the middle, and with a kubectl that records its arguments.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import click
import pytest
from cryptography import x509

from batonmq._common.clock import Clock
from batonmq._process.config import load
from batonmq.cli.app import baton
from tests.deploy.test_manifests import OPTIONAL, SETTINGS, kubectl
from tools.containers.pods import K8S, REPO, Pod, Resource, jobs, pods
from tools.containers.secrets import Secrets
from tools.manifests.check import render

SCRIPT = REPO / "deploy" / "k8s" / "scripts" / "make-ca.sh"
openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="NO OPENSSL")
SECURE = ("kind-secure", "minikube-secure")
MADE = {f"tls-{name}" for name in (*SETTINGS, "scaler", "billing")} | {"etcd-server", "etcd-client"}


def overlay(name: str) -> list[Resource]:
    return render(K8S / "overlays" / name)


def clients() -> dict[str, Pod]:
    return jobs(render(K8S / "jobs-secure"))


def make_ca(folder: Path, *clients: str, **env: str) -> subprocess.CompletedProcess[str]:
    words = ["env", *(f"{name}={value}" for name, value in env.items()), str(SCRIPT), str(folder)]
    return subprocess.run([*words, *clients], check=False, capture_output=True, text=True)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def program(folder: Path, name: str, text: str) -> str:
    """Write a shell script; return a PATH that has it before the programs of the system."""
    programs = folder / "bin"
    programs.mkdir()
    (programs / name).write_text(f"#!/bin/sh\n{text}\n")
    (programs / name).chmod(0o755)
    return f"{programs}:/usr/local/bin:/usr/bin:/bin"


def names(cert: Path) -> set[str]:
    """Subject alternative names, such as `DNS:localhost`."""
    words = ["openssl", "x509", "-in", str(cert), "-noout", "-ext", "subjectAltName"]
    extension = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    return {name.strip() for name in extension.splitlines()[1].split(",")}


def covers(name: str, host: str) -> bool:
    label, _, rest = host.partition(".")
    return name == f"DNS:{host}" or (label != "*" and name == f"DNS:*.{rest}" and "." in rest)


@kubectl
@openssl
@pytest.mark.parametrize("name", SECURE)
def test_every_secret_is_made_and_valid_for_the_names_of_its_pod(name: str, tmp_path: Path) -> None:
    secrets = Secrets(tmp_path)
    secrets.make()
    overlay_pods = pods(overlay(name))
    assert {pod.service for pod in overlay_pods} == {*SETTINGS, "etcd"} - OPTIONAL
    for pod in overlay_pods:
        for secret in pod.secrets.values():
            files = {path.name for path in (secrets.mounted / secret).iterdir()}
            assert {"ca.crt", "tls.crt", "tls.key"} <= files
        own = "etcd-server" if pod.service == "etcd" else f"tls-{pod.service}"
        assert own in pod.secrets.values()
        alternative_names = names(secrets.file(own, "tls.crt"))
        if pod.service == "etcd":
            hosts = {f"{pod.name}.etcd", f"{pod.name}.etcd.baton.svc"}
        else:
            advertised = pod.env[f"BATON_{pod.service.upper()}_ADVERTISE_ADDRESS"]
            hosts = {advertised.partition(":")[0], "localhost"}
            assert f"URI:service:{pod.service}" in alternative_names
        for host in hosts:
            assert any(covers(one, host) for one in alternative_names), host
    alternative_names = names(secrets.file("tls-nameserver", "tls.crt"))
    for host in ("nameserver", "nameserver.baton", "nameserver.baton.svc"):
        assert f"DNS:{host}" in alternative_names


@openssl
def test_certificates_of_clients_and_services_are_not_valid_for_etcd(tmp_path: Path) -> None:
    assert make_ca(tmp_path, "demo").returncode == 0
    for secret, is_valid in (("tls-demo", False), ("tls-storage", False), ("etcd-client", True)):
        authority, cert = tmp_path / "etcd-ca.crt", tmp_path / secret / "tls.crt"
        words = ["openssl", "verify", "-CAfile", str(authority), str(cert)]
        verification = subprocess.run(words, check=False, capture_output=True)
        assert (verification.returncode == 0) is is_valid


@kubectl
@pytest.mark.parametrize("name", SECURE)
def test_services_require_client_certificates_and_show_theirs_to_etcd(name: str) -> None:
    for pod in pods(overlay(name)):
        if pod.service == "etcd":
            assert pod.env["ETCD_CLIENT_CERT_AUTH"] == pod.env["ETCD_PEER_CLIENT_CERT_AUTH"]
            urls = [word for word in pod.command if "-urls=" in word and "metrics" not in word]
            assert len(urls) == 4
            assert all("=https://" in word for word in urls)
            continue
        settings = load(SETTINGS[pod.service], f"BATON_{pod.service.upper()}", pod.env)
        assert settings.access
        assert settings.access_admins == "operator"
        assert settings.tls_require_client_cert
        assert settings.etcd_security is not None
        assert not settings.insecure_network


@kubectl
def test_jobs_configure_tls_with_the_common_variables() -> None:
    options = [one for one in baton.params if isinstance(one, click.Option)]
    known = {name for option in options for name in _names(option.envvar)}
    for name, secret in (("demo", "tls-demo"), ("traffic", "tls-demo"), ("grants", "tls-operator")):
        pod = clients()[name]
        assert pod.secrets == {"/etc/baton/tls": secret}
        variables = {key: value for key, value in pod.env.items() if key.startswith("BATON_")}
        assert variables.keys() <= known
        for variable, file in (("CA", "ca.crt"), ("CERT", "tls.crt"), ("KEY", "tls.key")):
            assert variables[f"BATON_{variable}_FILE"] == f"/etc/baton/tls/{file}"


def _names(variables: str | Sequence[str] | None) -> list[str]:
    return [variables] if isinstance(variables, str) else list(variables or ())


@openssl
def test_existing_certificates_are_kept_and_renewed_on_request(tmp_path: Path) -> None:
    assert make_ca(tmp_path).returncode == 0
    kept = contents(tmp_path)
    assert make_ca(tmp_path, "billing").returncode == 0
    assert contents(tmp_path).items() >= kept.items()
    assert "URI:billing" in names(tmp_path / "tls-billing" / "tls.crt")
    before = contents(tmp_path)
    assert make_ca(tmp_path, RENEW="1").returncode == 0
    same = {path for path, after in contents(tmp_path).items() if after == before[path]}
    assert {path.name for path in same} == {"ca.crt", "ca.key", "etcd-ca.crt", "etcd-ca.key"}
    assert tmp_path / "tls-billing" / "tls.crt" in before.keys() - same, "one is not renewed"
    assert "URI:billing" in names(tmp_path / "tls-billing" / "tls.crt")


@openssl
def test_certificates_of_another_namespace_are_reissued(tmp_path: Path) -> None:
    assert make_ca(tmp_path, "billing").returncode == 0
    before = contents(tmp_path)
    assert make_ca(tmp_path, NAMESPACE="mq").returncode == 0
    assert "DNS:*.storage.mq.svc" in names(tmp_path / "tls-storage" / "tls.crt")
    certs = {path: text for path, text in contents(tmp_path).items() if path.name == "tls.crt"}
    same = {path.parent.name for path, text in certs.items() if text == before[path]}
    assert same >= {"tls-billing", "etcd-client"}
    assert not same & {"tls-storage", "tls-nameserver", "etcd-server"}


@openssl
def test_services_get_the_dns_names_under_which_outside_clients_reach_them(tmp_path: Path) -> None:
    outside = {"DNS:mq.example.com", "DNS:*.mq.example.com"}
    done = make_ca(tmp_path, "billing", DNS_NAMES="mq.example.com,*.mq.example.com")
    assert done.returncode == 0, done.stderr
    having = {one.parent.name for one in tmp_path.glob("*/tls.crt") if outside <= names(one)}
    assert having == {f"tls-{name}" for name in SETTINGS}


@openssl
@pytest.mark.parametrize("name", ["a b", "mq.example.com\nsubjectKeyIdentifier=none", "*", "a.*.b"])
def test_dns_name_that_is_none_is_rejected(tmp_path: Path, name: str) -> None:
    done = make_ca(tmp_path, DNS_NAMES=f"mq.example.com,{name}")
    assert done.returncode == 1
    assert "a DNS name has" in done.stderr
    assert not contents(tmp_path)


@openssl
def test_expiring_certificates_and_certificates_of_a_former_authority_are_reissued(
    tmp_path: Path,
) -> None:
    assert make_ca(tmp_path, "billing", DAYS="20").returncode == 0
    before = contents(tmp_path)
    assert make_ca(tmp_path).returncode == 0
    after = contents(tmp_path)
    certs = [path for path in after if path.name == "tls.crt"]
    assert len(certs) == 9
    assert all(after[path] != before[path] for path in certs)
    for path in tmp_path.glob("ca.*"):
        path.unlink()
    assert make_ca(tmp_path).returncode == 0
    for path, text in contents(tmp_path).items():
        if path.name == "tls.crt":
            of_etcd = path.parent.name.startswith("etcd-")
            assert (text == after[path]) is of_etcd
            authority = tmp_path / ("etcd-ca.crt" if of_etcd else "ca.crt")
            assert (path.parent / "ca.crt").read_bytes() == authority.read_bytes()
            words = ["openssl", "verify", "-CAfile", str(authority), str(path)]
            subprocess.run(words, check=True, capture_output=True)


@openssl
def test_certificate_is_valid_for_clocks_that_are_behind(tmp_path: Path) -> None:
    assert make_ca(tmp_path).returncode == 0
    files = list(tmp_path.rglob("*.crt"))
    assert len(files) == 18
    for cert in (x509.load_pem_x509_certificate(file.read_bytes()) for file in files):
        begin_unix_ms = cert.not_valid_before_utc.timestamp() * 1_000
        assert 59 * 60_000 < Clock().unix_ms() - begin_unix_ms < 65 * 60_000


@openssl
@pytest.mark.parametrize(
    "identity",
    [
        "spiffe://cluster/a",
        "Billing_1",
        "eve,URI:service:storage",
        "storage",
        "a..b",
        "-a",
        "a" * 65,
    ],
)
def test_identity_that_is_not_a_valid_secret_name_is_rejected(
    tmp_path: Path, identity: str
) -> None:
    done = make_ca(tmp_path, "good", identity)
    assert done.returncode == 1
    assert done.stderr.startswith(f"make-ca.sh: {identity}: ")
    assert not contents(tmp_path)


@openssl
def test_missing_authority_key_is_reported_when_a_certificate_is_requested(
    tmp_path: Path,
) -> None:
    assert make_ca(tmp_path).returncode == 0
    (tmp_path / "ca.key").unlink()
    assert make_ca(tmp_path).returncode == 0
    done = make_ca(tmp_path, "billing")
    assert done.returncode == 1
    assert f"{tmp_path}/ca.key, the key of the authority, is missing" in done.stderr


@openssl
@pytest.mark.parametrize("renew", ["0", "1"])
def test_failure_is_reported_and_leaves_no_partial_certificate(tmp_path: Path, renew: str) -> None:
    folder, real = tmp_path / "tls", shutil.which("openssl")
    before = set()
    if renew == "1":
        assert make_ca(folder).returncode == 0
        before = set(contents(folder))
    # This openssl fails for the certificate of offsets, after it has created the file.
    path = program(
        tmp_path,
        "openssl",
        'case "$*" in *-out*tls-offsets/tls.crt*) while [ "$1" != -out ]; do shift; done; : >"$2"; '
        f'echo "no room on the disk" >&2; exit 1;; esac\nexec {real} "$@"',
    )
    done = make_ca(folder, PATH=path, RENEW=renew)
    assert done.returncode == 1
    assert done.stderr == "make-ca.sh: no room on the disk\n"
    assert (folder / "tls-storage" / "tls.crt").exists()
    assert (folder / "tls-offsets").exists() is (renew == "1")
    if renew == "1":
        assert set(contents(folder)) == before, "no file was added or removed"
    assert not [entry.name for entry in folder.iterdir() if ".new" in entry.name]
    assert make_ca(folder).returncode == 0
    assert "URI:service:offsets" in names(folder / "tls-offsets" / "tls.crt")


@openssl
def test_secrets_are_made_in_their_namespaces_and_the_operator_secret_on_request(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "tls"
    assert make_ca(folder, "operator", "billing").returncode == 0
    (folder / "tls-half").mkdir()
    calls = tmp_path / "calls"
    output = 'case "$*" in *"apply -f /"*) cat "${5}";; *"apply -"*) cat;; esac'
    path = program(tmp_path, "kubectl", f'echo "$*" >>{calls}\n{output}')
    words = [str(SCRIPT.with_name("apply-secrets.sh")), "there", f"{folder}/"]
    env = ["env", f"PATH={path}", "NAMESPACE=bills"]
    for extra, applied_secrets in (([], MADE), (["tls-operator"], {"tls-operator"})):
        calls.unlink(missing_ok=True)
        done = subprocess.run([*env, *words, *extra], check=True, capture_output=True, text=True)
        commands = [line.split() for line in calls.read_text().splitlines() if "create" in line]
        assert {call[5] for call in commands} == applied_secrets
        assert {call[call.index("--namespace") + 1] for call in commands} == {"bills"}
        assert "\n  name: bills\n" in done.stdout
